"""One checkpoint to another, whole: open, check legality, plan, execute, carry files, publish.

Enters: two paths and what the target should be. Leaves: the target directory. `Target` says the kind and layout; precision changes only
where `cast` names it. Left out: a rank's own shard for the actor (`actor_io`), comparison (`verify`).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conversion.architecture import read_config
from conversion.assemble import check_replicas, tensor_specs
from conversion.checkpoint import CARRIED, INDEX, Checkpoint, open_checkpoint
from conversion.execute import Execution, Progress, execute
from conversion.files import ITEM_BYTES
from conversion.layout import ParallelLayout, check_layout_of, fp8_modules
from conversion.output import OutputDirectory
from conversion.plan import Plan, make_plan
from conversion.quantization_config import quantization_config
from conversion.shards import StoredTensor, hf_tensors, megatron_tensors

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to write."""

    kind: str
    """`hf` or `megatron`."""
    layout: ParallelLayout | None = None
    """Of a `megatron` target."""
    cast: str | None = None
    """None keeps the precision. `bf16`: FP8 -> BF16. `fp32`, `ue8m0`: BF16 -> FP8 with such scales."""
    bf16_layers: tuple[str, ...] = ()
    """Globs of linears that stay BF16 in BF16 -> FP8."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """Of a `hf` target."""
    overwrite: bool = False
    """Replace a checkpoint that stands at the target path."""

    def __post_init__(self) -> None:
        """Check the combination."""
        if self.kind not in ("hf", "megatron"):
            raise ValueError(f"target kind is {self.kind!r}; it must be hf or megatron")
        if (self.layout is None) == (self.kind == "megatron"):
            raise ValueError(f"a {self.kind} target {'needs a layout' if self.kind == 'megatron' else 'has no layout'}")
        if self.cast not in (None, "bf16", "fp32", "ue8m0"):
            raise ValueError(f"cast is {self.cast!r}; it must be bf16, fp32, ue8m0 or nothing")
        if self.bf16_layers and self.cast not in ("fp32", "ue8m0"):
            raise ValueError("bf16_layers says which linears quantising leaves out; it needs cast fp32 or ue8m0")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A conversion that is legal and planned, and has written nothing yet."""

    source: Checkpoint
    target: Target
    fp8: frozenset[str]
    plan: Plan
    file_of: Mapping[tuple[str, str], str]

    @property
    def files(self) -> dict[str, int]:
        """Shard file -> bytes of its tensors."""
        sizes: dict[str, int] = {}
        for target_plan in self.plan.targets:
            name = self.file_of[target_plan.target.location, target_plan.target.name]
            sizes[name] = sizes.get(name, 0) + target_plan.target.num_bytes
        return sizes


def prepare(source: Checkpoint, target: Target) -> Prepared:
    """Check and plan a conversion; raises ValueError for an illegal layout or a contradictory precision."""
    fp8 = _target_fp8(source, target)
    if target.layout is not None:
        check_layout_of(source.arch, target.layout, fp8)
        tensors = megatron_tensors(source.arch, target.layout, fp8)
        file_of = {(t.location, t.name): f"{t.location}.safetensors" for t in tensors}
    else:
        check_layout_of(source.arch, ParallelLayout(), fp8 if target.cast is not None else frozenset())
        tensors = hf_tensors(source.arch, fp8)
        file_of = hf_shard_files(tensors, target.max_shard_bytes)
    return Prepared(source=source, target=target, fp8=fp8, plan=make_plan(source.tensors, tensors), file_of=file_of)


def _target_fp8(source: Checkpoint, target: Target) -> frozenset[str]:
    if target.cast is None:
        return source.fp8
    if target.cast == "bf16":
        if not source.fp8:
            raise ValueError(f"{source.path} is BF16 already; leave the cast out")
        return frozenset()
    if source.fp8:
        raise ValueError(f"{source.path} is FP8 already; quantising dequantised values would change its bytes, leave the cast out")
    return fp8_modules(source.arch, target.bf16_layers)


