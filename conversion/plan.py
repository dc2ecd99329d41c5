"""The pure planner: two descriptions of the same model in, copy operations out. No tensors, no processes, no files.

Enters: source and target `StoredTensor` lists over one canonical space. Leaves: a `Plan`. For each target piece the source pieces of
the same canonical tensor are intersected with it; each intersection is one `CopyOp`, FP8 codes together with their block scales.

Invariants, asserted for each plan: every destination element is written exactly once, by an operation or as zero padding; no
operation leaves its shard; scale ranges are the code ranges over 128, and whole blocks. For a whole-model plan also: each source tensor
is used, or is a replica that must equal what is used (`Plan.replicas`).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from conversion.layout import BLOCK
from conversion.shards import Piece, StoredTensor, overlapping

Range = tuple[int, int]


@dataclass(frozen=True)
class CopyOp:
    """Copy one rectangle. Ranges are half-open; the four scale ranges count 128-blocks and are None for BF16."""

    source: StoredTensor
    source_rows: Range
    source_cols: Range
    target: StoredTensor
    target_rows: Range
    target_cols: Range

    @property
    def with_scales(self) -> bool:
        """Codes and scales travel: both sides are block FP8."""
        return self.source.fp8 and self.target.fp8

    @property
    def scale_ranges(self) -> tuple[Range, Range, Range, Range]:
        """Source rows, source columns, target rows, target columns, in 128-blocks."""
        assert self.with_scales, (self.source.name, self.target.name)
        return (_blocks(self.source_rows), _blocks(self.source_cols), _blocks(self.target_rows), _blocks(self.target_cols))


@dataclass(frozen=True)
class TargetPlan:
    """All that fills one target tensor."""

    target: StoredTensor
    ops: tuple[CopyOp, ...]
    padding: int
    """Elements that stay zero."""


@dataclass(frozen=True)
class Plan:
    """Target tensors in the order of their description, and the source replicas that were not read for them."""

    targets: tuple[TargetPlan, ...]
    replicas: tuple[CopyOp, ...]
    """`source` is a second copy of what `target`, also a source tensor, holds: they must be equal bit for bit."""

    @property
    def num_bytes(self) -> int:
        """Bytes that are written."""
        return sum(t.target.num_bytes for t in self.targets)


def _blocks(span: Range) -> Range:
    return (span[0] // BLOCK, -(-span[1] // BLOCK))


def make_plan(sources: Iterable[StoredTensor], targets: Iterable[StoredTensor], whole: bool = True) -> Plan:
    """Plan the move from one description to another.

    whole: the targets are the complete model, so that every source tensor must be used; False for the shards of some ranks.
    Raises ValueError naming the target tensor where the sources lack something, the source tensor where nothing takes it, and the
    tensor and row where a cut goes through an FP8 block.
    """
    sources = list(sources)
    index, replicas = _primary_pieces(sources)
    plans = tuple(_plan_target(target, index) for target in targets)
    if whole:
        used = {(op.source.location, op.source.name) for plan in plans for op in plan.ops}
        used |= {(op.source.location, op.source.name) for op in replicas}
        unused = sorted(f"{s.location}:{s.name}" for s in sources if s.pieces and (s.location, s.name) not in used)
        if unused:
            raise ValueError(f"{len(unused)} source tensors are used by no target: {', '.join(unused[:8])}")
    return Plan(plans, replicas)


_Index = dict[str, list[tuple[Piece, StoredTensor]]]


def _primary_pieces(sources: list[StoredTensor]) -> tuple[_Index, tuple[CopyOp, ...]]:
    """Index source pieces by canonical tensor, the first copy of each element only; later copies become replica checks."""
    index: _Index = defaultdict(list)
    replicas: list[CopyOp] = []
    for stored in sources:
        for piece in stored.pieces:
            known = [(p, s, overlap) for p, s in index[piece.hf] if (overlap := _overlap(p, piece)) is not None]
            if not known:
                index[piece.hf].append((piece, stored))
                continue
            covered = sum(_area(*overlap) for _, _, overlap in known)
            assert covered == _area(piece.rows, piece.cols), f"{stored.location}:{stored.name} partly overlaps another source tensor"
            replicas += [_op(piece, stored, p, s, overlap) for p, s, overlap in known]
    return index, tuple(replicas)


def _plan_target(target: StoredTensor, index: _Index) -> TargetPlan:
    ops: list[CopyOp] = []
    for piece in target.pieces:
        found = 0
        for source_piece, stored in index.get(piece.hf, ()):
            overlap = _overlap(source_piece, piece)
            if overlap is not None:
                ops.append(_op(source_piece, stored, piece, target, overlap))
                found += _area(*overlap)
        if found != _area(piece.rows, piece.cols):
            raise ValueError(
                f"{target.location}:{target.name} needs rows {piece.rows}, columns {piece.cols} of {piece.hf}, "
                f"but the source holds only {found} of these {_area(piece.rows, piece.cols)} elements"
            )
    plan = TargetPlan(target, tuple(ops), _padding(target, ops))
    for op in ops:
        _check_op(op)
    return plan


def _op(source_piece: Piece, source: StoredTensor, target_piece: Piece, target: StoredTensor, overlap: tuple[Range, Range]) -> CopyOp:
    rows, cols = overlap
    return CopyOp(source, *_local(source_piece, rows, cols), target, *_local(target_piece, rows, cols))


def _local(piece: Piece, rows: Range, cols: Range) -> tuple[Range, Range]:
    """Shift a canonical rectangle into the stored tensor that the piece lies in."""
    down, right = piece.row_at - piece.rows[0], piece.col_at - piece.cols[0]
    return (rows[0] + down, rows[1] + down), (cols[0] + right, cols[1] + right)


def _overlap(a: Piece, b: Piece) -> tuple[Range, Range] | None:
    rows = (max(a.rows[0], b.rows[0]), min(a.rows[1], b.rows[1]))
    cols = (max(a.cols[0], b.cols[0]), min(a.cols[1], b.cols[1]))
    return (rows, cols) if rows[0] < rows[1] and cols[0] < cols[1] else None


def _area(rows: Range, cols: Range) -> int:
    return (rows[1] - rows[0]) * (cols[1] - cols[0])


def _padding(target: StoredTensor, ops: list[CopyOp]) -> int:
    """Return the elements that no operation writes, after asserting that none is written twice and padding is declared."""
    for first, second in overlapping(ops, lambda op: (op.target_rows, op.target_cols)):
        raise AssertionError(f"{target.location}:{target.name} rows {first.target_rows} and {second.target_rows} are written twice")
    rows, cols = target.rows_cols
    left = rows * cols - sum(_area(op.target_rows, op.target_cols) for op in ops)
    declared = rows * cols - sum(_area(p.rows, p.cols) for p in target.pieces)
    assert left == declared >= 0, (target.location, target.name, left, declared)
    assert not (left and target.fp8), f"{target.location}:{target.name} is FP8 and padded"
    return left


def _check_op(op: CopyOp) -> None:
    """Assert that ranges lie inside their shards; raise ValueError where an FP8 block would be cut."""
    for stored, rows, cols in ((op.source, op.source_rows, op.source_cols), (op.target, op.target_rows, op.target_cols)):
        limit = stored.rows_cols
        assert 0 <= rows[0] < rows[1] <= limit[0] and 0 <= cols[0] < cols[1] <= limit[1], (stored.name, rows, cols, limit)
    if not op.with_scales:
        return
    spans = ((op.source, op.source_rows, 0), (op.source, op.source_cols, 1), (op.target, op.target_rows, 0), (op.target, op.target_cols, 1))
    for stored, span, axis in spans:
        if span[0] % BLOCK or (span[1] % BLOCK and span[1] != stored.rows_cols[axis]):
            raise ValueError(
                f"{stored.location}:{stored.name}: cut {span[0]}..{span[1]} on axis {axis} goes through a {BLOCK}x{BLOCK} block; "
                "this layout is illegal in FP8, choose a TP degree that keeps blocks whole"
            )
