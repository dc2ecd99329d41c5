r"""The policy loss of one micro-batch, as a plain sum.

Enters: the actor's log-probs at each packed position, a `TrainBatch`. Leaves: a scalar to call backward on, and sums for the metrics.
Per position, with r = exp(train - old), A the advantage, q = ref - train:

    policy = -min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A) * w
    kl     = exp(q) - 1 - q                                     (k3, http://joschu.net/blog/kl-approx.html)
    loss   = sum over positions of loss_weight * (policy + kl_coef * kl)

w is 1, or the detached correction of the rollout mismatch, k = exp(old - rollout): `tis` min(k, cap) (truncated importance sampling,
Yao et al. 2025); `icepop` k inside [low, high] and 0 outside (Ling team, 2025). It weighs the policy term only. `rollout` is of the
weights that drew the token and `old` of those that are about to be updated: for older tokens k holds the updates between, r never does.

Invariant: `loss_weight` is already over the global denominator, so nothing is divided here and the sum over micro-batches and ranks is
the loss, however the batch was cut. All of it is FP32. Positions outside the mask contribute exactly 0 to loss and gradient,
whatever their log-probs hold. Log-ratios above 10 are continued linearly: exp(10) (1 + x - 10); below that the bits are those
of exp.
"""

import torch

from jetrl_megatron.config import Correction, GrpoConfig
from jetrl_megatron.contracts import TrainBatch

MAX_LOG_RATIO = 10.0
"""Nats; exp is continued by its tangent from here on, so value and gradient stay finite and keep their sign."""


def bounded_exp(x: torch.Tensor) -> torch.Tensor:
    """exp(x) up to `MAX_LOG_RATIO`, bit for bit, and its tangent beyond.

    x: any shape, float32. The gradient is exp(min(x, 10)): finite for every finite x and never of the wrong sign.
    """
    return torch.exp(torch.clamp(x, max=MAX_LOG_RATIO)) * (1.0 + torch.relu(x - MAX_LOG_RATIO))


