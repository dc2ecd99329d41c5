"""The packed batch: which position predicts which token, what counts, and that neither depends on how the batch was cut."""

import math
from collections.abc import Sequence

import pytest
import torch

from jetrl_megatron.config import GrpoConfig, LossNorm, Overlong
from jetrl_megatron.contracts import Completion, FinishReason, Prompt, Sample, TrainBatch
from jetrl_megatron.grpo.advantages import make_samples
from jetrl_megatron.grpo.batch import (
    build_train_batch,
    completion_positions,
    sequence_length,
    supervised_sample,
    token_weights,
)
from jetrl_megatron.grpo.loss import policy_loss, supervised_loss
from jetrl_megatron.grpo.packing import plan_micro_batches
from tests.packed_values import pack_per_position, unpack_per_position

EOS, SECOND_EOS = 2, 3


def _sample(prompt: Sequence[int], answer: Sequence[int], finish: FinishReason = "stop", advantage: float = 1.0, name: str = "p") -> Sample:
    count = len(answer)
    completion = Completion(
        prompt_id=name,
        sample_index=0,
        token_ids=tuple(answer),
        logprobs=tuple(-0.1 * (i + 1) for i in range(count)),
        finish_reason=finish,
        versions=(0,) * count,
    )
    prompt_ = Prompt(id=name, token_ids=tuple(prompt), text="", answer="", source="")
    return Sample(prompt=prompt_, completion=completion, reward=0.0, advantage=advantage, loss_mask=(1,) * count)


def test_the_shift_convention_by_hand() -> None:
    samples = [_sample([10, 11], [20, EOS], advantage=2.0), _sample([12], [30], advantage=-1.0)]
    batch = build_train_batch(samples, [0, 1], 8, [0.5, 0.25])
    assert batch.tokens_T.tolist() == [10, 11, 20, EOS, 12, 30, 0, 0]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 0, 0]
    assert batch.labels_T.tolist() == [11, 20, EOS, 0, 30, 0, 0, 0]
    assert batch.loss_mask_T.tolist() == [0, 1, 1, 0, 1, 0, 0, 0]
    assert batch.loss_rows_L is not None and batch.loss_rows_L.tolist() == [1, 2, 4]
    assert batch.to(torch.device("cpu")).loss_rows_L is batch.loss_rows_L
    assert batch.loss_weight_T.tolist() == [0, 0.5, 0.5, 0, 0.25, 0, 0, 0]
    assert batch.advantages_T.tolist() == [0, 2, 2, 0, -1, 0, 0, 0]
    assert batch.rollout_logprobs_T.tolist() == torch.tensor([0, -0.1, -0.2, 0, -0.1, 0, 0, 0]).tolist()
    assert batch.cu_seqlens_S.tolist() == [0, 4, 6, 8]
    assert (batch.num_real_toks, batch.sample_index_S) == (6, (0, 1))
    assert completion_positions(batch, samples).tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


def test_a_full_micro_batch_has_no_padding_segment() -> None:
    batch = build_train_batch([_sample([5, 6], [7, 8])], [0], 4, [1.0])
    assert batch.cu_seqlens_S.tolist() == [0, 4]


def test_only_padding_is_a_batch_that_adds_nothing() -> None:
    batch = build_train_batch([_sample([5], [7])], [], 4, [1.0])
    assert batch.cu_seqlens_S.tolist() == [0, 4] and batch.num_real_toks == 0
    train_T = torch.full((4,), math.nan, requires_grad=True)
    loss, sums = policy_loss(train_T, batch, GrpoConfig(kl_coef=0.0))
    loss.backward()
    assert loss.item() == 0.0 and train_T.grad.tolist() == [0.0] * 4
    assert float(sums["toks"]) == 0.0


def test_pad_that_equals_eos_and_two_eos_ids_stay_in_the_loss() -> None:
    """Padding is token 0; here 0 is also an end-of-sequence id that the model drew."""
    samples = [
        _sample([4], [9, 0], "stop"),
        _sample([4], [9, SECOND_EOS], "stop"),
        _sample([4], [9, 9, 9], "length"),
        _sample([4], [9, 9, EOS], "stop"),
    ]
    batch = build_train_batch(samples, range(4), 16, [1.0] * 4)
    assert batch.tokens_T[:14].tolist() == [4, 9, 0, 4, 9, SECOND_EOS, 4, 9, 9, 9, 4, 9, 9, EOS]
    assert batch.loss_mask_T.tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    assert batch.loss_mask_T.sum() == sum(len(sample.completion.token_ids) for sample in samples)


