"""The embedded engine: how completions end, log-probs of greedy and truncated draws, limits."""

import math

import pytest

from jetrl_megatron.actor.logprobs import head_logits
from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.rollout.engine import Request
from jetrl_megatron.rollout.local import LocalEngine
from tests.unit.rollout.drawing import VOCAB, differences, draw, prompt

PROMPTS = [prompt(5), prompt(9)]


def sampled(actor, max_new, *stop_ids, temperature=1.0):
    """The first prompt's completion: the same tokens whatever the limit and the stop ids."""
    params = SamplingParams(max_new_toks=max_new, temperature=temperature, stop_token_ids=stop_ids)
    return draw(actor, PROMPTS[:1], params)[0]


@pytest.fixture(scope="module")
def free(actor):
    """Eight tokens without a stop id, all different."""
    completion = sampled(actor, 8)
    assert completion.finish_reason == "length" and len(set(completion.token_ids)) == 8
    return completion


@pytest.mark.parametrize(
    ("stop_at", "max_new", "length", "reason"),
    [
        (3, 8, 4, "stop"),  # ends on EOS, which stays in the completion with its log-prob
        (0, 8, 1, "stop"),  # a single token
        (5, 6, 6, "stop"),  # EOS exactly at the limit is a stop, not a cut
        (7, 8, 8, "stop"),
        (5, 5, 5, "length"),  # the limit comes one token before EOS
        (None, 8, 8, "length"),
        (None, 1, 1, "length"),
    ],
)
def test_how_a_completion_ends(actor, free, stop_at, max_new, length, reason):
    unused = next(i for i in range(VOCAB) if i not in free.token_ids)
    for ids in [()] if stop_at is None else [(free.token_ids[stop_at],), (unused, free.token_ids[stop_at])]:  # also as the second EOS id
        completion = sampled(actor, max_new, *ids)
        assert completion.finish_reason == reason
        assert completion.token_ids == free.token_ids[:length]
        assert completion.logprobs == free.logprobs[:length]
        assert completion.versions == (0,) * length


def test_the_padding_token_as_eos_ends_a_completion_like_any_other(actor):
    """pad_id == eos_id: slots are filled with zeros while decoding, and still only a drawn 0 counts."""
    params = SamplingParams(max_new_toks=40, temperature=3.0, stop_token_ids=(0,))
    completions = draw(actor, [prompt(n) for n in (1, 2, 5, 9)], params, group=4)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped and len(stopped) < len(completions)
    for c in completions:
        assert c.token_ids.count(0) == (c.finish_reason == "stop") and (c.finish_reason == "length") == (len(c.token_ids) == 40)


def test_all_cut_at_the_limit(actor):
    completions = draw(actor, PROMPTS, SamplingParams(max_new_toks=3), group=3)
    assert [(len(c.token_ids), len(c.logprobs), c.finish_reason) for c in completions] == [(3, 3, "length")] * 6
    assert [(c.prompt_id, c.sample_index) for c in completions] == [(p.id, j) for p in PROMPTS for j in range(3)]


def test_greedy_logprobs_are_those_of_temperature_one(actor):
    completions = draw(actor, PROMPTS, SamplingParams(max_new_toks=6, temperature=0.0), group=2)
    assert completions[0].token_ids == completions[1].token_ids, "greedy draws nothing"
    assert differences(actor, PROMPTS, completions).max() == 0.0
    sample = draw(actor, PROMPTS, SamplingParams(max_new_toks=1), group=8)
    best = {c.prompt_id: c.logprobs[0] for c in completions}
    assert all(c.logprobs[0] <= best[c.prompt_id] for c in sample)


@pytest.mark.parametrize("sampling", [{"top_p": 0.5}, {"top_k": 3}], ids=str)
def test_truncated_logprobs_are_renormalised_over_the_kept_tokens(actor, sampling):
    """So they are above the trainer's, which is why training refuses them."""
    drawn, full = (
        {c.token_ids[0]: c.logprobs[0] for c in draw(actor, PROMPTS[:1], params, group=300, max_batch=300)}
        for params in (SamplingParams(max_new_toks=1, **sampling), SamplingParams(max_new_toks=1))
    )
    assert len(full) > len(drawn) > 1
    gains = [drawn[t] - full[t] for t in drawn if t in full]
    assert max(gains) == pytest.approx(min(gains), abs=1e-5)
    kept = math.exp(-gains[0])  # the kept tokens' share before truncation
    if "top_k" in sampling:
        assert len(drawn) == 3 and kept == pytest.approx(sum(math.exp(full[t]) for t in drawn), abs=1e-5)
    else:
        assert 0.5 <= kept <= 0.5 + math.exp(min(full[t] for t in drawn if t in full)) + 0.05


def test_what_does_not_fit_is_refused_with_the_numbers(actor):
    with pytest.raises(ValueError, match=r"prompt p500 has 500 tokens and max_new_toks is 13; .* exceed the context of the model, 512"):
        draw(actor, [prompt(500)], SamplingParams(max_new_toks=13))
    with pytest.raises(ValueError, match="prompt p0 has no tokens"):
        draw(actor, [prompt(0)], SamplingParams(max_new_toks=1))
    assert draw(actor, [], SamplingParams(max_new_toks=1)) == []
    assert len(draw(actor, [prompt(509)], SamplingParams(max_new_toks=3))[0].token_ids) == 3


def test_progress_counts_every_completion_once(actor):
    seen = []
    requests = [Request(prompt=p, sample_index=j) for p in PROMPTS for j in range(3)]
    LocalEngine(actor, 2, on_progress=lambda done, all_: seen.append((done, all_))).generate(
        requests, SamplingParams(max_new_toks=2), seed=0
    )
    assert seen == [(i, 6) for i in range(1, 7)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}], ids=str)
def test_logits_that_are_not_finite_are_refused(actor, monkeypatch, sampling):
    monkeypatch.setattr("jetrl_megatron.rollout.local.head_logits", lambda *a: head_logits(*a) * math.nan)
    if not {"top_p", "top_k"} & set(sampling):  # the log-prob is then the trainer's own, of the same logits
        monkeypatch.setattr("jetrl_megatron.actor.logprobs.head_logits", lambda *a: head_logits(*a) * math.nan)
    with pytest.raises(RuntimeError, match=r"logits are not finite: .* token 0 .* prompt p5 is nan; the weights are broken"):
        draw(actor, PROMPTS, SamplingParams(max_new_toks=2, **sampling))
