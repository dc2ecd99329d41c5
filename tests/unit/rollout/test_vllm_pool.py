"""The pool's states with servers made of Python: who serves, when the version moves, how a dead server comes back."""

import re
import threading
import time
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.published import Expected, Published
from jetrl_megatron.rollout.vllm_client import ServerGone
from jetrl_megatron.rollout.vllm_pool import PoolLimits, ServerPool
from jetrl_megatron.rollout.vllm_verify import WeightMismatch

LIMITS = PoolLimits(request_timeout_s=1.0, push_timeout_s=1.0, max_restarts=2)


def expected(step):
    return Expected(version=WeightVersion(step, ""), by_rank=({"w[0:1,0:1]": f"weights {step}"},))


def published(step, has_weights=True):
    return Published(step=step, directory=Path(f"v{step}"), has_weights=has_weights, algorithm="sha256", expected=expected(step).at_hand())


class FakeClient:
    """A server's other end; `holds` is what it computes with."""

    def __init__(self, holds):
        self.holds, self.alive, self.paused, self.events, self.keeps_prefixes = holds, True, False, [], False
        self.asked = {}

    def _need_life(self, event):
        self.events.append(event)
        if not self.alive:
            raise ServerGone("connection refused")

    def healthy(self):
        return self.alive

    def pause(self, timeout_s):
        self._need_life("pause")
        self.paused = True

    def resume(self):
        self._need_life("resume")
        self.paused = False

    def reset_prefix_cache(self):
        self._need_life("reset")
        if self.keeps_prefixes:
            raise ServerGone("the prefix cache was not reset")

    def rpc(self, method, kwargs, timeout_s):
        self._need_life(method)
        self.asked = kwargs
        return [{"rank": 0, "held": {"w[0:1,0:1]": self.holds}, "unsigned_zeros": [], "changed_buffers": []}]


class FakeServer:
    """Starts at once; holds what lies in the directory it is started on."""

    client_class = FakeClient

    def __init__(self):
        self.pid, self.starts, self.hold_start, self.broken = 1, [], threading.Event(), False
        self.hold_start.set()

    def start(self, directory, with_weights):
        self.starts.append(directory.name)
        self.hold_start.wait(10)
        if self.broken:
            raise RuntimeError("it does not start")
        self.pid = 1
        self.client = self.client_class(directory.name.replace("v", "weights ") if with_weights else "random")
        return self.client

    def stop(self):
        self.pid = 0


def load(client, what):
    client._need_life("load")
    client.holds = f"weights {what.step}"


@pytest.fixture
def pool():
    made = ServerPool([FakeServer(), FakeServer()], [], {}, LIMITS)
    made.servers = [m.server for m in made._members]
    return made


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_servers_start_on_the_published_weights_and_serve_after_verification(pool):
    assert pool.version == -1 and pool.ready() == []
    pool.update(published(0), load)
    assert pool.version == 0 and pool.ready() == [0, 1]
    assert pool.servers[0].client.events == ["jetrl_fingerprints", "reset", "resume"]


def test_a_push_pauses_loads_verifies_empties_the_cache_and_only_then_resumes(pool):
    pool.update(published(0), load)
    for server in pool.servers:
        server.client.events.clear()
    pool.update(published(1), load)
    assert pool.version == 1
    assert pool.servers[1].client.events == ["pause", "load", "jetrl_fingerprints", "reset", "resume"]


def test_a_push_says_where_its_time_went(pool):
    pool.update(published(0), load)
    assert list(pool.counts.push_s) == ["boot", "verify", "admit"], "nothing was loaded into servers that started on the weights"

    def slowly(client, what):
        time.sleep(0.1 if client is pool.servers[1].client else 0.0)
        load(client, what)

    pool.update(published(1), slowly)
    assert list(pool.counts.push_s) == ["boot", "pause", "load", "verify", "admit"] and pool.counts.push_s["load"] >= 0.1
    pool.servers[1].client.alive = False
    pool.servers[1].hold_start.clear()

    def start_slowly():
        wait_for(lambda: len(pool.servers[1].starts) == 2)
        time.sleep(0.2)
        pool.servers[1].hold_start.set()

    threading.Thread(target=start_slowly, daemon=True).start()
    pool.update(published(2), load)
    assert pool.counts.restarts == 1 and pool.counts.push_s["boot"] >= 0.1, "the server that came back was waited for"


