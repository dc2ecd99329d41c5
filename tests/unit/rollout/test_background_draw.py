"""A draw beside the update: it overlaps, fails where it is joined, and pushes weights only when nobody learns and nobody serves."""

import threading
import time

import pytest
import torch.distributed as dist

from jetrl_megatron.contracts import Prompt, SamplingParams
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.background_draw import BackgroundDraw, PushHold
from jetrl_megatron.rollout.engine import DrawsAhead, Request
from jetrl_megatron.rollout.local import LocalEngine
from jetrl_megatron.rollout.vllm_client import Drawn, ServerGone
from jetrl_megatron.rollout.vllm_engine import Place, RunGroup, VllmEngine

PLACE = Place(replica=0, is_leader=True, max_positions=16, vocab_size=100, slots=1, max_repeats=5)
PARAMS = SamplingParams(max_new_toks=4)
REQUESTS = [Request(prompt=Prompt(id=f"p{i}", token_ids=(1,), text="", answer="", source=""), sample_index=0) for i in range(4)]


class FakePool:
    """Two servers by state; a request waits for `go`, and one whose server is not ready any more has lost it."""

    def __init__(self):
        self.version, self.states, self.sent, self.go = 7, ["ready", "ready"], [], threading.Event()
        self.asked = threading.Event()
        self.failure = None

    def blank(self):
        return "blank" in self.states

    def asleep(self):
        return False

    def shortest(self):
        return None

    def ready(self):
        if self.failure is not None:
            raise self.failure
        return [i for i, state in enumerate(self.states) if state == "ready"]

    def gone(self, number, cause):
        self.states[number] = "blank"

    def complete(self, number, prompt_ids, params, seed):
        self.sent.append((number, self.version))
        self.asked.set()
        assert self.go.wait(20)
        if self.states[number] != "ready":
            raise ServerGone("reset")
        return Drawn(token_ids=(9,), logprobs=(-1.0,), finish_reason="length")


@pytest.fixture
def made():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    pool, pushes = FakePool(), []

    def push():
        pushes.append(threading.current_thread().name)
        pool.states, pool.version = ["ready", "ready"], 8

    yield pool, VllmEngine(pool, RunGroup(10.0), PLACE, push), pushes
    pool.go.set()
    dist.destroy_process_group()


def test_only_an_engine_with_weights_of_its_own_draws_ahead(made):
    assert isinstance(made[1], DrawsAhead) and not issubclass(LocalEngine, DrawsAhead)


def test_it_runs_while_the_caller_goes_on(made):
    pool, engine, pushes = made
    draw = engine.begin(REQUESTS, PARAMS, seed=1)
    assert pool.asked.wait(20) and not draw.leave(0.0), "requests are under way, and the caller is here"
    pool.go.set()
    assert [(c.prompt_id, c.versions) for c in draw.join()] == [(f"p{i}", (7,)) for i in range(4)]
    assert pushes == [] and draw.seconds > 0.0
    assert len(engine.generate(REQUESTS, PARAMS, seed=2)) == 4, "the engine is the foreground's again"


def test_a_blank_server_gets_nothing_while_the_actor_learns_and_waits_while_another_serves(made):
    pool, engine, pushes = made
    pool.states[0] = "blank"
    draw = engine.begin(REQUESTS, PARAMS, seed=1)
    assert pool.asked.wait(20)
    pool.go.set()
    assert {v for c in draw.join() for v in c.versions} == {7}
    assert {number for number, _ in pool.sent} == {1} and pushes == []
    engine.generate(REQUESTS[:1], PARAMS, seed=2)
    assert pushes == ["MainThread"], "the next draw in the foreground pushes at once, as ever"


def test_without_any_server_it_waits_for_the_actor_and_says_which_tokens_are_newer(made):
    """Three are answered, the servers die, the last request waits; only the join lets it have the weights that were learned meanwhile."""
    pool, engine, pushes = made
    pool.go.set()
    answered, complete = [], pool.complete

    def dying(number, *rest):
        if len(answered) == 3 and not pushes:
            pool.states = ["blank", "blank"]
        drawn = complete(number, *rest)
        answered.append(number)
        return drawn

    pool.complete = dying
    engine._place = Place(replica=0, is_leader=True, max_positions=16, vocab_size=100, slots=3, max_repeats=5)
    pool.states = ["ready", "lost"]
    draw = engine.begin(REQUESTS, PARAMS, seed=1)
    deadline = time.monotonic() + 20
    while pool.states[0] == "ready" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not draw.leave(1.0) and pushes == [], "not in the middle of the update"
    versions = sorted(v for c in draw.join() for v in c.versions)
    assert versions == [7, 7, 7, 8] and pushes == ["draw"]


@pytest.mark.parametrize("failure", [ValueError("refused"), RunFailure("no engine server is left"), AssertionError("a fault of ours")])
def test_what_it_raises_is_raised_where_it_is_joined(failure):
    def draw():
        raise failure

    hold = PushHold()
    begun = BackgroundDraw(draw, hold)
    assert begun.leave(20)
    with pytest.raises(type(failure), match=str(failure)) as caught:
        begun.join()
    assert caught.value is failure
    assert hold.allows(serving=True), "the next draw starts from a clean state"


def test_a_pool_without_servers_fails_at_the_join(made):
    pool, engine, _ = made
    pool.failure = RunFailure("no engine server is left: server 0: it died 6 times")
    draw = engine.begin(REQUESTS, PARAMS, seed=1)
    with pytest.raises(RunFailure, match="no engine server is left: server 0"):
        draw.join()


def test_stopping_the_servers_ends_a_draw_that_nobody_will_join(made):
    pool, engine, _ = made
    pool.states = ["blank", "blank"]
    draw = engine.begin(REQUESTS, PARAMS, seed=1)
    assert not draw.leave(0.5)
    pool.failure = RunFailure("the engine servers were stopped")  # ServerPool.ready says so from `close` on
    assert draw.leave(20)


def test_a_rank_that_still_learns_does_not_follow_into_a_push():
    hold, followed = PushHold(), threading.Event()
    hold.hold()
    threading.Thread(target=lambda: (hold.wait(), followed.set()), daemon=True).start()
    assert not followed.wait(0.3)
    hold.release()
    assert followed.wait(20)
    assert hold.allows(serving=False) and not hold.allows(serving=True)
    hold.end()
    assert hold.allows(serving=True)
