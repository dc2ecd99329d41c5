"""Compares two checkpoints of any kinds and layouts in canonical space, and one checkpoint with its own manifest.

Enters: opened checkpoints. Leaves: the first `Difference`, or None. Codes, FP32 scales and BF16 elements are compared bit for bit; scale
dtypes on disk do not count, their values do. With `values` FP8 tensors are dequantised on both sides first.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from conversion.assemble import assemble, check_replicas
from conversion.checkpoint import INDEX, MANIFEST, Checkpoint, open_checkpoint, read_manifest
from conversion.execute import Progress
from conversion.files import read_all
from conversion.layout import BLOCK
from conversion.plan import Plan, TargetPlan, make_plan
from conversion.shards import hf_tensors
from conversion.torch_dist_chunk import ChecksumError
from conversion.torch_dist_reader import TorchDistReader


@dataclass(frozen=True)
class Difference:
    """The first place where two checkpoints differ."""

    tensor: str
    """Canonical name; `_scale_inv` is appended where the scale differs."""
    what: str
    """`precision`, `element`, `code`, `scale`, `architecture`, or `sha256` of all bytes of a tensor against its manifest."""
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


def check_manifest(path: Path, progress: Progress | None = None) -> tuple[int, Difference | None]:
    """Compare every tensor with the sha256 in the manifest, after checking that the directory is whole.

    Returns how many tensors are equal, and the first that is not, or None. Raises ValueError where there is no manifest, and where a file
    of this kind and layout is missing or spare.
    """
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{path} has no {MANIFEST}; give a second checkpoint to compare with")
    said = read_manifest(path)["files"]
    checkpoint = open_checkpoint(path)
    try:
        _check_files(checkpoint, said)
        checked = 0
        for file_name, tensors in said.items():
            for name, described in tensors.items():
                reader = checkpoint.files[_location(checkpoint, file_name), name]
                try:
                    found = hashlib.sha256(read_all(reader, name)).hexdigest()
                except ChecksumError as error:
                    found = str(error)
                if found != described["sha256"]:
                    return checked, Difference(f"{file_name}: {name}", "sha256", None, None, (described["sha256"], found))
                checked += 1
                if progress is not None:
                    progress(reader.entries[name].num_bytes)
    finally:
        checkpoint.close()
    return checked, None


def _location(checkpoint: Checkpoint, file_name: str) -> str:
    """Return where the tensors of a file stand: each rank is a place of its own, the other kinds have one."""
    return file_name.removesuffix(".safetensors") if checkpoint.kind == "megatron" else checkpoint.tensors[0].location


def _check_files(checkpoint: Checkpoint, said: dict[str, dict[str, dict[str, str]]]) -> None:
    """Raise ValueError unless directory, manifest and the model name the same files and the same tensors, at least one."""
    path = checkpoint.path
    listed = sorted((_location(checkpoint, file), name) for file, tensors in said.items() for name in tensors)
    odd = sorted(set(listed) ^ set(checkpoint.files))
    if odd or not listed or len(set(listed)) != len(listed):
        shown = ", ".join(f"{location}:{name}" for location, name in odd[:8]) or "a tensor twice"
        raise ValueError(f"{path}: {MANIFEST} lists {len(listed)} tensors, the model has {len(checkpoint.files)}; they differ in: {shown}")
    if checkpoint.kind == "torch_dist":
        reader = next(iter(checkpoint.files.values()))
        assert isinstance(reader, TorchDistReader)
        expected, suffix = set(reader.ends), "*.distcp"
        beside = ["common.pt", "metadata.json"]
        _check_ends(path, reader.ends)
    else:
        expected, suffix = {file.path.name for file in checkpoint.files.values()}, "*.safetensors"
        beside = [INDEX] if checkpoint.kind == "hf" and len(expected) > 1 else []
    for name in beside:
        if not (path / name).is_file() or not (path / name).stat().st_size:
            raise ValueError(f"{path / name} is missing or empty; the directory is incomplete, copy the file again")
    odd_files = sorted({p.name for p in path.glob(suffix)} ^ expected) + sorted(set(said) - expected)
    if odd_files:
        raise ValueError(f"{path}: {', '.join(odd_files[:8])} is missing, or belongs to another checkpoint; copy the directory again")


def _check_ends(path: Path, ends: Mapping[str, int]) -> None:
    """Raise ValueError naming a file of a `torch_dist` directory that is missing or too short, objects beside the tensors included."""
    for name, end in ends.items():
        if not (path / name).is_file() or (path / name).stat().st_size < end:
            raise ValueError(f"{path / name} is missing or has fewer than {end} bytes; the directory is incomplete, copy the file again")
