"""Servers that sleep while the actor trains: the order of calls, who may serve when, and one that dies asleep."""

import threading

import pytest

from jetrl_megatron.rollout.vllm_client import EngineClient, ServerGone
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.rollout.vllm_verify import WeightMismatch
from jetrl_megatron.sync.relay import Relay
from tests.unit.rollout.fake_servers import LIMITS, FakeClient, FakeServer, load, published, wait_for

WAKE = [
    "wake weights",
    "pause",
    "load",
    "jetrl_fingerprints",
    "wake kv_cache",
    "reset",
    "resume",
]


class Client(FakeClient):
    """A server with two parts of memory; what it computes with is gone when it has slept."""

    def __init__(self, holds):
        super().__init__(holds)
        self.mapped, self.changed = {"weights", "kv_cache"}, []

    def sleep(self, timeout_s):
        self._need_life("sleep")
        self.holds, self.mapped = "garbage", set()

    def wake(self, part, timeout_s):
        self._need_life(f"wake {part}")
        self.mapped.add(part)  # what is awake stays as it is, as in vLLM

    def resume(self):
        super().resume()
        assert self.mapped == {"weights", "kv_cache"}

    def rpc(self, method, kwargs, timeout_s):
        reports = super().rpc(method, kwargs, timeout_s)
        assert "weights" in self.mapped
        return [report | {"changed_buffers": self.changed if kwargs["slept"] else []} for report in reports]


class Server(FakeServer):
    client_class = Client

    def stop(self):
        super().stop()
        self.client.alive = False


def load_awake(client, what):
    assert client.mapped == {"weights"}, "the KV cache is not there yet"
    load(client, what)


@pytest.fixture
def pool():
    made = ServerPool([Server(), Server()], [], {}, LIMITS)
    made.servers = [m.server for m in made._members]
    made.update(published(0), load)
    for server in made.servers:
        server.client.events.clear()
    return made


def test_sleep_then_weights_load_verify_kv_cache_prefixes_resume(pool):
    pool.rest()
    assert pool.asleep() and pool.ready() == [] and not pool.blank()
    assert [s.client.events for s in pool.servers] == [["sleep"]] * 2
    seen = []

    def look(client, what):
        seen.append((pool.ready(), pool.version))
        load_awake(client, what)

    pool.update(published(1), look)
    assert [s.client.events for s in pool.servers] == [["sleep", *WAKE]] * 2 and all(s.client.asked["slept"] for s in pool.servers)
    assert {version for _, version in seen} == {0} and not pool.asleep()
    assert pool.ready() == [0, 1] and pool.version == 1 and [s.client.holds for s in pool.servers] == ["weights 1"] * 2


def test_the_same_version_is_loaded_again_by_a_server_that_slept(pool):
    """Also by one that had been started on these very weights: it holds garbage all the same."""
    pool.servers[0].client.alive = False
    pool.gone(0, ServerGone("reset"))
    wait_for(lambda: pool.ready() == [0, 1])
    pool.rest()
    pool.update(published(0), load_awake)
    assert pool.ready() == [0, 1] and [s.client.holds for s in pool.servers] == ["weights 0"] * 2


def test_a_push_without_a_rest_wakes_nobody(pool):
    pool.update(published(1), load)
    assert not [e for s in pool.servers for e in s.client.events if e.startswith("wake")]


def test_a_server_that_wakes_with_other_weights_gets_no_kv_cache_and_no_requests(pool):
    pool.rest()

    def forget_one(client, what):
        if client is not pool.servers[1].client:
            load_awake(client, what)

    with pytest.raises(WeightMismatch, match="server 1 does not hold version 1"):
        pool.update(published(1), forget_one)
    assert pool.version == 0 and pool.ready() == [] and pool.servers[1].client.mapped == {"weights"}
    assert pool.asleep(), "no draw waits for it: it is refused"
    pool.update(published(2), load)
    assert pool.ready() == [0, 1] and pool.version == 2 and not pool.asleep()
    assert pool.servers[1].client.mapped == {"weights", "kv_cache"} and pool.servers[1].client.asked["slept"]


