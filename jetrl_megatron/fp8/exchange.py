"""What tensor-parallel ranks exchange around one linear: X on its way in, dX on its way back, beside the GEMMs of the backward; columns
of Y for tokens.

Enters: this rank's part of X, quantised or BF16, and in the backward its dX of the whole X. Leaves: the whole X, this rank's part of dX.
Equation: with X cut along an axis, X = [X_0 .. X_size-1] and dX_r = part r of sum_s dX_s; where every rank holds all of X, dX = sum_s dX_s.
In the forward the GEMM needs X at once, so its gather is waited for. In the backward nothing waits where it starts: a `start_*` method
returns a function that waits and gives the result. The order that every linear keeps:

    start X -> dY's quantisation, dgrad -> start dX -> wait for X -> wgrad -> wait for dX

A backward that makes [gate | up] again (parallel.recompute=fc1) first starts X's rows and waits for them behind the start of X, or, in
BF16, waits for X itself.

Invariants: sums are BF16, one collective each, so their bits are those of the same collective waited for at once; on CUDA waiting holds up
the current stream and never the host; a started collective holds its tensors until it is waited for; every rank starts the same collectives
in the same order.
Left out: which linear exchanges what (actor/linears.py), how codes and scales travel (gather.py).

Legend: T tokens, K input features of the whole X.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.gather import gather_blocks, start_gather_blocks
from jetrl_megatron.fp8.words import columns_apart, side_by_side


@dataclass(frozen=True, kw_only=True)
class InputExchange:
    """Where X [T, K] of a linear lies, and how its gradient comes back."""

    axis: int | None
    """Along which X is cut over the ranks: 0 tokens, 1 features; None where every rank holds all of it."""
    group: Any
    """The tensor-parallel process group, of more than one rank; None where nothing is exchanged (`LOCAL`)."""

    def whole_shape(self, part: Sequence[int]) -> tuple[int, int]:
        """(T, K) of X from the shape of what a rank holds."""
        shape = [part[0], part[1]]
        if self.axis is not None:
            shape[self.axis] *= self.group.size()
        return shape[0], shape[1]

    def check(self, x_TK: torch.Tensor, weight: torch.Tensor) -> None:
        """Raise ValueError unless x, what this rank holds of X [T, K], and weight [N, K] are BF16 matrices that fit."""
        if x_TK.dim() != 2 or weight.dim() != 2 or self.whole_shape(x_TK.shape)[1] != weight.shape[1]:
            raise ValueError(f"linear: input {tuple(x_TK.shape)} and weight {tuple(weight.shape)} must be [T, K] and [N, K]")
        if x_TK.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
            raise ValueError(f"linear: input is {x_TK.dtype}, weight {weight.dtype}; both must be bfloat16")

    def rows(self, x: BlockScaled) -> BlockScaled:
        """X in blocks 1x128 along K, [T, K], from what a rank holds of it."""
        return x if self.axis is None else gather_blocks(x, self.axis, self.group)

    def start_rows(self, x: BlockScaled) -> Callable[[], BlockScaled]:
        """`rows`, started; call what returns to wait."""
        return (lambda: x) if self.axis is None else start_gather_blocks(x, self.axis, self.group)

    def start_transposed(self, x_t: BlockScaled) -> Callable[[], BlockScaled]:
        """Start to make X^T whole as wgrad reads it, [K, T128], from what a rank holds of it; call what returns to wait."""
        return (lambda: x_t) if self.axis is None else start_gather_blocks(x_t, 1 - self.axis, self.group)

    def whole(self, x_TK: torch.Tensor) -> torch.Tensor:
        """X [T, K] BF16 from what a rank holds of it."""
        return x_TK if self.axis is None else self._gather(x_TK, self.axis, async_op=False)()

    def start_whole(self, x_TK: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`whole`, started; call what returns to wait."""
        return (lambda: x_TK) if self.axis is None else self._gather(x_TK, self.axis, async_op=True)

    def start_sum(self, dx_TK: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to add up dX [T, K] BF16 over the ranks, in place where X is not cut; call what returns to wait.

        It gives the sum where this rank holds X: [T/size, K], [T, K/size] or [T, K].
        """
        if self.group is None:
            return lambda: dx_TK
        summands = [dx_TK.contiguous()]
        if self.axis is None:
            total = summands[0]
            work = dist.all_reduce(total, group=self.group, async_op=True)
        else:
            size = self.group.size()
            if self.axis == 1:
                summands = [columns_apart(dx_TK, size)]
            rows, cols = summands[0].shape
            total = dx_TK.new_empty((rows // size, cols))
            work = dist.reduce_scatter_tensor(total, summands[0], group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            summands.clear()  # held until here: the collective reads them
            return total

        return wait

    def _gather(self, x_TK: torch.Tensor, axis: int, *, async_op: bool) -> Callable[[], torch.Tensor]:
        """All-gather BF16 parts; what returns waits and puts them together along `axis`."""
        size, parts = self.group.size(), [x_TK.contiguous()]
        whole = x_TK.new_empty((size * x_TK.shape[0], x_TK.shape[1]))
        work = dist.all_gather_into_tensor(whole, parts[0], group=self.group, async_op=async_op)

        def wait() -> torch.Tensor:
            if work is not None:
                work.wait()
            parts.clear()  # held until here: the collective reads them
            return whole if axis == 0 else side_by_side(whole, size)

        return wait


LOCAL = InputExchange(axis=None, group=None)
"""Nothing is exchanged: every rank has its own X, or there is one rank."""


def columns_for_tokens(y_TN: torch.Tensor, group: Any) -> torch.Tensor:
    """Trade columns for tokens: a rank with all tokens of its columns, [T, N/size] BF16, gets all columns of its tokens, [T/size, N].

    group: the tensor-parallel group; T is a multiple of its size. The gradient goes the way back.
    """
    traded: torch.Tensor = _ColumnsForTokens.apply(y_TN, group)
    return traded


class _ColumnsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_TN: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return side_by_side(_all_to_all(y_TN.contiguous(), group), group.size())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(columns_apart(grads[0], ctx.group.size()), ctx.group), None


def _all_to_all(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Part r of the rows to rank r; the parts of all ranks, in rank order."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
