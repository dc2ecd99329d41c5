"""Builds one target tensor of a plan in memory, from rectangles of the source; and compares the copies that a source holds.

Enters: a `TargetPlan` and the opened source. Leaves: bytes, and FP32 scales for block FP8. Codes and scales are moved as they are; a plan
that changes precision runs only where the caller names the cast.
"""

from collections.abc import Callable, Iterator

import numpy as np

from conversion.checkpoint import Checkpoint
from conversion.files import TensorSpec
from conversion.layout import BLOCK
from conversion.plan import CopyOp, Plan, TargetPlan
from conversion.shards import StoredTensor

Allocate = Callable[[int], np.ndarray]
"""Bytes wanted -> [bytes] uint8, contents undefined."""


def _fresh(num_bytes: int) -> np.ndarray:
    return np.empty(num_bytes, np.uint8)


def assemble(
    target_plan: TargetPlan, source: Checkpoint, cast: str | None = None, allocate: Allocate = _fresh
) -> tuple[np.ndarray, np.ndarray | None]:
    """Build one target tensor in memory.

    cast: None moves bytes only, `bf16` allows FP8 -> BF16, `fp32` or `ue8m0` allow BF16 -> FP8. allocate: gives the memory of the result.
    Returns its bytes, [rows, columns * item bytes] uint8, and for block FP8 its scales, [blocks, blocks] float32.
    Raises ValueError where the plan changes precision and `cast` does not allow it, and for damaged scales.
    """
    target = target_plan.target
    _check_cast(target_plan, cast)
    quantised = target.fp8 and not target_plan.ops[0].source.fp8
    item = 1 if target.fp8 and not quantised else 2
    rows, cols = target.rows_cols
    if _dequantises(target_plan):
        data = allocate(rows * cols * item).reshape(rows, cols * item)
        for op in target_plan.ops:
            data[slice(*op.target_rows), op.target_cols[0] * item : op.target_cols[1] * item] = _dequantized(source, op)
    else:
        data = next(windows(target_plan, source, allocate, max(1, rows * cols * item)))
    scales = read_scales(target_plan, source) if target.fp8 and not quantised else None
    if quantised:
        from conversion.cast import quantize_bytes

        assert cast is not None
        return quantize_bytes(f"{target.location}:{target.name}", data, cast)
    return data, scales


def _dequantises(target_plan: TargetPlan) -> bool:
    return not target_plan.target.fp8 and any(op.source.fp8 for op in target_plan.ops)


def moves_bytes(target_plan: TargetPlan) -> bool:
    """Tell whether a target tensor keeps the precision of its source, so that it may be moved by `windows`."""
    return all(op.source.fp8 == target_plan.target.fp8 for op in target_plan.ops)


