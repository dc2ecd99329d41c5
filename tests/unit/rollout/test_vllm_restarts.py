"""Servers that die, with servers made of Python: who comes back, on which weights, and who is lost."""

import re
from subprocess import TimeoutExpired

import pytest

from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.vllm_client import ServerGone
from tests.unit.rollout.fake_servers import FakeClient, load, published, wait_for


def test_a_server_that_dies_in_a_push_starts_anew_on_what_is_pushed(pool):
    pool.update(published(0), load)

    def kill_one(client, what):
        if client is pool.servers[0].client and what.step == 1 and len(pool.servers[0].starts) == 1:
            client.alive = False
        load(client, what)

    pool.update(published(1), kill_one)
    assert pool.version == 1 and pool.ready() == [0, 1] and pool.counts.restarts == 1
    assert pool.servers[0].starts == ["v0", "v1"] and pool.servers[0].client.holds == "weights 1"


@pytest.mark.parametrize("dies_at", ["pause", "load", "jetrl_fingerprints", "reset", "resume"])
def test_wherever_a_server_dies_in_a_push_no_other_waits_and_it_comes_back(pool, dies_at, monkeypatch):
    pool.update(published(0), load)
    old, plain = pool.servers[0].client, FakeClient._need_life

    def need_life(client, event):
        client.alive = client.alive and not (client is old and event == dies_at)
        plain(client, event)

    monkeypatch.setattr(FakeClient, "_need_life", need_life)
    pool.update(published(1), load)
    assert pool.servers[0].starts == ["v0", "v1"] and pool.servers[1].starts == ["v0"] and not old.alive
    assert pool.version == 1 and pool.ready() == [0, 1] and not pool.blank()
    assert [s.client.holds for s in pool.servers] == ["weights 1"] * 2


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


@pytest.mark.parametrize("failure", [ValueError("answered 401"), OSError("no space left on device"), TimeoutExpired("guard", 30.0)])
def test_a_server_that_cannot_be_restarted_for_whatever_reason_is_lost_and_no_draw_waits_for_it(pool, failure, caplog):
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
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("engine server 0 is gone")]
    assert said[0] == "engine server 0 is gone (reset); it is restarted"
    assert said[-1] == f"engine server 0 is gone while it came back ({failure}); it is given up"
