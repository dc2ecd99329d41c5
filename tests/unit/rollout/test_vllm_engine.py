"""The pool as a RolloutEngine in one process: order, versions, seeds, and what does not fit."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from jetrl_megatron.contracts import Prompt, SamplingParams
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.engine import Request
from jetrl_megatron.rollout.vllm_client import Drawn, ServerGone
from jetrl_megatron.rollout.vllm_engine import Place, RunGroup, VllmEngine, request_seed

PLACE = Place(replica=0, is_leader=True, max_positions=16, vocab_size=100, slots=2, max_repeats=1)
PARAMS = SamplingParams(max_new_toks=4)


class FakePool:
    """Answers with the prompt and the seed's last digit; waits blank until it is pushed to."""

    def __init__(self):
        self.version, self.waits, self.failures, self.seeds = 7, False, 0, []
        self.sleeps, self.refuses, self.short = False, None, None

    def blank(self):
        return self.waits

    def shortest(self):
        return self.short

    def asleep(self):
        return self.sleeps

    def rest(self):
        self.sleeps = True
        if self.refuses:
            raise self.refuses

    def ready(self):
        return [] if self.waits else [0, 1]

    def gone(self, number, cause):
        pass

    def complete(self, number, prompt_ids, params, seed):
        self.seeds.append(seed)
        if self.failures:
            self.failures -= 1
            raise ServerGone("reset")
        return Drawn(token_ids=(*prompt_ids, seed % 10), logprobs=(-1.0,) * (len(prompt_ids) + 1), finish_reason="stop")


@pytest.fixture
def made(request):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    pool = FakePool()

    def push():
        pool.waits, pool.version = False, 8

    yield pool, VllmEngine(pool, RunGroup(10.0), replace(PLACE, shares_device=getattr(request, "param", False)), push)
    dist.destroy_process_group()


def requests(*lengths):
    prompts = [Prompt(id=f"p{i}", token_ids=tuple(range(1, n + 1)), text="", answer="", source="") for i, n in enumerate(lengths)]
    return [Request(prompt=p, sample_index=j) for p in prompts for j in range(2)]


def test_completions_come_in_order_with_the_pools_version_and_their_own_seed(made):
    pool, engine = made
    pool.failures = 1
    asked = requests(3, 1, 5)
    drawn = engine.generate(asked, PARAMS, seed=4)
    assert [(c.prompt_id, c.sample_index) for c in drawn] == [(r.prompt.id, r.sample_index) for r in asked]
    seeds = [request_seed(4, r.prompt.id, r.sample_index) for r in asked]
    assert [c.token_ids for c in drawn] == [(*r.prompt.token_ids, s % 10) for r, s in zip(asked, seeds, strict=True)]
    assert [c.versions for c in drawn] == [(7,) * (len(r.prompt.token_ids) + 1) for r in asked]
    assert set(pool.seeds) == set(seeds) and len(pool.seeds) == 7 and engine.counts.repeated == 1
    assert engine.generate([], PARAMS, seed=4) == []


def test_a_server_without_weights_is_pushed_to_before_anything_is_sent(made):
    pool, engine = made
    pool.waits = True
    engine.generate(requests(2), PARAMS, seed=1)
    assert not pool.waits


@pytest.mark.parametrize(("length", "words"), [(13, "13 tokens and max_new_toks is 4.*context of the model, 16"), (0, "has no tokens")])
def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_sent(made, length, words):
    pool, engine = made
    with pytest.raises(ValueError, match=words):
        engine.generate(requests(2, length), PARAMS, seed=1)
    assert pool.seeds == []


@pytest.mark.parametrize("strange", [100, -1])
def test_a_token_that_the_model_does_not_have_is_refused_before_anything_is_sent(made, strange):
    pool, engine = made
    prompt = Prompt(id="p1", token_ids=(1, strange, 99), text="", answer="", source="")
    with pytest.raises(ValueError, match=f"prompt p1 has token id {strange}, the model's vocabulary ends at 99: .*model.tokenizer"):
        engine.generate([*requests(2), Request(prompt=prompt, sample_index=0)], PARAMS, seed=1)
    assert pool.seeds == []


def test_a_request_must_fit_into_the_context_of_servers_that_somebody_else_started(made):
    pool, engine = made
    pool.short = (8, "http://h:1 (its --max-model-len)")
    engine.generate(requests(4), PARAMS, seed=1)
    pool.seeds.clear()
    with pytest.raises(ValueError, match=r"5 tokens .* exceed the context of http://h:1 \(its --max-model-len\), 8: lower"):
        engine.generate(requests(2, 5), PARAMS, seed=1)
    assert pool.seeds == []
    pool.short = (999, "http://h:1")
    with pytest.raises(ValueError, match="context of the model, 16"):
        engine.generate(requests(13), PARAMS, seed=1)


def test_servers_on_other_gpus_do_not_sleep(made):
    pool, engine = made
    engine.rest()
    assert not pool.sleeps


@pytest.mark.parametrize("made", [True], indirect=True)
def test_nothing_is_sent_to_servers_that_sleep(made):
    pool, engine = made
    engine.rest()
    assert pool.sleeps
    with pytest.raises(RunFailure, match="have slept since version 7: push weights before drawing"):
        engine.generate(requests(2), PARAMS, seed=1)
    assert pool.seeds == []
    pool.sleeps = False
    assert len(engine.generate(requests(2), PARAMS, seed=1)) == 2


@pytest.mark.parametrize("made", [True], indirect=True)
@pytest.mark.parametrize("cause", [RunFailure("no engine server is left"), ValueError("refused")])
def test_a_rest_that_fails_fails_the_run(made, cause):
    pool, engine = made
    pool.refuses = cause
    with pytest.raises(type(cause), match=str(cause)):
        engine.rest()
