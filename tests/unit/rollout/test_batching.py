"""A completion depends on seed, prompt and sample alone: not on the width of the batch or the order of requests."""

import random

import pytest

from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.rollout.engine import Request
from jetrl_megatron.rollout.local import LocalEngine
from tests.unit.rollout.drawing import draw, prompt

PARAMS = SamplingParams(max_new_toks=8, stop_token_ids=tuple(range(0, 203, 12)))


@pytest.fixture(scope="module")
def wide(actor):
    """Three prompts, three samples each, all at once."""
    prompts = [prompt(n) for n in (1, 40, 17)]
    completions = draw(actor, prompts, PARAMS, group=3, max_batch=9)
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    assert len({c.token_ids for c in completions}) == 9
    return prompts, completions


@pytest.mark.parametrize("max_batch", [1, 4])
def test_the_width_of_the_batch_changes_nothing(actor, wide, max_batch):
    prompts, completions = wide
    assert draw(actor, prompts, PARAMS, group=3, max_batch=max_batch) == completions


def test_the_order_of_requests_changes_nothing(actor, wide):
    prompts, completions = wide
    requests = [Request(prompt=p, sample_index=j) for p in prompts for j in range(3)]
    order = list(range(len(requests)))
    random.Random(0).shuffle(order)
    drawn = LocalEngine(actor, 4).generate([requests[i] for i in order], PARAMS, seed=3)
    assert drawn == [completions[i] for i in order]


def test_the_seed_changes_the_draws(actor, wide):
    prompts, completions = wide
    other = draw(actor, prompts, PARAMS, group=3, seed=4)
    assert sum(a.token_ids == b.token_ids for a, b in zip(other, completions, strict=True)) <= 1
