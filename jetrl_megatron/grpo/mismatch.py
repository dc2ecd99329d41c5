"""How far the rollout's log-probs are from the actor's, per step and by token position.

Enters: two log-probs for each token, a mask and positions. Leaves: with d = rollout - train over the masked-in tokens,

    logprob_abs_diff = mean |d|        logprob_abs_diff_max = max |d|        token_mult_prob_error = mean exp|d|
    k3_kl = mean(exp(-d) - 1 + d)      outside_share = share of tokens with exp(-d) outside [0.5, 2]

For tokens drawn with the actor's own weights d is the difference of the two engines. For older ones (staleness.py) it also holds the
updates since: it then says how far the policy moved, and not whether the precision flows agree.

Everything is accumulated in float64 as sums, so that ranks and micro-batches add up to one batch, but for rounding.
Source of k3: http://joschu.net/blog/kl-approx.html.
"""

import math
from dataclasses import dataclass
from typing import Self

import torch

OUTSIDE_LOG = math.log(2.0)
"""|d| above this means a probability ratio outside [0.5, 2]."""
BIN_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
"""Positions in the completion at which the bins begin: bin b holds edges[b] <= p < edges[b + 1], the last one everything above."""
_MEANS = ("logprob_abs_diff", "token_mult_prob_error", "k3_kl", "outside_share")
"""Names of the means, in the order of the sums behind the number of tokens."""


@dataclass(frozen=True, kw_only=True)
class MismatchSums:
    """Sums over tokens that add up over ranks (SUM for `sums_B5`, MAX for `max_abs_diff`)."""

    sums_B5: torch.Tensor
    """[B, 5] float64, by bin of positions: tokens, sum |d|, sum exp|d|, sum of k3, tokens outside [0.5, 2]."""
    max_abs_diff: torch.Tensor
    """[] float64, 0 without tokens."""

    def __add__(self, other: Self) -> Self:
        """Join the sums of two micro-batches."""
        return type(self)(sums_B5=self.sums_B5 + other.sums_B5, max_abs_diff=torch.maximum(self.max_abs_diff, other.max_abs_diff))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this module's head over all tokens; all 0 without any (`token_mult_prob_error` 1)."""
        count, *sums = self.sums_B5.sum(dim=0).tolist()
        means = [value / count for value in sums] if count else [0.0, 1.0, 0.0, 0.0]
        return dict(zip(_MEANS, means, strict=True)) | {"logprob_abs_diff_max": float(self.max_abs_diff)}

    def by_position(self) -> list[dict[str, float]]:
        """Return one row a bin that has tokens: `from` (the first position of the bin), `toks` and the means."""
        rows = zip(BIN_EDGES, self.sums_B5.tolist(), strict=True)
        return [{"from": edge, "toks": n, **{k: v / n for k, v in zip(_MEANS, sums, strict=True)}} for edge, (n, *sums) in rows if n]


def mismatch_sums(
    rollout_logprobs_T: torch.Tensor, train_logprobs_T: torch.Tensor, mask_T: torch.Tensor, completion_positions_T: torch.Tensor
) -> MismatchSums:
    """Return the sums over the masked-in tokens.

    rollout_logprobs_T, train_logprobs_T: [T] float32, nats; subtracted in float64. mask_T: [T], above 0 is in.
    completion_positions_T: [T] int64, the index of the label in its completion (`batch.completion_positions`).
    """
    terms_5T, abs_T = _terms(rollout_logprobs_T, train_logprobs_T, mask_T)
    largest = abs_T.max() if abs_T.numel() else abs_T.new_zeros(())
    inner = torch.tensor(BIN_EDGES[1:], device=mask_T.device, dtype=torch.int64)
    bins_T = torch.bucketize(completion_positions_T, inner, right=True)
    sums_B5 = torch.zeros(len(BIN_EDGES), 5, dtype=torch.float64, device=mask_T.device)
    return MismatchSums(sums_B5=sums_B5.index_add_(0, bins_T, terms_5T.T.contiguous()), max_abs_diff=largest)


def _terms(rollout_T: torch.Tensor, train_T: torch.Tensor, mask_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inside_T = mask_T > 0
    zeros_T = torch.zeros_like(rollout_T, dtype=torch.float64)
    d_T = torch.where(inside_T, rollout_T.detach().double() - train_T.detach().double(), zeros_T)
    abs_T = d_T.abs()
    k3_T = torch.expm1(-d_T) + d_T
    terms = (torch.ones_like(d_T), abs_T, abs_T.exp(), k3_T, (abs_T > OUTSIDE_LOG).double())
    return torch.stack([torch.where(inside_T, term, zeros_T) for term in terms]), abs_T
