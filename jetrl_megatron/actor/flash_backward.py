"""Backward of packed causal attention in two kernels: cuDNN's for long segments, FlashAttention-2's for the rest.

    p_ij = exp(scale q_i . k_j - lse_i),   ds_ij = p_ij (do_i . v_j - do_i . o_i)
    dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i p_ij do_i        (j <= i)

Enters: what the forward saved, the output's gradient, the segments as host integers. Leaves: dq, dk, dv, zero in the rows behind the
segments. cuDNN takes dense batches and plans for tens of ms at every new shape, so lengths are rounded up to buckets and segments of one
bucket are one call. Invariant: every real row is in one call, and the rows that fill a bucket are zero in every operand (lse too): their
queries have p = 1 and ds = 0 and add nothing to a real key's gradient, and no real query sees their keys. Left out: cuDNN's own packed
form, which torch plans anew at every call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

Segment = tuple[int, int]
"""First row of a sequence and the row behind its last."""
SHORTEST_CUDNN_TOKS = 2048
"""Segments below it go to FlashAttention-2. A start, not a measured crossing: cuDNN was timed at 8192 tokens only."""
_SMALLEST_STEP = 256


class Operands(NamedTuple):
    """What a backward reads: do, q and out [T, Hq, D], k and v [T, Hkv, D], all of one dtype; lse [Hq, T], natural logarithm."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def moved(self, move: Callable[[Tensor], Tensor], lse: Tensor) -> "Operands":
        """Return `move` of every tensor but lse, which is given."""
        return Operands(move(self.do), move(self.q), move(self.k), move(self.v), move(self.out), lse)


@dataclass(frozen=True)
class BackwardPlan:
    """Which segments go into which call; empty segments are in none."""

    short: tuple[Segment, ...]
    """In one FlashAttention-2 call."""
    batches: dict[int, tuple[Segment, ...]]
    """Bucket length -> the segments of one cuDNN call."""


