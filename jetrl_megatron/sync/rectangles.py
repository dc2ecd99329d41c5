"""The planner's copy operations, merged where rectangles lie at equal distances: heads that alternate in a fused weight cost one copy.

Enters: the operations of one target tensor, in order. Leaves: `Run`s, each a number of equal rectangles down the rows of one source and of
the target, and their copy. Invariant: the runs copy exactly the elements, and the scales, that the operations do.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from conversion.layout import BLOCK
from conversion.plan import CopyOp
from conversion.shards import Span
from jetrl_megatron.fp8.words import copy_in_words


@dataclass(frozen=True, kw_only=True)
class Run:
    """`count` rectangles of one size: `first`, and those behind it at equal distances in source and target."""

    first: CopyOp
    count: int
    source_step: int
    """Rows from one rectangle to the next, 0 where there is no next."""
    target_step: int

    def covers(self, rows_cols: tuple[int, int]) -> bool:
        """Tell whether this is one rectangle that is all of a target of that many rows and columns."""
        return self.count == 1 and (self.first.target_rows, self.first.target_cols) == ((0, rows_cols[0]), (0, rows_cols[1]))

    def view(self, source: Tensor, *, scales: bool = False) -> Tensor:
        """Return the first rectangle where it lies in the source matrix, of elements, or of scales."""
        unit = BLOCK if scales else 1
        return _strided(source, self.first.source_rows, self.first.source_cols, unit, 1, 0)[0]

    def copy(self, target: Tensor, source: Tensor, *, scales: bool = False) -> None:
        """Copy between the two whole matrices, [rows, cols] of elements, or of scales of 128x128 blocks."""
        op, unit = self.first, BLOCK if scales else 1
        into = _strided(target, op.target_rows, op.target_cols, unit, self.count, self.target_step)
        copy_in_words(into, _strided(source, op.source_rows, op.source_cols, unit, self.count, self.source_step))


def runs(ops: Iterable[CopyOp]) -> tuple[Run, ...]:
    """Merge neighbours among the operations of one target."""
    found: list[Run] = []
    last: CopyOp | None = None
    for op in ops:
        merged = None if last is None else _longer(found[-1], last, op)
        if merged is None:
            found.append(Run(first=op, count=1, source_step=0, target_step=0))
        else:
            found[-1] = merged
        last = op
    return tuple(found)


def _longer(run: Run, last: CopyOp, op: CopyOp) -> Run | None:
    """Return the run with `op` behind `last`, its last operation; None where op lies otherwise."""
    steps = op.source_rows[0] - last.source_rows[0], op.target_rows[0] - last.target_rows[0]
    alike = (op.source.location, op.source.name, op.source_cols, op.target_cols) == (
        last.source.location,
        last.source.name,
        last.source_cols,
        last.target_cols,
    )
    height = last.source_rows[1] - last.source_rows[0]
    if not alike or op.source_rows[1] - op.source_rows[0] != height or min(steps) < height:
        return None
    if op.with_scales and any(step % BLOCK for step in steps):
        return None
    if run.count > 1 and steps != (run.source_step, run.target_step):
        return None
    return Run(first=run.first, count=run.count + 1, source_step=steps[0], target_step=steps[1])


def _strided(x: Tensor, rows: Span, cols: Span, unit: int, count: int, step: int) -> Tensor:
    """A view of `count` rectangles [count, height, width]; ranges and step in elements, x in units of them."""
    down, across = x.stride()
    top, left = rows[0] // unit, cols[0] // unit
    size = (count, -(-rows[1] // unit) - top, -(-cols[1] // unit) - left)
    assert top + (count - 1) * (step // unit) + size[1] <= x.shape[0] and left + size[2] <= x.shape[1], (rows, cols, x.shape)
    return x.as_strided(size, (step // unit * down, down, across), x.storage_offset() + top * down + left * across)