def windows(target_plan: TargetPlan, source: Checkpoint, allocate: Allocate, window_bytes: int) -> Iterator[np.ndarray]:
    """Yield a target tensor as runs of whole rows, first to last, without changing a byte.

    window_bytes: size of a run; one row at least. Each is [rows, columns * item bytes] uint8 and valid until the next is asked for.
    """
    target, ops = target_plan.target, target_plan.ops
    item = 1 if ops and ops[0].source.fp8 else 2
    rows, cols = target.rows_cols
    step = max(1, window_bytes // (cols * item))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        data = allocate((last - first) * cols * item).reshape(last - first, cols * item)
        if target_plan.padding:
            data.fill(0)
        for op in ops:
            top, bottom = max(first, op.target_rows[0]), min(last, op.target_rows[1])
            if top < bottom:
                shift = op.source_rows[0] - op.target_rows[0]
                out = data[top - first : bottom - first, op.target_cols[0] * item : op.target_cols[1] * item]
                source.read(op.source, (top + shift, bottom + shift), op.source_cols, out)
        yield data


def read_scales(target_plan: TargetPlan, source: Checkpoint) -> np.ndarray:
    """Return the block scales of a target tensor that is FP8 on both sides, [blocks, blocks] float32."""
    scales = np.empty(target_plan.target.scale_shape, np.float32)
    for op in target_plan.ops:
        from_rows, from_cols, to_rows, to_cols = op.scale_ranges
        scales[slice(*to_rows), slice(*to_cols)] = source.read_scales(op.source, from_rows, from_cols)
    return scales


def _check_cast(target_plan: TargetPlan, cast: str | None) -> None:
    target = target_plan.target
    for op in target_plan.ops:
        if op.source.fp8 and not target.fp8 and cast != "bf16":
            raise ValueError(f"{op.source.name} is FP8 and {target.name} BF16: dequantising must be asked for (cast='bf16')")
        if target.fp8 and not op.source.fp8 and cast not in ("fp32", "ue8m0"):
            raise ValueError(f"{op.source.name} is BF16 and {target.name} FP8: quantising must be asked for (cast='fp32' or 'ue8m0')")
    assert len({op.source.fp8 for op in target_plan.ops}) <= 1, f"{target.name} is fed by FP8 and BF16 sources"


def _dequantized(source: Checkpoint, op: CopyOp) -> np.ndarray:
    """Read the whole blocks around a rectangle, dequantise, and cut the rectangle out."""
    from conversion.cast import dequantize_bytes

    limits = op.source.rows_cols
    blocks = tuple((span[0] // BLOCK, -(-span[1] // BLOCK)) for span in (op.source_rows, op.source_cols))
    rows, cols = ((b[0] * BLOCK, min(b[1] * BLOCK, limit)) for b, limit in zip(blocks, limits, strict=True))
    codes = np.empty((rows[1] - rows[0], cols[1] - cols[0]), np.uint8)
    source.read(op.source, rows, cols, codes)
    values = dequantize_bytes(f"{op.source.location}:{op.source.name}", codes, source.read_scales(op.source, *blocks))
    first = (op.source_cols[0] - cols[0]) * 2
    width = (op.source_cols[1] - op.source_cols[0]) * 2
    return values[op.source_rows[0] - rows[0] : op.source_rows[1] - rows[0], first : first + width]


def check_replicas(plan: Plan, source: Checkpoint) -> None:
    """Raise ValueError naming the first tensor of which two ranks hold different values (norms, a tied head)."""
    for op in plan.replicas:
        item = 1 if op.source.fp8 else 2
        step = max(1, 2**24 // (item * (op.source_cols[1] - op.source_cols[0])))
        for first in range(0, op.source_rows[1] - op.source_rows[0], step):
            one, two = (_read(source, *side, item, (first, step)) for side in _sides(op))
            if not np.array_equal(one, two):
                raise ValueError(
                    f"{op.source.location}:{op.source.name} differs from its copy {op.target.location}:{op.target.name}; "
                    "copies of one weight must be equal, the source checkpoint is inconsistent"
                )


def _sides(op: CopyOp) -> tuple[tuple[StoredTensor, tuple[int, int], tuple[int, int]], ...]:
    return (op.source, op.source_rows, op.source_cols), (op.target, op.target_rows, op.target_cols)


def _read(
    source: Checkpoint, stored: StoredTensor, rows: tuple[int, int], cols: tuple[int, int], item: int, window: tuple[int, int]
) -> np.ndarray:
    first, step = window
    span = (rows[0] + first, min(rows[0] + first + step, rows[1]))
    out = np.empty((span[1] - span[0], (cols[1] - cols[0]) * item), np.uint8)
    source.read(stored, span, cols, out)
    return out


def tensor_specs(target: StoredTensor) -> list[TensorSpec]:
    """Return what a target tensor is in a file: BF16, or FP8 codes and FP32 scales."""
    if not target.fp8:
        return [TensorSpec(target.name, "BF16", target.shape)]
    return [TensorSpec(target.name, "F8_E4M3", target.shape), TensorSpec(target.scale_name, "F32", target.scale_shape)]