def hf_shard_files(tensors: list[StoredTensor], max_shard_bytes: int) -> dict[tuple[str, str], str]:
    """Deal tensors, in order, over files of at most `max_shard_bytes` (a larger tensor has its own); scales stay with their codes."""
    numbers: list[int] = []
    number, filled = 0, 0
    for tensor in tensors:
        if filled and filled + tensor.num_bytes > max_shard_bytes:
            number, filled = number + 1, 0
        filled += tensor.num_bytes
        numbers.append(number)
    count = number + 1
    names = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return {(t.location, t.name): names[n] for t, n in zip(tensors, numbers, strict=True)}


def convert(
    source_path: str | Path, target_path: str | Path, target: Target, *, workers: int = 2, progress: Progress | None = None
) -> Prepared:
    """Convert the checkpoint at `source_path` into `target_path`.

    workers: threads, each with one target tensor in memory. progress: called with the bytes done since the last call.
    Raises ValueError for bad input, OSError for a full disk; what stood at the target is then untouched.
    """
    source = open_checkpoint(source_path)
    try:
        prepared = prepare(source, target)
        publish(prepared, Path(target_path), workers=workers, progress=progress)
    finally:
        source.close()
    return prepared


def publish(prepared: Prepared, path: Path, *, workers: int = 2, progress: Progress | None = None) -> None:
    """Write a prepared conversion to `path`; see `convert`."""
    source, target = prepared.source, prepared.target
    here, there = path.resolve(), source.path.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"the target {path} and the source {source.path} contain each other; choose another target")
    output = OutputDirectory(path, _fingerprint(prepared), target.overwrite)
    try:
        check_replicas(prepared.plan, source)
        metadata = {"format": "pt"}
        run = Execution(source=source, output=output, file_of=prepared.file_of, metadata=metadata, cast=target.cast, workers=workers)
        execute(prepared.plan, run, progress)
        output.carry(source.config_dir, "" if target.kind == "hf" else CARRIED, _new_config(prepared))
        if target.kind == "hf" and len(prepared.files) > 1:
            output.write_text(INDEX, hf_index(prepared))
        output.publish(_manifest(prepared))
    finally:
        output.close()


def hf_index(prepared: Prepared) -> str:
    """Return the index: total_size counts tensor bytes, scales included; weight_map names each tensor's file (fault A11)."""
    weight_map: dict[str, str] = {}
    total = 0
    for target_plan in prepared.plan.targets:
        target = target_plan.target
        for spec in tensor_specs(target):
            weight_map[spec.name] = prepared.file_of[target.location, target.name]
            size = ITEM_BYTES[spec.dtype]
            for axis in spec.shape:
                size *= axis
            total += size
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"


def _new_config(prepared: Prepared) -> dict[str, Any] | None:
    """Return the changed config.json, or None where the source's own bytes are right."""
    config = read_config(prepared.source.config_dir)
    if prepared.target.cast is None and bool(config.get("quantization_config")) == bool(prepared.fp8):
        return None
    config.pop("quantization_config", None)
    if prepared.fp8:
        config["quantization_config"] = quantization_config(prepared.source.arch, prepared.fp8)
    return config


def _manifest(prepared: Prepared) -> dict[str, Any]:
    layout = prepared.target.layout
    return {
        "format_version": 1,
        "kind": prepared.target.kind,
        "layout": None if layout is None else asdict(layout),
        "fp8_modules": sorted(prepared.fp8),
        "source": str(prepared.source.path),
        "source_kind": prepared.source.kind,
        "cast": prepared.target.cast,
    }


def _fingerprint(prepared: Prepared) -> dict[str, Any]:
    """Describe all that decides the target's bytes: the source files as they are now, and the target."""
    files = sorted({file.path for file in prepared.source.files.values()})
    stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return {**_manifest(prepared), "files": stats, "max_shard_bytes": prepared.target.max_shard_bytes}
