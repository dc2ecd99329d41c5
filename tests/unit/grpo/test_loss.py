"""The policy loss against hand-computed values, and finite gradients where exp overflows."""

import math

import pytest
import torch

from jetrl_megatron.config import Correction, GrpoConfig
from jetrl_megatron.contracts import TrainBatch
from jetrl_megatron.grpo.loss import bounded_exp, correction_weights, k3_kl, metrics_from_sums, policy_loss


def _batch(advantages: list[float], rollout: list[float], old: list[float] | None = None, ref: list[float] | None = None) -> TrainBatch:
    count = len(advantages)
    ints = torch.zeros(count, dtype=torch.int64)
    return TrainBatch(
        tokens_T=ints,
        positions_T=ints,
        cu_seqlens_S=torch.tensor([0, count], dtype=torch.int32),
        labels_T=ints,
        loss_mask_T=torch.ones(count),
        loss_weight_T=torch.full((count,), 1 / count),
        advantages_T=torch.tensor(advantages),
        rollout_logprobs_T=torch.tensor(rollout),
        old_logprobs_T=None if old is None else torch.tensor(old),
        ref_logprobs_T=None if ref is None else torch.tensor(ref),
    )


def _loss(train: list[float], batch: TrainBatch, cfg: GrpoConfig) -> tuple[float, list[float], dict[str, float]]:
    train_T = torch.tensor(train, requires_grad=True)
    loss, sums = policy_loss(train_T, batch, cfg)
    loss.backward()
    return loss.item(), train_T.grad.tolist(), metrics_from_sums(sums)


def test_clipping_is_one_sided_and_has_two_limits() -> None:
    log = math.log
    train = [log(1.5), log(1.25), log(0.7), log(0.5), log(1.5)]
    batch = _batch([1.0, 1.0, -1.0, -1.0, -1.0], rollout=[0.0] * 5, old=[0.0] * 5)
    loss, gradient, metrics = _loss(train, batch, GrpoConfig(clip_low=0.2, clip_high=0.28, kl_coef=0.0))
    assert loss == pytest.approx((-1.28 - 1.25 + 0.8 + 0.8 + 1.5) / 5, rel=1e-6)
    assert gradient == pytest.approx([0.0, -1.25 / 5, 0.0, 0.0, 1.5 / 5], rel=1e-6)
    assert metrics["clip_high"] == pytest.approx(1 / 5) and metrics["clip_low"] == pytest.approx(2 / 5)
    assert metrics["ratio"] == pytest.approx((1.5 + 1.25 + 0.7 + 0.5 + 1.5) / 5)
    assert metrics["toks"] == 5.0


def test_without_old_logprobs_the_ratio_is_one_and_carries_the_gradient() -> None:
    loss, gradient, _ = _loss([-1.0, -2.0], _batch([2.0, -1.0], rollout=[-1.0, -2.0]), GrpoConfig(kl_coef=0.0))
    assert loss == pytest.approx(-0.5) and gradient == [-1.0, 0.5]


def test_kl_is_k3_of_reference_over_actor() -> None:
    batch = _batch([0.0, 0.0], rollout=[0.0, 0.0], old=[-1.0, -1.0], ref=[-0.5, -2.0])
    loss, gradient, metrics = _loss([-1.0, -1.0], batch, GrpoConfig(kl_coef=0.1))
    k3 = [math.exp(0.5) - 1.5, math.exp(-1.0)]
    assert loss == pytest.approx(0.1 * sum(k3) / 2, rel=1e-5)
    assert gradient == pytest.approx([0.05 * (1 - math.exp(0.5)), 0.05 * (1 - math.exp(-1.0))], rel=1e-5)
    assert metrics["kl"] == pytest.approx(sum(k3) / 2, rel=1e-5)


def test_kl_without_a_reference_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"grpo.kl_coef is 0.001.*grpo.kl_coef=0"):
        _loss([0.0], _batch([1.0], [0.0]), GrpoConfig(kl_coef=1e-3))


@pytest.mark.parametrize(("log_ratio", "sign"), [(100.0, -1.0), (1e4, -1.0), (-100.0, 1.0), (11.0, -1.0), (3.0, -1.0), (-3.0, 1.0)])
def test_kl_gradient_is_finite_and_of_the_right_sign(log_ratio: float, sign: float) -> None:
    """exp(100) overflows FP32; clamping the output gives a NaN gradient."""
    train_T = torch.tensor([0.0], requires_grad=True)
    value_T = k3_kl(train_T, torch.tensor([log_ratio]))
    value_T.sum().backward()
    assert math.isfinite(value_T.item()) and value_T.item() > 0
    assert math.isfinite(train_T.grad.item()) and math.copysign(1.0, train_T.grad.item()) == sign


