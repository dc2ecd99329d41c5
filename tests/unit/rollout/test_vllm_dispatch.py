"""Requests over servers that die: everything comes back, once, from a server that was allowed to serve."""

import threading
import time

import pytest

from jetrl_megatron.rollout.vllm_client import ServerGone
from jetrl_megatron.rollout.vllm_dispatch import Dispatcher


class FakePool:
    """Servers by number; a dead one is out until `revive` is called."""

    def __init__(self, num):
        self.alive = set(range(num))
        self.lost = False
        self.reported = []

    def ready(self):
        if self.lost:
            raise RuntimeError("no engine server is left: server 0: it burnt")
        return sorted(self.alive)

    def gone(self, server, cause):
        self.reported.append(server)
        self.alive.discard(server)


def test_results_come_in_order_whatever_order_they_end_in():
    def send(server, item):
        time.sleep(0.001 * (7 * item % 5))
        return item * item

    dispatcher = Dispatcher(list(range(40)), send, FakePool(3), slots=4, max_repeats=0)
    assert dispatcher.run() == [i * i for i in range(40)]
    assert sum(dispatcher.counts.sent.values()) == 40 and dispatcher.counts.repeated == 0


def test_no_server_gets_more_than_its_slots_and_all_get_their_share():
    lock, running, most = threading.Lock(), {0: 0, 1: 0}, {0: 0, 1: 0}

    def send(server, item):
        with lock:
            running[server] += 1
            most[server] = max(most[server], running[server])
        time.sleep(0.005)
        with lock:
            running[server] -= 1

    dispatcher = Dispatcher(list(range(64)), send, FakePool(2), slots=3, max_repeats=0)
    dispatcher.run()
    assert most == {0: 3, 1: 3}
    assert min(dispatcher.counts.sent.values()) >= 16


def test_requests_go_to_the_server_that_is_free_while_another_is_held_up():
    def send(server, item):
        time.sleep(0.6 if item == 0 else 0.002)
        return server

    dispatcher = Dispatcher(list(range(30)), send, FakePool(2), slots=1, max_repeats=0)
    start_s = time.monotonic()
    servers = dispatcher.run()
    assert time.monotonic() - start_s < 5.0
    assert servers.count(servers[0]) <= 2


def test_a_server_that_dies_loses_and_doubles_nothing():
    pool, answered, lock = FakePool(2), [], threading.Lock()

    def send(server, item):
        time.sleep(0.002)
        if server == 0 and item >= 6:
            raise ServerGone("connection reset")
        with lock:
            answered.append(item)
        return item

    dispatcher = Dispatcher(list(range(50)), send, pool, slots=4, max_repeats=2)
    assert dispatcher.run() == list(range(50))
    assert sorted(answered) == list(range(50))
    assert pool.reported and set(pool.reported) == {0}
    assert dispatcher.counts.repeated == len(pool.reported)


def test_requests_wait_for_a_server_that_comes_back():
    pool = FakePool(1)
    failed = threading.Event()

    def send(server, item):
        if not failed.is_set():
            failed.set()
            threading.Timer(0.3, lambda: pool.alive.add(0)).start()
            raise ServerGone("killed")
        return item

    assert Dispatcher([5, 6], send, pool, slots=1, max_repeats=1).run() == [5, 6]


def test_a_request_that_fails_too_often_ends_the_batch_with_its_cause():
    pool = FakePool(1)
    pool.gone = lambda server, cause: None

    def send(server, item):
        raise ServerGone("it answered 500")

    with pytest.raises(RuntimeError, match=r"request \d failed 3 times, last: it answered 500"):
        Dispatcher([1, 2], send, pool, slots=2, max_repeats=2).run()


def test_a_refused_request_is_not_sent_again():
    sent = []

    def send(server, item):
        sent.append(item)
        raise ValueError("answered 400")

    with pytest.raises(ValueError, match="answered 400"):
        Dispatcher([1], send, FakePool(2), slots=1, max_repeats=5).run()
    assert sent == [1]


def test_no_server_left_ends_the_batch():
    pool = FakePool(1)
    pool.lost = True
    with pytest.raises(RuntimeError, match="it burnt"):
        Dispatcher([1], lambda server, item: item, pool, slots=1, max_repeats=5).run()
