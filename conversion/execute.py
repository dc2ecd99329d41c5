"""Runs a plan: one target tensor at a time for each worker, read by rectangles, written at its final offset.

Enters: a plan, the opened source, and which file each target tensor goes to. Leaves: complete shard files in an `OutputDirectory`,
journalled one by one. Memory: `workers` target tensors at once, never a whole shard. FP8 codes and scales move as they are; a plan that
changes precision runs only where the caller allows it.
"""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from conversion.checkpoint import Checkpoint
from conversion.files import ShardWriter, TensorSpec
from conversion.layout import BLOCK
from conversion.output import OutputDirectory
from conversion.plan import CopyOp, Plan, TargetPlan
from conversion.scales import scale_format
from conversion.shards import StoredTensor

_FLUSH_BYTES = 2**27

Progress = Callable[[int], None]
"""Called with the bytes that were written since the last call."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a plan is run."""

    source: Checkpoint
    output: OutputDirectory
    file_of: Mapping[tuple[str, str], str]
    """(location, tensor name) of each target tensor -> shard file."""
    metadata: Mapping[str, str]
    """Goes into each shard's header."""
    cast: str | None = None
    """None moves bytes only; `bf16` allows FP8 -> BF16; `fp32` or `ue8m0` allow BF16 -> FP8 with such scales."""
    workers: int = 2


def assemble(target_plan: TargetPlan, source: Checkpoint, cast: str | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """Build one target tensor in memory.

    Returns its bytes, [rows, columns * item bytes] uint8, and for block FP8 its scales, [blocks, blocks] float32.
    Raises ValueError where the plan changes precision and `cast` does not allow it, and for damaged scales.
    """
    target = target_plan.target
    _check_cast(target_plan, cast)
    quantised = target.fp8 and not target_plan.ops[0].source.fp8
    item = 1 if target.fp8 and not quantised else 2
    rows, cols = target.rows_cols
    data = (np.zeros if target_plan.padding else np.empty)((rows, cols * item), np.uint8)
    scales = np.empty(target.scale_shape, np.float32) if target.fp8 and not quantised else None
    for op in target_plan.ops:
        out = data[slice(*op.target_rows), op.target_cols[0] * item : op.target_cols[1] * item]
        if op.source.fp8 and not target.fp8:
            out[:] = _dequantized(source, op)
            continue
        source.read(op.source, op.source_rows, op.source_cols, out)
        if scales is not None:
            from_rows, from_cols, to_rows, to_cols = op.scale_ranges
            scales[slice(*to_rows), slice(*to_cols)] = source.read_scales(op.source, from_rows, from_cols)
    if quantised:
        from conversion.cast import quantize_bytes

        assert cast is not None
        return quantize_bytes(f"{target.location}:{target.name}", data, cast)
    return data, scales


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
    values = dequantize_bytes(codes, source.read_scales(op.source, *blocks))
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


class _Shard:
    """One output file and what is still missing from it. Syncing happens on the flusher's thread, beside reading and hashing."""

    def __init__(self, name: str, targets: list[TargetPlan], run: Execution, flusher: Executor) -> None:
        self.name = name
        self.left = len(targets)
        self.tensors: dict[str, dict[str, Any]] = {}
        self.syncs: list[Future[None]] = []
        self._targets, self._run, self._flusher, self._lock = targets, run, flusher, Lock()
        self._writer: ShardWriter | None = None
        self._unsynced = 0

    def write(self, name: str, dtype: str, data: np.ndarray, extra: dict[str, Any]) -> None:
        with self._lock:
            if self._writer is None:
                specs = [spec for t in self._targets for spec in tensor_specs(t.target)]
                self._writer = ShardWriter(self._run.output.path / self.name, specs, dict(self._run.metadata))
        raw = data.view(np.uint8).reshape(data.shape[0], -1)
        self._writer.write(name, raw)
        self.tensors[name] = {"dtype": dtype, "sha256": hashlib.sha256(raw).hexdigest(), **extra}
        with self._lock:
            self._unsynced += raw.nbytes
            if self._unsynced > _FLUSH_BYTES:
                self._unsynced = 0
                self.syncs.append(self._flusher.submit(self._writer.flush))

    def finish_one(self) -> None:
        """Count one target tensor; behind the last, have the file synced, closed and journalled."""
        with self._lock:
            self.left -= 1
            if self.left == 0:
                self.syncs.append(self._flusher.submit(self._complete))

    def _complete(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._run.output.record(self.name, self.tensors)

    def abandon(self) -> None:
        """Close what an error left open."""
        if self._writer is not None:
            self._writer.close(sync=False)


def execute(plan: Plan, run: Execution, progress: Progress | None = None) -> None:
    """Write all shard files of a plan that the output's journal does not list yet.

    progress: called from worker threads. Raises the first error of any worker; complete files stay journalled.
    """
    by_file: dict[str, list[TargetPlan]] = {}
    for target_plan in plan.targets:
        by_file.setdefault(run.file_of[target_plan.target.location, target_plan.target.name], []).append(target_plan)
    todo = {name: targets for name, targets in by_file.items() if name not in run.output.done}
    if progress is not None:
        progress(sum(t.target.num_bytes for name, targets in by_file.items() if name not in todo for t in targets))
    with ThreadPoolExecutor(max_workers=1) as flusher, ThreadPoolExecutor(max_workers=run.workers) as pool:
        shards = {name: _Shard(name, targets, run, flusher) for name, targets in todo.items()}
        # Targets go in plan order, so that tensor-parallel shards of one parameter are read while its pages are in memory.
        order = [(t, shards[f]) for t in plan.targets if (f := run.file_of[t.target.location, t.target.name]) in shards]
        try:
            _wait(pool, [pool.submit(_write_target, t, shard, run, progress) for t, shard in order])
            _wait(flusher, [sync for shard in shards.values() for sync in shard.syncs])
        finally:
            flusher.shutdown(wait=True, cancel_futures=True)
            for shard in shards.values():
                shard.abandon()


def _write_target(target_plan: TargetPlan, shard: _Shard, run: Execution, progress: Progress | None) -> None:
    target = target_plan.target
    data, scales = assemble(target_plan, run.source, run.cast)
    extra = {"block": [BLOCK, BLOCK], "scale_format": scale_format(scales)} if scales is not None else {}
    shard.write(target.name, "F8_E4M3" if target.fp8 else "BF16", data, {"shape": list(target.shape), **extra})
    if scales is not None:
        shard.write(target.scale_name, "F32", scales, {"shape": list(scales.shape)})
    shard.finish_one()
    if progress is not None:
        progress(target.num_bytes)


def _wait(pool: Executor, futures: list[Future[None]]) -> None:
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = next((f for f in done if f.exception() is not None), None)
    if failed is not None:
        pool.shutdown(wait=True, cancel_futures=True)
        failed.result()
