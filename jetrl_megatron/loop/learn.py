"""Samples to optimizer steps and the numbers of the step.

Enters: samples of one rollout batch, equal on every rank. Leaves: updated weights, quantised, and the step's metrics. The mismatch is
measured on what training really computes: the actor's own forward over the packed batch, against the log-probs of the rollout. Tokens that
were drawn before the last update (`rollout.max_staleness=1`) are compared across it: their mismatch is that of the engines and that update.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from jetrl_megatron.config import GrpoConfig
from jetrl_megatron.contracts import Sample, TrainBatch
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.grpo.batch import build_train_batch, completion_positions, sequence_length, token_weights
from jetrl_megatron.grpo.loss import metrics_from_sums, policy_loss
from jetrl_megatron.grpo.mismatch import MismatchSums, mismatch_sums
from jetrl_megatron.grpo.packing import plan_micro_batches, split_minibatches
from jetrl_megatron.grpo.staleness import batch_staleness
from jetrl_megatron.loop.replicas import add_up, gather_replicas
from jetrl_megatron.loop.setup import Session


def pack(session: Session, samples: Sequence[Sample]) -> list[TrainBatch]:
    """Return this data-parallel rank's micro-batches of one minibatch, on the actor's device."""
    parallel, cfg = session.recipe.parallel, session.recipe.grpo
    lengths = [sequence_length(s) for s in samples]
    plan = plan_micro_batches(lengths, session.ranks.dp, parallel.micro_batch_toks, 128 * parallel.tp)
    weights = token_weights(samples, cfg.loss_norm)
    mine = plan.indices[session.ranks.dp_rank]
    return [build_train_batch(samples, indices, plan.length, weights).to(session.device) for indices in mine]


def measure_mismatch(batches: Sequence[TrainBatch], logprobs: Sequence[torch.Tensor], positions: Sequence[torch.Tensor]) -> MismatchSums:
    """Return the mismatch sums of this rank's micro-batches, with the `completion_positions` of each, added up over data-parallel ranks."""
    trios = zip(batches, logprobs, positions, strict=True)
    local = [mismatch_sums(b.rollout_logprobs_T, logp, b.loss_mask_T, where) for b, logp, where in trios]
    parts = gather_replicas([(m.sums_B5.cpu(), m.max_abs_diff.cpu()) for m in local])
    everything = [MismatchSums(sums_B5=s, max_abs_diff=m) for part in parts for s, m in part]
    total = everything[0]
    for part in everything[1:]:
        total = total + part
    return total


def learn(session: Session, samples: Sequence[Sample]) -> dict[str, Any]:
    """Take the optimizer steps of one rollout batch; returns metrics of the step (see `metrics.STEP_KEYS` for the required ones).

    Raises RunFailure for a completion older than `rollout.max_staleness`, before anything is changed, and for numbers that are not finite.
    """
    cfg, actor = session.recipe.grpo, session.actor
    age = batch_staleness(samples, actor.version, cfg.epochs * cfg.minibatches, session.recipe.rollout.max_staleness)
    shares = [[samples[i] for i in part] for part in split_minibatches(len(samples), cfg.minibatches)]
    minibatches = [pack(session, share) for share in shares]
    # One call a minibatch: those of another may have another packed length.
    with session.phases("logprobs"):
        old = [actor.logprobs(batches) for batches in minibatches]
        for batches, pairs in zip(minibatches, old, strict=True):
            for batch, (logp, _) in zip(batches, pairs, strict=True):
                batch.old_logprobs_T = logp
        flat = [batch for batches in minibatches for batch in batches]
        positions = [completion_positions(b, share) for share, batches in zip(shares, minibatches, strict=True) for b in batches]
        mismatch = measure_mismatch(flat, [logp for pairs in old for logp, _ in pairs], positions)
    if cfg.kl_coef > 0:
        with session.phases("reference"):
            for batches in minibatches:
                _add_reference(batches, actor.reference_logprobs(batches))
    norms: list[float] = []
    lr = 0.0
    sums: dict[str, torch.Tensor] = {}
    for _ in range(cfg.epochs):
        for batches in minibatches:
            assert actor.optimizer is not None
            lr = actor.optimizer.lr
            step_sums = actor.train_step(batches, partial(_policy_loss, cfg=cfg), session.phases)
            norms.append(float(step_sums.pop("grad_norm")))
            for name, value in add_up(step_sums).items():
                sums[name] = sums[name] + value if name in sums else value
    values = {
        **mismatch.metrics(),
        **age,
        "mismatch_by_position": mismatch.by_position(),
        **metrics_from_sums(sums),
        "grad_norm": max(norms),
        "lr": lr,
        **_rollout_numbers(samples),
    }
    refuse_broken_step(values)
    return values


def _add_reference(batches: Sequence[TrainBatch], logprobs: Sequence[torch.Tensor]) -> None:
    for batch, logp in zip(batches, logprobs, strict=True):
        batch.ref_logprobs_T = logp


def refuse_broken_step(values: dict[str, Any]) -> None:
    """Raise RunFailure naming the numbers that are NaN or infinite: such a step must not be saved over a good checkpoint."""
    broken = {name: value for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    if broken:
        raise RunFailure(
            f"the step's numbers are not finite: {broken}; nothing of it is saved and the last checkpoint is intact. "
            "Lower optim.lr, or look for the first bad number with precision.arm=bf16"
        )


def _policy_loss(
    logp: torch.Tensor, entropy: torch.Tensor, batch: TrainBatch, *, cfg: GrpoConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return policy_loss(logp, batch, cfg, entropy_T=entropy)


def _rollout_numbers(samples: Sequence[Sample]) -> dict[str, float]:
    """Return reward, length and how completions ended."""
    count = len(samples)
    return {
        "reward": sum(s.reward for s in samples) / count,
        "response_toks": sum(len(s.completion.token_ids) for s in samples) / count,
        "truncated_share": sum(s.completion.finish_reason == "length" for s in samples) / count,
        "zero_advantage_share": sum(s.advantage == 0.0 for s in samples) / count,
    }
