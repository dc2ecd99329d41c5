"""How far the rollout's log-probs are from the actor's, per step and by token position.

Enters: two log-probs for each token, and a mask. Leaves: with d = rollout - train over the masked-in tokens,

    logprob_abs_diff = mean |d|        logprob_abs_diff_max = max |d|        token_mult_prob_error = mean exp|d|
    k3_kl = mean(exp(-d) - 1 + d)      outside_share = share of tokens with exp(-d) outside [0.5, 2]

Everything is accumulated in float64 as sums, so that ranks and micro-batches can be added up exactly as one batch would be.
Source of k3: http://joschu.net/blog/kl-approx.html.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

OUTSIDE_LOG = math.log(2.0)
"""|d| above this means a probability ratio outside [0.5, 2]."""
DEFAULT_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
"""Positions in the completion at which the bins begin."""


@dataclass(frozen=True, kw_only=True)
class MismatchSums:
    """Sums over tokens that add up over ranks (SUM for `sums_5`, MAX for `max_abs_diff`)."""

    sums_5: torch.Tensor
    """[5] float64: tokens, sum |d|, sum exp|d|, sum of k3, tokens outside [0.5, 2]."""
    max_abs_diff: torch.Tensor
    """[] float64, 0 without tokens."""

    def __add__(self, other: Self) -> Self:
        """Join the sums of two micro-batches."""
        return type(self)(sums_5=self.sums_5 + other.sums_5, max_abs_diff=torch.maximum(self.max_abs_diff, other.max_abs_diff))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this module's head; all 0 without tokens (`token_mult_prob_error` 1)."""
        count, abs_diff, exp_abs, k3, outside = self.sums_5.tolist()
        if count == 0:
            return _named(0.0, 0.0, 1.0, 0.0, 0.0)
        return _named(abs_diff / count, float(self.max_abs_diff), exp_abs / count, k3 / count, outside / count)


def mismatch_sums(rollout_logprobs_T: torch.Tensor, train_logprobs_T: torch.Tensor, mask_T: torch.Tensor) -> MismatchSums:
    """Return the sums over the masked-in tokens.

    rollout_logprobs_T, train_logprobs_T: [T] float32, nats; subtracted in float64. mask_T: [T], above 0 is in.
    """
    terms_5T, abs_T = _terms(rollout_logprobs_T, train_logprobs_T, mask_T)
    longest = abs_T.max() if abs_T.numel() else abs_T.new_zeros(())
    return MismatchSums(sums_5=terms_5T.sum(dim=1), max_abs_diff=longest)


def mismatch_by_position(
    rollout_logprobs_T: torch.Tensor,
    train_logprobs_T: torch.Tensor,
    mask_T: torch.Tensor,
    completion_positions_T: torch.Tensor,
    edges: Sequence[int] = DEFAULT_EDGES,
) -> torch.Tensor:
    """Return the five sums of `MismatchSums` for each bin of positions, [len(edges), 5] float64, to be added up over ranks.

    completion_positions_T: [T] int64, the index of the label in its completion (`batch.completion_positions`).
    edges: ascending, beginning at 0; bin b holds positions edges[b] <= p < edges[b + 1], the last bin everything above.
    """
    if list(edges) != sorted(set(edges)) or not edges or edges[0] != 0:
        raise ValueError(f"the bin edges are {tuple(edges)}; they must ascend and begin at 0")
    terms_5T, _ = _terms(rollout_logprobs_T, train_logprobs_T, mask_T)
    inner = torch.tensor(edges[1:], device=mask_T.device, dtype=torch.int64)
    bins_T = torch.bucketize(completion_positions_T, inner, right=True)
    sums_B5 = torch.zeros(len(edges), 5, dtype=torch.float64, device=mask_T.device)
    return sums_B5.index_add_(0, bins_T, terms_5T.T.contiguous())


def position_table(sums_B5: torch.Tensor, edges: Sequence[int] = DEFAULT_EDGES) -> list[dict[str, float]]:
    """Return one row a bin that has tokens: `from`, `toks` and the metrics, without the maximum."""
    rows = []
    for edge, sums_5 in zip(edges, sums_B5, strict=True):
        count, abs_diff, exp_abs, k3, outside = sums_5.tolist()
        if count:
            values = _named(abs_diff / count, math.nan, exp_abs / count, k3 / count, outside / count)
            values.pop("logprob_abs_diff_max")
            rows.append({"from": edge, "toks": count, **values})
    return rows


def _terms(rollout_T: torch.Tensor, train_T: torch.Tensor, mask_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inside_T = mask_T > 0
    zeros_T = torch.zeros_like(rollout_T, dtype=torch.float64)
    d_T = torch.where(inside_T, rollout_T.detach().double() - train_T.detach().double(), zeros_T)
    abs_T = d_T.abs()
    k3_T = torch.expm1(-d_T) + d_T
    terms = (torch.ones_like(d_T), abs_T, abs_T.exp(), k3_T, (abs_T > OUTSIDE_LOG).double())
    return torch.stack([torch.where(inside_T, term, zeros_T) for term in terms]), abs_T


def _named(abs_diff: float, abs_diff_max: float, exp_abs: float, k3: float, outside: float) -> dict[str, float]:
    return {
        "logprob_abs_diff": abs_diff,
        "logprob_abs_diff_max": abs_diff_max,
        "token_mult_prob_error": exp_abs,
        "k3_kl": k3,
        "outside_share": outside,
    }
