"""Which sequence goes where: minibatches, data-parallel ranks, micro-batches. Pure functions of lengths, the same on every rank.

Enters: sequence lengths in tokens. Leaves: a `MicroBatchPlan`. Invariants: every index is placed exactly once; every data-parallel rank
has the same number of micro-batches (a rank without a sequence gets one of padding only, so that collectives match); all
micro-batches of a plan have one length, a multiple of `pad_multiple`.
Method: the fewest micro-batches that the longest-first greedy (each sequence into the emptiest bin) can fill within the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """Where each sequence of one optimizer step is computed."""

    length: int
    """T, packed positions of every micro-batch, padding included."""
    indices: tuple[tuple[tuple[int, ...], ...], ...]
    """indices[dp rank][micro-batch] are the sequences packed there, ascending; () is padding only."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one data-parallel rank."""
        return len(self.indices[0])


def plan_micro_batches(lengths: Sequence[int], num_dp: int, micro_batch_toks: int, pad_multiple: int) -> MicroBatchPlan:
    """Distribute sequences over data-parallel ranks and micro-batches, balanced by tokens.

    lengths: tokens of each sequence, prompt and completion. micro_batch_toks: most tokens of one micro-batch, before padding.
    pad_multiple: 128 * tp. Raises ValueError for a sequence that is longer than `micro_batch_toks`.
    """
    assert num_dp >= 1 and pad_multiple >= 1, (num_dp, pad_multiple)
    if not lengths:
        raise ValueError("there are no sequences to pack; the rollout gave nothing")
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    if lengths[longest] > micro_batch_toks:
        raise ValueError(
            f"sequence {longest} has {lengths[longest]} tokens, more than parallel.micro_batch_toks {micro_batch_toks}; raise "
            "parallel.micro_batch_toks or lower data.max_prompt_toks and rollout.max_new_toks"
        )
    assert min(lengths) >= 1, "a sequence has no tokens"
    num_micro = max(1, -(-sum(lengths) // (num_dp * micro_batch_toks)))
    while (bins := _fill(lengths, num_dp * num_micro, micro_batch_toks)) is None:
        num_micro += 1
    fullest = max(sum(lengths[i] for i in members) for members in bins)
    return MicroBatchPlan(
        length=-(-fullest // pad_multiple) * pad_multiple,
        indices=tuple(tuple(tuple(bins[micro * num_dp + rank]) for micro in range(num_micro)) for rank in range(num_dp)),
    )


def split_minibatches(num_samples: int, minibatches: int) -> list[list[int]]:
    """Cut samples into consecutive minibatches whose sizes differ by at most one; one optimizer step each.

    Raises ValueError when there are fewer samples than minibatches.
    """
    if num_samples < minibatches:
        raise ValueError(f"grpo.minibatches is {minibatches} but the step has {num_samples} samples; lower it")
    bounds = [num_samples * k // minibatches for k in range(minibatches + 1)]
    return [list(range(start, end)) for start, end in pairwise(bounds)]


def _fill(lengths: Sequence[int], num_bins: int, limit: int) -> list[list[int]] | None:
    """Longest first into the emptiest bin; None when one does not fit. Bins come back fullest first."""
    loads = [0] * num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = min(range(num_bins), key=lambda b: (loads[b], b))
        if loads[target] + lengths[index] > limit:
            return None
        loads[target] += lengths[index]
        bins[target].append(index)
    order = sorted(range(num_bins), key=lambda b: (-loads[b], b))
    return [sorted(bins[b]) for b in order]