def test_verification_refreshes_first_and_looks_at_buffers_only_after_a_sleep(pool):
    pool.update(published(0), load)
    asked = pool.servers[0].client.asked
    assert asked == {"config": {}, "algorithm": "sha256", "refresh": True, "slept": False}


def test_nothing_serves_and_no_version_moves_before_the_last_tensor_is_hashed(pool):
    """Loading and the servers' own hashing do not wait for the actor's."""
    pool.update(published(0), load)
    late = Published(step=1, directory=Path("v1"), has_weights=False, algorithm="sha256")
    pushed = threading.Thread(target=lambda: pool.update(late, load), daemon=True)
    pushed.start()
    wait_for(lambda: all(s.client.events[-1] == "jetrl_fingerprints" and s.client.holds == "weights 1" for s in pool.servers))
    time.sleep(0.05)
    assert pushed.is_alive() and pool.ready() == [] and pool.version == 0
    late.settle(lambda: expected(1))
    pushed.join(5.0)
    assert not pushed.is_alive() and pool.ready() == [0, 1] and pool.version == 1


def test_an_actor_that_fails_while_it_sends_leaves_the_version_and_nobody_waits(pool):
    pool.update(published(0), load)
    late = Published(step=1, directory=Path("v1"), has_weights=False, algorithm="sha256")
    failures = []

    def push():
        try:
            pool.update(late, load)
        except RunFailure as failure:
            failures.append(str(failure))

    def fail():
        raise KeyboardInterrupt

    pushed = threading.Thread(target=push, daemon=True)
    pushed.start()
    with pytest.raises(KeyboardInterrupt):
        late.settle(fail)
    pushed.join(5.0)
    assert failures == ["the actor did not send version 1 to its end"] and pool.version == 0 and pool.ready() == []
    pool.update(published(2), load)
    assert pool.version == 2 and pool.ready() == [0, 1]


def test_one_server_that_holds_something_else_keeps_the_version_where_it_was(pool):
    pool.update(published(0), load)

    def forget_one(client, what):
        if client is not pool.servers[1].client:
            load(client, what)

    with pytest.raises(WeightMismatch, match=r"server 1 does not hold version 1: rank 0: w\[0:1,0:1\] differs"):
        pool.update(published(1), forget_one)
    assert pool.version == 0 and 1 not in pool.ready()


def test_a_server_that_dies_in_a_push_starts_anew_on_what_is_pushed(pool):
    pool.update(published(0), load)

    def kill_one(client, what):
        if client is pool.servers[0].client and what.step == 1 and len(pool.servers[0].starts) == 1:
            client.alive = False
        load(client, what)

    pool.update(published(1), kill_one)
    assert pool.version == 1 and pool.ready() == [0, 1] and pool.counts.restarts == 1
    assert pool.servers[0].starts == ["v0", "v1"] and pool.servers[0].client.holds == "weights 1"


def test_a_server_that_keeps_its_prefixes_does_not_serve_and_starts_anew(pool):
    """Prefixes computed with the old weights would be read with the new ones."""
    pool.update(published(0), load)
    old = pool.servers[0].client
    old.keeps_prefixes = True
    pool.update(published(1), load)
    assert old.events[-1] == "reset" and old.paused, "it was never let go"
    assert pool.servers[0].client is not old and pool.servers[0].starts == ["v0", "v1"]
    assert pool.version == 1 and pool.ready() == [0, 1] and pool.counts.restarts == 1