def test_all_cut_and_masked_is_zero_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A masked mean over nothing would be NaN."""
    prompt = Prompt(id="p", token_ids=(1, 2), text="", answer="", source="")
    completions = [_sample([1, 2], [5, 6, 7], "length").completion for _ in range(2)]
    samples = make_samples({"p": prompt}, completions, [1.0, 0.0], GrpoConfig(overlong=Overlong.mask), max_new_toks=3)
    for norm in LossNorm:
        caplog.clear()
        weights = token_weights(samples, norm)
        assert "no token of 2 samples counts" in caplog.text
        batch = build_train_batch(samples, [0, 1], 128, weights)
        train_T = torch.full((128,), -3.0, requires_grad=True)
        loss, sums = policy_loss(train_T, batch, GrpoConfig(kl_coef=0.0))
        loss.backward()
        assert loss.item() == 0.0
        assert train_T.grad.abs().max() == 0.0
        assert all(float(value) == 0.0 for value in sums.values())


def test_ids_logprobs_and_mask_must_keep_step() -> None:
    good = _sample([1], [5, 6])
    short = Sample(prompt=good.prompt, completion=good.completion, reward=0.0, advantage=0.0, loss_mask=(1,))
    with pytest.raises(AssertionError, match=r"\(2, 2, 1\)"):
        build_train_batch([short], [0], 128, [1.0])
    with pytest.raises(ValueError, match="2 token ids, 1 log-probs"):
        Completion(prompt_id="p", sample_index=0, token_ids=(1, 2), logprobs=(0.0,), finish_reason="stop", versions=(0, 0))
    with pytest.raises(ValueError, match="has no tokens"):
        build_train_batch([_sample([], [5])], [0], 128, [1.0])


def test_a_single_token_completion_is_predicted_by_the_last_prompt_token() -> None:
    batch = build_train_batch([_sample([8, 9], [5])], [0], 4, [1.0])
    assert batch.loss_mask_T.tolist() == [0, 1, 0, 0] and batch.labels_T.tolist() == [9, 5, 0, 0]


def test_positions_of_completions_are_found_in_the_packed_batch() -> None:
    samples = [_sample([1, 2, 3], [4, 5]), _sample([1], [6, 7, 8]), _sample([1, 2], [9])]
    batch = build_train_batch(samples, [2, 0], 16, [1.0] * 3)
    out = unpack_per_position(torch.arange(16.0), batch, samples)
    assert {index: values.tolist() for index, values in out.items()} == {2: [1.0], 0: [5.0, 6.0]}
    other = build_train_batch(samples, [0, 1, 2], 16, [1.0] * 3)
    packed = pack_per_position({**out, 1: torch.tensor([-1.0, -2.0, -3.0])}, other, samples)
    assert packed.tolist() == [0, 0, 5, 6, 0, -1, -2, -3, 0, 0, 1, 0, 0, 0, 0, 0]
    with pytest.raises(AssertionError, match="not the list that was packed"):
        unpack_per_position(torch.arange(16.0), batch, [samples[0]] * 3)


def test_masked_completions_are_still_unpacked() -> None:
    sample = _sample([1], [5, 6])
    masked = Sample(prompt=sample.prompt, completion=sample.completion, reward=0.0, advantage=0.0, loss_mask=(0, 1))
    batch = build_train_batch([masked], [0], 4, [1.0])
    assert batch.rollout_logprobs_T.tolist() == torch.tensor([0, -0.2, 0, 0]).tolist()
    assert unpack_per_position(torch.arange(4.0), batch, [masked])[0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("norm", "expected"),
    [(LossNorm.token, [1 / 10, 1 / 10, 0.1]), (LossNorm.sequence, [1 / 2, 1 / 18, 0.0])],
)
def test_denominators(norm: LossNorm, expected: list[float]) -> None:
    masked = _sample([1], [5, 5])
    masked = Sample(prompt=masked.prompt, completion=masked.completion, reward=0.0, advantage=0.0, loss_mask=(0, 0))
    assert token_weights([_sample([1], [5]), _sample([1], [5] * 9), masked], norm) == expected


def _gradients(samples: list[Sample], cuts: list[list[int]], norm: LossNorm, cfg: GrpoConfig) -> tuple[float, dict[int, torch.Tensor]]:
    weights, gradients, total = token_weights(samples, norm), {}, 0.0
    for indices in cuts:
        batch = build_train_batch(samples, indices, 128, weights)
        values = {index: torch.tensor(samples[index].completion.logprobs) + 0.05 * (index + 1) for index in indices}
        batch.old_logprobs_T = pack_per_position({i: v - 0.02 for i, v in values.items()}, batch, samples)
        batch.ref_logprobs_T = pack_per_position({i: v + 0.3 for i, v in values.items()}, batch, samples)
        train_T = pack_per_position(values, batch, samples).requires_grad_()
        loss, _ = policy_loss(train_T, batch, cfg)
        loss.backward()
        total += loss.item()
        gradients |= unpack_per_position(train_T.grad, batch, samples)
    return total, gradients


@pytest.mark.parametrize("norm", list(LossNorm))
def test_the_gradient_does_not_depend_on_the_cut(norm: LossNorm) -> None:
    """Sequences of 1 and 9 tokens as one micro-batch, as two, and on two data-parallel ranks of which one also pads."""
    samples = [_sample([1, 2], [5], advantage=0.7), _sample([3], [6] * 9, advantage=-0.4)]
    cfg = GrpoConfig(kl_coef=0.1)
    total, gradients = _gradients(samples, [[0, 1]], norm, cfg)
    for cuts in ([[0], [1]], [[1], [0]], [[0], [], [1], []]):
        other_total, other = _gradients(samples, cuts, norm, cfg)
        assert all(torch.equal(gradients[index], other[index]) for index in (0, 1))
        assert other_total == pytest.approx(total, rel=1e-6)
    per_token = {LossNorm.token: (1 / 10, 1 / 10), LossNorm.sequence: (1 / 2, 1 / 18)}[norm]
    for index, weight in enumerate(per_token):
        slope = -samples[index].advantage * math.exp(0.02) + 0.1 * (1 - math.exp(0.3))
        assert gradients[index].tolist() == pytest.approx([weight * slope] * len(gradients[index]), rel=1e-5)


def test_supervised_samples_teach_every_target_token() -> None:
    samples = [supervised_sample(_sample([1, 2], [5]).prompt, [7, 8, EOS]), supervised_sample(_sample([1], [5]).prompt, [9, EOS])]
    batch = build_train_batch(samples, [0, 1], 128, token_weights(samples, LossNorm.token))
    train_T = torch.full((128,), -2.0, requires_grad=True)
    loss, sums = supervised_loss(train_T, batch)
    loss.backward()
    assert loss.item() == pytest.approx(2.0, rel=1e-6)
    assert train_T.grad.nonzero().flatten().tolist() == [1, 2, 3, 5, 6]
    assert float(sums["toks"]) == 5.0 and float(sums["nll"]) == 10.0
    assert batch.labels_T[[1, 2, 3, 5, 6]].tolist() == [7, 8, EOS, 9, EOS]


def _attend(batch: TrainBatch, base: float) -> torch.Tensor:
    """One causal attention head with rotary positions over the segments of a packed batch, in float64."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    x_TD = table[batch.tokens_T]
    angle_TF = batch.positions_T[:, None] * base ** (-torch.arange(4, dtype=torch.float64) / 4)
    a_TF, b_TF = x_TD[:, :4], x_TD[:, 4:]
    rotated_TD = torch.cat([a_TF * angle_TF.cos() - b_TF * angle_TF.sin(), a_TF * angle_TF.sin() + b_TF * angle_TF.cos()], dim=1)
    segment_T = torch.bucketize(torch.arange(len(x_TD)), batch.cu_seqlens_S[1:].long(), right=True)
    allowed = (segment_T[:, None] == segment_T[None]) & torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).tril()
    scores = (rotated_TD @ rotated_TD.T).masked_fill(~allowed, -math.inf)
    logits = scores.softmax(dim=1) @ x_TD @ table.T
    return logits.log_softmax(dim=1).gather(1, batch.labels_T[:, None]).squeeze(1)


@pytest.mark.parametrize("base", [10_000.0, 40_000.0])
def test_packed_logprobs_equal_those_of_each_sequence_alone(base: float) -> None:
    """Prompts of 3 and 40 tokens together against each alone."""
    samples = [_sample(range(10, 13), [20, 21, EOS]), _sample(range(10, 50), [22, 23, 24, EOS])]
    plan = plan_micro_batches([sequence_length(sample) for sample in samples], 1, micro_batch_toks=128, pad_multiple=128)
    together = build_train_batch(samples, plan.indices[0][0], plan.length, [1.0, 1.0])
    packed = unpack_per_position(_attend(together, base), together, samples)
    for index in (0, 1):
        alone = build_train_batch(samples, [index], 64, [1.0, 1.0])
        single = unpack_per_position(_attend(alone, base), alone, samples)[index]
        assert torch.allclose(packed[index], single, rtol=0, atol=1e-12)