def test_a_server_that_lost_a_buffer_in_its_sleep_gets_no_requests(pool):
    pool.rest()
    pool.servers[1].client.changed = ["rotary_emb.cos_sin_cache"]
    with pytest.raises(WeightMismatch, match=r"server 1 did not wake .*: buffer rotary_emb\.cos_sin_cache differs"):
        pool.update(published(1), load_awake)
    assert pool.version == 0 and 1 not in pool.ready()


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_server_that_dies_asleep_comes_back_on_what_is_pushed(pool, has_weights):
    pool.rest()
    pool.servers[0].client.alive = False
    pool.gone(0, ServerGone("nobody is asked while it sleeps"))
    assert pool.counts.restarts == 0
    pool.update(published(1, has_weights), lambda c, w: load(c, w))
    if not has_weights:  # it started on random weights, so the next draw asks for another push
        assert pool.blank() and pool.ready() == [1]
        pool.update(published(1, has_weights), load)
    assert pool.ready() == [0, 1] and pool.version == 1 and pool.counts.restarts == 1
    assert pool.servers[0].starts == ["v0", "v1"] and [s.client.holds for s in pool.servers] == ["weights 1"] * 2


def test_a_server_that_cannot_go_to_sleep_is_stopped_and_started_anew_by_the_push(pool):
    """Its memory is needed now."""
    pool.servers[0].client.alive = False
    pool.rest()
    assert pool.servers[0].pid == 0 and pool.servers[1].pid == 1 and pool.ready() == []
    pool.update(published(1), load)
    assert pool.ready() == [0, 1] and pool.servers[0].starts == ["v0", "v1"]


def test_a_server_that_is_coming_back_sleeps_too(pool):
    pool.servers[0].hold_start.clear()
    pool.servers[0].client.alive = False
    pool.gone(0, ServerGone("reset"))
    pool.servers[0].hold_start.set()
    pool.rest()
    assert [s.client.events[-1] for s in pool.servers] == ["sleep"] * 2 and pool.ready() == []


def test_a_blank_server_sleeps_too(pool):
    pool.update(published(1, has_weights=False), load)
    pool.servers[0].client.alive = False
    pool.gone(0, ServerGone("reset"))
    wait_for(pool.blank)
    pool.rest()
    assert not pool.blank() and pool.servers[0].client.events == ["sleep"]
    pool.update(published(2, has_weights=False), load_awake)
    assert pool.ready() == [0, 1]


def test_what_the_client_asks_for(monkeypatch):
    asked = []
    monkeypatch.setattr(EngineClient, "_call", lambda self, *call: asked.append(call))
    client = EngineClient(url="http://h:1", key="k", fields={})
    client.sleep(1.0)
    client.wake("weights", 2.0)
    client.wake("kv_cache", 3.0)
    client.wake(None, 4.0)
    assert asked == [
        ("POST", "/sleep?level=2&mode=abort", None, 1.0),
        ("POST", "/wake_up?tags=weights", None, 2.0),
        ("POST", "/wake_up?tags=kv_cache", None, 3.0),
        ("POST", "/wake_up", None, 4.0),
    ]


@pytest.mark.parametrize("dies_in", ["wake", "pause"])
def test_a_load_that_waits_for_every_server_does_not_wait_for_one_that_is_gone(pool, dies_in, monkeypatch):
    """Buckets go to all servers in step; without a word of the one that died asleep the others would wait for it, and it for them."""
    pool.rest()

    def die(client, *given):
        if client is first:
            raise ServerGone("reset")

    first = pool.servers[0].client
    plain = getattr(Client, dies_in)
    monkeypatch.setattr(Client, dies_in, lambda client, *given: (die(client), plain(client, *given))[1])
    relay = Relay(len(pool.start(published(1, has_weights=False))))

    def load_in_step(client, what):
        relay.follow(lambda bucket: load_awake(client, what))

    pushed = threading.Thread(target=lambda: pool.update(published(1, has_weights=False), load_in_step, relay.leave), daemon=True)
    pushed.start()
    given = threading.Thread(target=lambda: (relay.give("bucket"), relay.settle()), daemon=True)
    given.start()
    given.join(5.0)
    assert not given.is_alive()
    relay.end()
    pushed.join(5.0)
    assert not pushed.is_alive() and pool.ready() == [1] and pool.blank()
