"""Compares two checkpoints of any kinds and layouts in canonical space, and one checkpoint with its own manifest.

Enters: opened checkpoints. Leaves: the first `Difference`, or None. Codes, FP32 scales and BF16 elements are compared bit for bit; scale
dtypes on disk do not count, their values do. With `values` FP8 tensors are dequantised on both sides first.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conversion.assemble import assemble, check_replicas
from conversion.checkpoint import MANIFEST, Checkpoint, read_manifest
from conversion.execute import Progress
from conversion.files import SafetensorsFile, TensorReader, read_all
from conversion.layout import BLOCK
from conversion.plan import Plan, TargetPlan, make_plan
from conversion.shards import hf_tensors
from conversion.torch_dist_reader import TorchDistReader


@dataclass(frozen=True)
class Difference:
    """The first place where two checkpoints differ."""

    tensor: str
    """Canonical name; `_scale_inv` is appended where the scale differs."""
    what: str
    """`precision`, `element`, `code`, `scale` or `architecture`."""
    block: tuple[int, int] | None
    """128x128 block (row, column)."""
    index: tuple[int, int] | None
    """Element, or block for a scale."""
    values: tuple[str, str]
    """What either side holds there."""

    def __str__(self) -> str:
        """One line for people."""
        where = f" at {self.index}, block {self.block}" if self.index is not None else ""
        return f"{self.tensor}: {self.what} differs{where}: {self.values[0]} and {self.values[1]}"


def first_difference(a: Checkpoint, b: Checkpoint, values: bool = False, progress: Progress | None = None) -> Difference | None:
    """Return the first difference in file order, or None where every element and scale is equal.

    values: compare dequantised BF16 values, so that an FP8 and a BF16 checkpoint can be equal. progress: called with bytes compared.
    Raises ValueError where copies of one weight inside a checkpoint differ from each other.
    """
    if a.arch != b.arch:
        key = next(k for k, v in asdict(a.arch).items() if v != asdict(b.arch)[k])
        return Difference("config.json", "architecture", None, None, (f"{key}={getattr(a.arch, key)}", f"{key}={getattr(b.arch, key)}"))
    plans = [_canonical_plan(side, values) for side in (a, b)]
    for side, plan in zip((a, b), plans, strict=True):
        check_replicas(plan, side)
    for one, two in zip(plans[0].targets, plans[1].targets, strict=True):
        difference = _compare(one, two, a, b)
        if difference is not None:
            return difference
        if progress is not None:
            progress(one.target.num_bytes)
    return None


def _canonical_plan(side: Checkpoint, values: bool) -> Plan:
    return make_plan(side.tensors, hf_tensors(side.arch, frozenset() if values else side.fp8))


def _compare(one: TargetPlan, two: TargetPlan, a: Checkpoint, b: Checkpoint) -> Difference | None:
    name = one.target.name
    if one.target.fp8 != two.target.fp8:
        kinds = tuple("block FP8" if t.target.fp8 else "BF16" for t in (one, two))
        return Difference(name, "precision", None, None, (kinds[0], kinds[1]))
    (data_a, scales_a), (data_b, scales_b) = assemble(one, a, "bf16"), assemble(two, b, "bf16")
    if scales_a is not None and scales_b is not None and not np.array_equal(scales_a.view(np.uint32), scales_b.view(np.uint32)):
        row, col = (int(n) for n in np.argwhere(scales_a.view(np.uint32) != scales_b.view(np.uint32))[0])
        values = (repr(float(scales_a[row, col])), repr(float(scales_b[row, col])))
        return Difference(one.target.scale_name, "scale", (row, col), (row, col), values)
    elements_a, elements_b = (d if one.target.fp8 else d.view(np.uint16) for d in (data_a, data_b))
    if np.array_equal(elements_a, elements_b):
        return None
    row, col = _first_unequal(elements_a, elements_b)
    shown = tuple(_show(e[row, col]) for e in (elements_a, elements_b))
    block = (row // BLOCK, col // BLOCK)
    return Difference(name, "code" if one.target.fp8 else "element", block, (row, col), (shown[0], shown[1]))


def _first_unequal(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    for row in range(a.shape[0]):
        unequal = np.flatnonzero(a[row] != b[row])
        if unequal.size:
            return row, int(unequal[0])
    raise AssertionError("arrays are equal")


def _show(element: np.generic) -> str:
    """Show a code as its byte, a BF16 element as its value and its bits."""
    bits = int(element)
    if element.dtype == np.uint8:
        return f"0x{bits:02x}"
    value = np.array([bits << 16], np.uint32).view(np.float32)[0]
    return f"{float(value)!r} (0x{bits:04x})"


def check_manifest(path: Path, progress: Progress | None = None) -> int:
    """Compare every tensor with the sha256 in the manifest; return how many were checked.

    Raises ValueError where there is no manifest, and naming the first tensor whose bytes are not those that were written.
    """
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path} has no {MANIFEST}; give a second checkpoint to compare with")
    checked = 0
    for file, entry in _readers(path):
        try:
            if set(entry) != set(file.entries):
                raise ValueError(f"{file.path} and the manifest list other tensors: {sorted(set(entry) ^ set(file.entries))[:8]}")
            for name, described in entry.items():
                if hashlib.sha256(read_all(file, name)).hexdigest() != described["sha256"]:
                    raise ValueError(f"{file.path}: {name} is not what was written (sha256 differs); the file is damaged, convert again")
                checked += 1
                if progress is not None:
                    progress(file.entries[name].num_bytes)
        finally:
            file.close()
    return checked


def _readers(path: Path) -> Iterator[tuple[TensorReader, dict[str, Any]]]:
    """Yield what can be read and what the manifest says of its tensors: file by file, a torch_dist directory as a whole."""
    manifest = read_manifest(path)
    if manifest.get("kind") == "torch_dist":
        yield TorchDistReader(path), {name: said for entry in manifest["files"].values() for name, said in entry.items()}
        return
    for file_name, entry in manifest["files"].items():
        yield SafetensorsFile(path / file_name), entry