def k3_kl(train_logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate of KL(train || ref) at each position, [T] float32, at least 0 up to rounding."""
    q_T = ref_logprobs_T - train_logprobs_T
    return bounded_exp(q_T) - 1.0 - q_T


def correction_weights(old_logprobs_T: torch.Tensor, rollout_logprobs_T: torch.Tensor, cfg: GrpoConfig) -> torch.Tensor:
    """Return the detached weight w of the policy term at each position, [T] float32."""
    ratio_T = bounded_exp((old_logprobs_T - rollout_logprobs_T).detach())
    if cfg.correction is Correction.tis:
        return torch.clamp(ratio_T, max=cfg.tis_cap)
    if cfg.correction is Correction.icepop:
        inside_T = (ratio_T >= cfg.icepop_low) & (ratio_T <= cfg.icepop_high)
        return torch.where(inside_T, ratio_T, torch.zeros_like(ratio_T))
    return torch.ones_like(ratio_T)


def policy_loss(
    train_logprobs_T: torch.Tensor, batch: TrainBatch, cfg: GrpoConfig, entropy_T: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of one micro-batch and the sums behind its metrics.

    train_logprobs_T: [T] float32, nats, with gradient; aligned as `contracts` says.
    batch: without `old_logprobs_T` the policy is its own old policy (one update a rollout): the ratio is 1 and carries the gradient.
    entropy_T: [T] float32, nats, only reported.
    Returns the scalar float32 loss, 0 with zero gradient when nothing is masked in, and float64 sums on the same device (see
    `metrics_from_sums`), to be added up over micro-batches and data-parallel ranks.
    Raises ValueError when `grpo.kl_coef` is above 0 and the batch holds no reference log-probs.
    """
    assert train_logprobs_T.shape == batch.tokens_T.shape, (train_logprobs_T.shape, batch.tokens_T.shape)
    inside_T = batch.loss_mask_T > 0
    train_T = _only(inside_T, train_logprobs_T.float())
    old_T = train_T.detach() if batch.old_logprobs_T is None else _only(inside_T, batch.old_logprobs_T.float())
    rollout_T = _only(inside_T, batch.rollout_logprobs_T.float())

    ratio_T = bounded_exp(train_T - old_T)
    clipped_T = torch.clamp(ratio_T, 1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    advantages_T = batch.advantages_T
    weights_T = correction_weights(old_T, rollout_T, cfg)
    policy_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T) * weights_T
    per_token_T = policy_T
    kl_T = None
    if cfg.kl_coef > 0.0:
        if batch.ref_logprobs_T is None:
            raise ValueError(f"grpo.kl_coef is {cfg.kl_coef} but the batch has no reference log-probs; compute them or set grpo.kl_coef=0")
        kl_T = k3_kl(train_T, _only(inside_T, batch.ref_logprobs_T.float()))
        per_token_T = per_token_T + cfg.kl_coef * kl_T
    loss = (_only(inside_T, per_token_T) * batch.loss_weight_T).sum()

    with torch.no_grad():
        clip_low_T = (advantages_T < 0) & (ratio_T < 1.0 - cfg.clip_low)
        clip_high_T = (advantages_T > 0) & (ratio_T > 1.0 + cfg.clip_high)
        values = {
            "toks": torch.ones_like(ratio_T),
            "ratio": ratio_T,
            "clip_low": clip_low_T,
            "clip_high": clip_high_T,
            "correction_weight": weights_T,
            "correction_cut": weights_T != 1.0 if cfg.correction is Correction.none else _cut(old_T, rollout_T, cfg),
        }
        if kl_T is not None:
            values["kl"] = kl_T
        if entropy_T is not None:
            values["entropy"] = entropy_T
        sums = {name: _only(inside_T, value.double()).sum() for name, value in values.items()}
        sums["loss"] = loss.detach().double()
        sums["policy_loss"] = (_only(inside_T, policy_T) * batch.loss_weight_T).double().sum()
    return loss, sums


def supervised_loss(train_logprobs_T: torch.Tensor, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the negative log-likelihood, sum of -loss_weight * train_logprobs, and its sums; for the warm start.

    train_logprobs_T: [T] float32, nats, with gradient.
    """
    inside_T = batch.loss_mask_T > 0
    train_T = _only(inside_T, train_logprobs_T.float())
    loss = -(train_T * batch.loss_weight_T).sum()
    with torch.no_grad():
        sums = {"toks": inside_T.double().sum(), "nll": -train_T.double().sum(), "loss": loss.detach().double()}
    return loss, sums


def metrics_from_sums(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the step's metrics from sums that were added up over micro-batches and ranks.

    `loss` and `policy_loss` stay sums; the others become means over the masked-in tokens, 0 when there are none.
    """
    toks = float(sums["toks"])
    means = {name: float(value) / toks if toks else 0.0 for name, value in sums.items() if name not in ("toks", "loss", "policy_loss")}
    return {name: float(sums[name]) for name in ("toks", "loss", "policy_loss") if name in sums} | means


def _only(inside_T: torch.Tensor, values_T: torch.Tensor) -> torch.Tensor:
    """The values inside the mask, 0 outside; a select and not a product, so that what is outside may be NaN."""
    return torch.where(inside_T, values_T, torch.zeros_like(values_T))


def _cut(old_T: torch.Tensor, rollout_T: torch.Tensor, cfg: GrpoConfig) -> torch.Tensor:
    """Where the correction changed more than the ratio itself: capped (TIS) or masked (IcePop)."""
    ratio_T = bounded_exp(old_T - rollout_T)
    if cfg.correction is Correction.tis:
        return ratio_T > cfg.tis_cap
    return (ratio_T < cfg.icepop_low) | (ratio_T > cfg.icepop_high)