def test_the_normal_range_is_bit_identical() -> None:
    x_T = torch.linspace(-60.0, 10.0, 100_001)
    assert torch.equal(bounded_exp(x_T), torch.exp(x_T))
    assert torch.equal(k3_kl(torch.zeros_like(x_T), x_T), torch.exp(x_T) - 1.0 - x_T)


def test_the_tangent_is_continuous_and_rising() -> None:
    x_T = torch.tensor([10.0, 10.0001, 20.0, 100.0], requires_grad=True)
    y_T = bounded_exp(x_T)
    y_T.sum().backward()
    assert y_T[2].item() == pytest.approx(math.exp(10) * 11, rel=1e-6)
    assert x_T.grad.tolist() == pytest.approx([math.exp(10)] * 4, rel=1e-6)
    assert y_T.diff().min() > 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_fp32_leaves_a_finite_gradient(advantage: float) -> None:
    loss, gradient, _ = _loss([0.0], _batch([advantage], [0.0], old=[-100.0]), GrpoConfig(kl_coef=0.0))
    assert math.isfinite(loss) and math.isfinite(gradient[0])
    assert gradient[0] == 0.0 if advantage > 0 else gradient[0] > 0.0


def test_truncated_importance_sampling_caps_the_detached_weight() -> None:
    old, rollout = [-1.0, -1.0, -1.0], [-1.0 - math.log(1.5), -1.0 - math.log(9.0), -1.0 + math.log(4.0)]
    cfg = GrpoConfig(kl_coef=0.0, correction=Correction.tis, tis_cap=2.0)
    loss, gradient, metrics = _loss(old, _batch([1.0, 1.0, 1.0], rollout, old), cfg)
    weights = [1.5, 2.0, 0.25]
    assert loss == pytest.approx(-sum(weights) / 3, rel=1e-6)
    assert gradient == pytest.approx([-w / 3 for w in weights], rel=1e-6)
    assert metrics["correction_weight"] == pytest.approx(sum(weights) / 3, rel=1e-6)
    assert metrics["correction_cut"] == pytest.approx(1 / 3)


def test_icepop_takes_out_tokens_outside_the_band() -> None:
    ratios = [0.4, 0.6, 1.9, 2.1]
    old = [-1.0] * 4
    rollout = [-1.0 - math.log(ratio) for ratio in ratios]
    cfg = GrpoConfig(kl_coef=0.0, correction=Correction.icepop, icepop_low=0.5, icepop_high=2.0)
    _, gradient, metrics = _loss(old, _batch([1.0] * 4, rollout, old), cfg)
    assert gradient == pytest.approx([0.0, -0.6 / 4, -1.9 / 4, 0.0], rel=1e-6)
    assert metrics["correction_cut"] == 0.5


def test_no_correction_weighs_one() -> None:
    weights_T = correction_weights(torch.tensor([-1.0, -9.0]), torch.tensor([-5.0, -1.0]), GrpoConfig())
    assert weights_T.tolist() == [1.0, 1.0]


def test_positions_outside_the_mask_may_hold_anything() -> None:
    batch = _batch([1.0, 1.0, 1.0], [0.0, 0.0, math.nan], old=[0.0, math.inf, 0.0], ref=[0.0, math.nan, -math.inf])
    batch.loss_mask_T = torch.tensor([1.0, 0.0, 0.0])
    batch.loss_weight_T = torch.tensor([1.0, 0.0, 0.0])
    loss, gradient, metrics = _loss([0.0, -math.inf, math.nan], batch, GrpoConfig())
    assert loss == -1.0 and gradient == [-1.0, 0.0, 0.0]
    assert metrics["toks"] == 1.0 and metrics["kl"] == 0.0


def test_low_precision_logprobs_are_raised_to_fp32() -> None:
    loss, _ = policy_loss(torch.tensor([-1.0], dtype=torch.bfloat16), _batch([1.0], [-1.0]), GrpoConfig(kl_coef=0.0))
    assert loss.dtype is torch.float32


def test_entropy_is_reported_as_a_mean() -> None:
    batch = _batch([1.0, 1.0], [0.0, 0.0])
    _, sums = policy_loss(torch.zeros(2), batch, GrpoConfig(kl_coef=0.0), entropy_T=torch.tensor([1.0, 2.0]))
    assert metrics_from_sums(sums)["entropy"] == 1.5