def bucket_length(length: int) -> int:
    """Round up to a multiple of max(256, the largest power of two <= length / 8): 8 buckets between powers of two, at most 1/8 is added."""
    step = max(_SMALLEST_STEP, 1 << max(0, (length // 8).bit_length() - 1))
    return -(-length // step) * step


def plan_backward(segments: Sequence[Segment], shortest: int = SHORTEST_CUDNN_TOKS) -> BackwardPlan:
    """Sort segments into calls; shortest: length in tokens from which one goes to cuDNN."""
    short: list[Segment] = []
    batches: dict[int, list[Segment]] = {}
    for start, end in segments:
        if end - start >= shortest:
            batches.setdefault(bucket_length(end - start), []).append((start, end))
        elif end > start:
            short.append((start, end))
    return BackwardPlan(tuple(short), {length: tuple(batch) for length, batch in batches.items()})


def segment_backward(x: Operands, segments: Sequence[Segment], scale: float, shortest: int = SHORTEST_CUDNN_TOKS) -> tuple[Tensor, ...]:
    """Return dq [T, Hq, D], dk and dv [T, Hkv, D] without a device synchronisation.

    segments: in order, end to end from row 0; rows behind them are padding, whose gradients are zero. scale: of the scores.
    """
    ends = [0, *(end for _, end in segments)]
    assert [start for start, _ in segments] == ends[:-1] and ends[-1] <= len(x.q), (segments, len(x.q))
    plan = plan_backward(segments, shortest)
    found: dict[Segment, tuple[Tensor, ...]] = {}
    if plan.short:
        found |= _short(x, plan.short, scale)
    for length, batch in plan.batches.items():
        found |= _long(x, batch, length, scale)
    pieces = [found[segment] for segment in segments if segment in found]
    return tuple(_assembled([piece[i] for piece in pieces], like) for i, like in enumerate((x.q, x.k, x.v)))


def flash2_backward(x: Operands, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, ...]:
    """Run torch's FlashAttention-2 backward over all rows; bounds: [S + 1] int32 from 0 to T, longest: host-side bound of the lengths."""
    unused = torch.empty(0, device=x.q.device)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=x.q.device)
    grads: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
        x.do, x.q, x.k, x.v, x.out, x.lse, bounds, bounds, longest, longest, 0.0, True, no_dropout, unused, scale=scale
    )
    return grads


def cudnn_backward(x: Operands, scale: float) -> tuple[Tensor, ...]:
    """Run cuDNN's backward on a dense causal batch: do, q, out [B, Hq, L, D], k and v [B, Hkv, L, D], lse [B, Hq, L, 1] float32.

    Torch keys its plans by the layout of q, k and v alone: do and out must be laid out as q is.
    """
    no_dropout = torch.zeros((), dtype=torch.int64, device=x.q.device)
    length = x.q.shape[2]
    grads: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *x, no_dropout, no_dropout, None, None, None, length, length, 0.0, True, scale=scale
    )
    return grads


def _short(x: Operands, segments: tuple[Segment, ...], scale: float) -> dict[Segment, tuple[Tensor, ...]]:
    """Segment -> its rows of dq, dk, dv, all from one FlashAttention-2 call."""
    packed = x.moved(lambda t: _joined(t, segments, 0), _joined(x.lse, segments, 1))
    bounds = list(accumulate((end - start for start, end in segments), initial=0))
    on_host = torch.tensor(bounds, dtype=torch.int32, pin_memory=x.q.is_cuda)  # from pageable memory the copy would wait for the device
    longest = max(end - start for start, end in segments)
    grads = flash2_backward(packed, on_host.to(x.q.device, non_blocking=True), longest, scale)
    return {s: tuple(g[a:b] for g in grads) for s, a, b in zip(segments, bounds[:-1], bounds[1:], strict=True)}


def _long(x: Operands, segments: tuple[Segment, ...], length: int, scale: float) -> dict[Segment, tuple[Tensor, ...]]:
    """Segment -> its rows of dq, dk, dv, all from one cuDNN call on [B, H, length, D]."""
    lse = x.lse.new_zeros(len(segments), len(x.lse), length, 1)
    for row, (start, end) in zip(lse, segments, strict=True):
        row[:, : end - start, 0] = x.lse[:, start:end]
    dense = x.moved(lambda t: _batched(t, segments, length), lse)
    grads = [g.transpose(1, 2) for g in cudnn_backward(dense, scale)]
    return {(a, b): tuple(g[i, : b - a] for g in grads) for i, (a, b) in enumerate(segments)}


def _batched(t: Tensor, segments: tuple[Segment, ...], length: int) -> Tensor:
    """[T, H, D] -> [B, H, length, D] with zero rows behind each segment; a view where the segments are full and lie end to end."""
    runs = _runs(segments)
    if len(runs) == 1 and runs[0][1] - runs[0][0] == len(segments) * length:
        return t[slice(*runs[0])].unflatten(0, (len(segments), length)).transpose(1, 2)
    rows = t.new_zeros(len(segments), length, *t.shape[1:])
    for row, (start, end) in zip(rows, segments, strict=True):
        row[: end - start] = t[start:end]
    return rows.transpose(1, 2)


def _joined(t: Tensor, segments: tuple[Segment, ...], dim: int) -> Tensor:
    """The segments' rows along `dim`, end to end; a view where they lie so already and `dim` is the first."""
    parts = [t.narrow(dim, start, end - start) for start, end in _runs(segments)]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()


def _runs(segments: Sequence[Segment]) -> list[Segment]:
    """Merge segments that lie end to end."""
    runs: list[Segment] = []
    for start, end in segments:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs


def _assembled(pieces: list[Tensor], like: Tensor) -> Tensor:
    """The pieces end to end, then zeros, as many rows as `like` has; no copy where one piece is all of it."""
    padding = len(like) - sum(len(piece) for piece in pieces)
    if padding:
        pieces = [*pieces, like.new_zeros(padding, *like.shape[1:])]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous()