def test_prefixes_that_no_restart_gets_rid_of_cost_the_server(pool, monkeypatch):
    pool.update(published(0), load)

    def refuse(client):
        raise ServerGone("the prefix cache was not reset")

    monkeypatch.setattr(FakeClient, "reset_prefix_cache", refuse)
    with pytest.raises(RuntimeError, match=r"no engine server is left: server 0: .*not reset"):
        pool.update(published(1), load)
    assert pool.version == 0


def test_a_server_that_dies_between_pushes_is_out_until_it_is_verified_on_the_current_weights(pool):
    pool.update(published(0), load)
    pool.update(published(1), load)
    server = pool.servers[0]
    server.hold_start.clear()
    server.client.alive = False
    for _ in range(3):  # every request that was in flight there reports it
        pool.gone(0, ServerGone("reset"))
    assert pool.ready() == [1] and pool.counts.restarts == 1
    server.hold_start.set()
    wait_for(lambda: pool.ready() == [0, 1])
    assert server.starts == ["v0", "v1"] and server.client.events[-1] == "resume"


def test_a_server_that_fails_a_request_and_lives_is_not_restarted(pool):
    pool.update(published(0), load)
    pool.gone(0, ServerGone("timed out"))
    assert pool.ready() == [0, 1] and pool.counts.restarts == 0


def test_a_server_that_dies_too_often_is_lost_and_the_rest_goes_on(pool):
    pool.update(published(0), load)
    pool.servers[0].broken, pool.servers[0].client.alive = True, False
    pool.gone(0, ServerGone("reset"))
    wait_for(lambda: pool._members[0].state == "lost")
    pool.update(published(1), load)
    assert pool.ready() == [1] and pool.version == 1
    pool.servers[1].broken, pool.servers[1].client.alive = True, False
    pool.gone(1, ServerGone("reset"))
    wait_for(lambda: pool._members[1].state == "lost")
    with pytest.raises(RuntimeError, match="no engine server is left: server 0: it does not start; server 1: it does not start"):
        pool.ready()


def test_without_weights_on_disk_a_server_stays_blank_until_a_push(pool):
    pool.update(published(0, has_weights=False), load)
    assert pool.ready() == [0, 1] and not pool.blank()
    pool.servers[0].client.alive = False
    pool.gone(0, ServerGone("reset"))
    wait_for(pool.blank)
    assert pool.ready() == [1] and pool.servers[0].client.holds == "random"
    pool.update(published(0, has_weights=False), load)
    assert pool.ready() == [0, 1] and pool.servers[0].client.holds == "weights 0"


def test_a_closed_pool_tells_a_draw_that_still_waits_for_a_server(pool):
    pool.update(published(0), load)
    pool.close()
    with pytest.raises(RunFailure, match="the engine servers were stopped"):
        pool.ready()


def test_a_server_found_by_its_url_is_loaded_and_verified_before_it_serves():
    client = FakeClient("something old")
    pool = ServerPool([], [client], {}, LIMITS)
    pool.update(published(4), load)
    assert pool.ready() == [0] and client.holds == "weights 4" and client.events[:3] == ["jetrl_prepare", "pause", "load"]


@pytest.mark.parametrize("failure", [ValueError("answered 401"), OSError("no space left on device"), TimeoutExpired("guard", 30.0)])
def test_a_server_that_cannot_be_restarted_for_whatever_reason_is_lost_and_no_draw_waits_for_it(pool, failure):
    pool.update(published(0), load)

    def start(directory, with_weights):
        raise failure

    for server in pool.servers:
        server.start, server.client.alive = start, False
    for number in (0, 1):
        pool.gone(number, ServerGone("reset"))
    wait_for(lambda: all(m.state == "lost" for m in pool._members))
    with pytest.raises(RunFailure, match=re.escape(f"server 0: {failure}; server 1: {failure}")):
        pool.ready()
