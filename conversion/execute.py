"""Runs a plan: one target tensor at a time for each worker, read by rectangles, written at its final offset.

Enters: a plan, the opened source, and which file each target tensor goes to. Leaves: complete shard files in an `OutputDirectory`,
journalled one by one. Memory: `workers` target tensors at once, never a whole shard. FP8 codes and scales move as they are; a plan that
changes precision runs only where the caller allows it.
"""

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, local
from typing import Any

import numpy as np

from conversion.assemble import assemble, moves_bytes, read_scales, tensor_specs, windows
from conversion.checkpoint import Checkpoint
from conversion.files import TensorSpec, TensorWriter
from conversion.layout import BLOCK
from conversion.output import OutputDirectory
from conversion.plan import Plan, TargetPlan
from conversion.scales import scale_format
from conversion.shards import StoredTensor

_FLUSH_BYTES = 2**27
WINDOW_BYTES = 2**22
"""Bytes that are read, hashed and written at a time where precision is kept."""

Progress = Callable[[int], None]
"""Called with the bytes that were written since the last call."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a plan is run."""

    source: Checkpoint
    output: OutputDirectory
    file_of: Mapping[tuple[str, str], str]
    """(location, tensor name) of each target tensor -> shard file."""
    open_file: Callable[[Path, list[TensorSpec]], TensorWriter]
    """Creates one output file for the tensors given."""
    cast: str | None = None
    """None moves bytes only; `bf16` allows FP8 -> BF16; `fp32` or `ue8m0` allow BF16 -> FP8 with such scales."""
    workers: int = 2


class _Shard:
    """One output file and what is still missing from it. Syncing happens on the flusher's thread, beside reading and hashing."""

    def __init__(self, name: str, targets: list[TargetPlan], run: Execution, flusher: Executor) -> None:
        self.name = name
        self.left = len(targets)
        self.tensors: dict[str, dict[str, Any]] = {}
        self.syncs: list[Future[None]] = []
        self._targets, self._run, self._flusher, self._lock = targets, run, flusher, Lock()
        self._writer: TensorWriter | None = None
        self._unsynced = 0

    @property
    def takes_parts(self) -> bool:
        """Whether tensors may be streamed."""
        return self._open().takes_parts

    def write(self, name: str, data: np.ndarray, described: dict[str, Any]) -> None:
        """Write one whole tensor; described: what the manifest says of it beside its checksum and place."""
        raw = data.view(np.uint8).reshape(data.shape[0], -1)
        place = self._open().write(name, raw)
        self._note(name, raw.nbytes, {**described, "sha256": hashlib.sha256(raw).hexdigest(), **place})

    def stream(self, target_plan: TargetPlan, scratch: "_Scratch", described: dict[str, Any]) -> None:
        """Write one tensor, a window at a time while it is in the processor's cache; needs `takes_parts`."""
        writer, name = self._open(), target_plan.target.name
        digest, at = hashlib.sha256(), 0
        for window in windows(target_plan, self._run.source, scratch.take, WINDOW_BYTES):
            digest.update(window)
            writer.write_part(name, at, window)
            at += window.nbytes
        self._note(name, at, {**described, "sha256": digest.hexdigest()})

    def _open(self) -> TensorWriter:
        with self._lock:
            if self._writer is None:
                specs = [spec for t in self._targets for spec in tensor_specs(t.target)]
                self._writer = self._run.open_file(self._run.output.path / self.name, specs)
            return self._writer

    def _note(self, name: str, num_bytes: int, described: dict[str, Any]) -> None:
        """Remember what the manifest says of a tensor that is written, and sync now and then."""
        self.tensors[name] = described
        with self._lock:
            assert self._writer is not None
            self._unsynced += num_bytes
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
        scratch = _Scratch()
        # Targets go in plan order, so that tensor-parallel shards of one parameter are read while its pages are in memory.
        order = [(t, shards[f]) for t in plan.targets if (f := run.file_of[t.target.location, t.target.name]) in shards]
        try:
            _wait(pool, [pool.submit(_write_target, t, shard, run, scratch, progress) for t, shard in order])
            _wait(flusher, [sync for shard in shards.values() for sync in shard.syncs])
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # Ctrl-C ends behind the tensors that are being written, not behind all
            flusher.shutdown(wait=True, cancel_futures=True)
            for shard in shards.values():
                shard.abandon()


class _Scratch(local):
    """One buffer for each worker thread, grown to the largest tensor it has built: fresh pages cost as much as reading."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> np.ndarray:
        """Return [num_bytes] uint8, valid until the next call in this thread."""
        if self._buffer.nbytes < num_bytes:
            self._buffer = np.empty(num_bytes, np.uint8)
        return self._buffer[:num_bytes]


def _write_target(target_plan: TargetPlan, shard: _Shard, run: Execution, scratch: _Scratch, progress: Progress | None) -> None:
    target = target_plan.target
    data: np.ndarray | None = None
    if moves_bytes(target_plan) and shard.takes_parts:
        scales = read_scales(target_plan, run.source) if target.fp8 else None
    else:
        data, scales = assemble(target_plan, run.source, run.cast, scratch.take)
    described: dict[str, Any] = {"dtype": _dtype(target), "shape": list(target.shape)}
    if scales is not None:
        described |= {"block": [BLOCK, BLOCK], "scale_format": scale_format(scales)}
    if data is None:
        shard.stream(target_plan, scratch, described)
    else:
        shard.write(target.name, data, described)
    if scales is not None:
        shard.write(target.scale_name, scales, {"dtype": "F32", "shape": list(scales.shape)})
    shard.finish_one()
    if progress is not None:
        progress(target.num_bytes)


def _dtype(target: StoredTensor) -> str:
    return tensor_specs(target)[0].dtype


def _wait(pool: Executor, futures: list[Future[None]]) -> None:
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    failed = next((f for f in done if f.exception() is not None), None)
    if failed is not None:
        pool.shutdown(wait=True, cancel_futures=True)
        failed.result()
