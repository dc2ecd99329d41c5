"""Drawing a token, by value: temperature, truncation, greedy, the generator of a request."""

import math

import pytest
import torch

from jetrl_megatron.actor.logprobs import head_logits, token_logprobs, vocab_shard
from jetrl_megatron.config import EvalConfig, RolloutConfig
from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.rollout.sampling import draw, request_generator

PROBS = torch.tensor([0.15, 0.5, 0.1, 0.25])


def params(**changes):
    return SamplingParams(max_new_toks=1, **changes)


def draw_many(probs, sampling, number=1000):
    """Ids and log-probs for uniforms spread evenly over [0, 1)."""
    uniforms = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    return draw(probs.log()[None].expand(number, -1).contiguous(), sampling, uniforms)


def test_logprob_of_a_token_under_temperature_is_that_of_the_trainer():
    """Logits [2, 0] at T=0.6: -0.0351; the raw -0.1269 would be a ratio of 1.096 on one token."""
    hidden, weight = torch.ones(1, 1).bfloat16(), torch.tensor([[2.0], [0.0]]).bfloat16()
    shard = vocab_shard(2, 2, 0, None)
    assert head_logits(hidden, weight, shard, 0.6).tolist() == [[pytest.approx(2 / 0.6), 0.0]]
    label = torch.tensor([0])
    assert float(token_logprobs(hidden, weight, label, shard, 0.6)[0]) == pytest.approx(-0.0351, abs=5e-5)
    assert float(token_logprobs(hidden, weight, label, shard, 1.0)[0]) == pytest.approx(-0.1269, abs=5e-5)
    ids, logp = draw(head_logits(hidden, weight, shard, 0.6), params(temperature=0.6), torch.tensor([0.5], dtype=torch.float64))
    assert ids.tolist() == [0] and logp is None, "without truncation the caller must ask the trainer's own function"


def test_tokens_come_as_often_as_their_probability_says():
    ids, logp = draw_many(PROBS, params())
    assert torch.bincount(ids, minlength=4).tolist() == [150, 500, 100, 250] and logp is None


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_p": 0.8}, [1, 3, 0]),  # 0.5, 0.75: the third token is needed to reach 0.8
        ({"top_p": 0.75}, [1, 3]),
        ({"top_p": 0.3}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3, "top_p": 0.5}, [1]),
        ({"top_k": 2, "top_p": 0.7}, [1, 3]),  # top_p counts within what top_k kept: 0.667 < 0.7
        ({"top_k": 4}, [1, 3, 0, 2]),
    ],
    ids=str,
)
def test_truncation_renormalises_over_the_kept_tokens(sampling, kept):
    ids, logp = draw_many(PROBS, params(**sampling), number=1200)
    total = float(PROBS[kept].sum())
    counts = torch.bincount(ids, minlength=4)
    for token in range(4):
        want = float(PROBS[token]) / total if token in kept else 0.0
        assert int(counts[token]) == pytest.approx(1200 * want, abs=1)
        if want:
            assert logp[ids == token].tolist() == [pytest.approx(math.log(want), abs=1e-6)] * int(counts[token])


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, -math.inf, 3.0]])
    ids, logp = draw(logits, params(temperature=0.0), torch.tensor([0.999, 0.999], dtype=torch.float64))
    assert ids.tolist() == [1, 0] and logp is None


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 3}], ids=str)
def test_a_token_without_probability_is_never_drawn(sampling):
    """The last tokens are padding at -inf, also for the largest uniform number below 1."""
    logits = torch.tensor([[0.1, -1.0, 0.3, -math.inf, -math.inf]]).expand(3, -1).contiguous()
    uniforms = torch.tensor([0.0, 0.5, 1.0 - 2**-53], dtype=torch.float64)
    ids, _ = draw(logits, params(**sampling), uniforms)
    assert ids.tolist()[0] == 0 and ids.tolist()[2] == 2
    first = torch.tensor([[-math.inf, -math.inf, 0.0, 0.0]])
    assert draw(first, params(**sampling), torch.zeros(1, dtype=torch.float64))[0].tolist() == [2]


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.7}, {"top_k": 5}], ids=str)
def test_a_row_depends_on_itself_alone(sampling):
    generator = torch.Generator().manual_seed(0)
    logits, uniforms = torch.randn(16, 50, generator=generator), torch.rand(16, generator=generator, dtype=torch.float64)
    ids, logp = draw(logits, params(**sampling), uniforms)
    for row in range(16):
        alone, alone_logp = draw(logits[row : row + 1], params(**sampling), uniforms[row : row + 1])
        assert alone[0] == ids[row] and (logp is None or alone_logp[0] == logp[row])


def test_the_generator_is_the_requests_own():
    first = request_generator(1, "gsm8k/7", 0).random(4).tolist()
    assert first == request_generator(1, "gsm8k/7", 0).random(4).tolist()
    others = [request_generator(*key).random(4).tolist() for key in ((2, "gsm8k/7", 0), (1, "gsm8k/70", 0), (1, "gsm8k/7", 1), (17, "", 0))]
    assert all(a != b for i, a in enumerate([first, *others]) for b in others[i:])
    # 1 and "1\0..." must not run together
    assert request_generator(1, "1", 0).random() != request_generator(11, "", 0).random()


@pytest.mark.parametrize("change", [{"top_p": 0.9}, {"top_k": 20}, {"temperature": 0.0}, {"temperature": -1.0}, {"temperature": math.nan}])
def test_training_refuses_what_the_trainer_cannot_follow(change):
    (name,) = change
    with pytest.raises(ValueError, match=rf"rollout\.{name} is {change[name]}|rollout\.{name} is .*{change[name]}"):
        RolloutConfig(**change)


def test_evaluation_may_truncate_and_be_greedy():
    assert EvalConfig(temperature=0.0, top_p=0.9, top_k=20).top_k == 20


@pytest.mark.parametrize("change", [{"max_new_toks": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}])
def test_sampling_parameters_out_of_range_are_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is {next(iter(change.values()))}"):
        SamplingParams(**{"max_new_toks": 4, **change})
