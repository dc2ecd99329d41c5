"""The pool's states with servers made of Python: who serves, and when the version moves."""

import threading
import time
from pathlib import Path

import pytest

from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.published import Published
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.rollout.vllm_verify import WeightMismatch
from tests.unit.rollout.fake_servers import LIMITS, FakeClient, expected, load, published, wait_for


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
    assert pool.version == 0 and pool.ready() == [], "the other server holds version 1, and the pool's is 0"
    assert pool.blank(), "a draw pushes again before it sends anything"
    pool.update(published(1), load)
    assert pool.version == 1 and pool.ready() == [0, 1] and not pool.blank()


def test_servers_that_refuse_a_load_wait_for_the_next(pool):
    pool.update(published(0), load)

    def refuse(client, what):
        raise ValueError("answered 400")

    with pytest.raises(ValueError, match="answered 400"):
        pool.update(published(1), refuse)
    assert pool.version == 0 and pool.ready() == [] and pool.blank()
    pool.update(published(0), load)
    assert pool.version == 0 and pool.ready() == [0, 1]


def test_a_closed_pool_tells_a_draw_that_still_waits_for_a_server(pool):
    pool.update(published(0), load)
    pool.close()
    with pytest.raises(RunFailure, match="the engine servers were stopped"):
        pool.ready()


def test_a_server_found_by_its_url_is_loaded_and_verified_before_it_serves():
    client = FakeClient("something old")
    pool = ServerPool([], [client], {}, LIMITS)
    client.url = "http://h:1"
    pool.update(published(4), load)
    assert pool.shortest() == (512, "http://h:1 (its --max-model-len)")
    assert pool.ready() == [0] and client.holds == "weights 4" and client.events[:4] == ["wake None", "jetrl_prepare", "pause", "load"]


def test_a_server_of_another_version_of_this_project_is_refused(monkeypatch):
    client = FakeClient("something old")
    client.url = "http://h:1"
    monkeypatch.setattr(FakeClient, "rpc", lambda *call: [None])
    with pytest.raises(ValueError, match="http://h:1 runs another version of jetrl-megatron: install"):
        ServerPool([], [client], {}, LIMITS).update(published(4), load)
