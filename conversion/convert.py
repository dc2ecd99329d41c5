"""One checkpoint to another, whole: open, check legality, plan, execute, carry files, publish.

Enters: two paths and what the target should be. Leaves: the target directory. `Target` says the kind (`targets`) and layout; precision
changes only where `cast` names it. Left out: a rank's own shard for the actor (`actor_io`), comparison (`verify`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conversion.architecture import read_config
from conversion.assemble import check_replicas
from conversion.checkpoint import Checkpoint, open_checkpoint
from conversion.execute import Execution, Progress, execute
from conversion.layout import fp8_modules
from conversion.output import OutputDirectory
from conversion.plan import Plan, make_plan
from conversion.quantization_config import quantization_config
from conversion.targets import KINDS, Target


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
    tensors, file_of = KINDS[target.kind].describe(source.arch, target, fp8)
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


def convert(
    source_path: str | Path,
    target_path: str | Path,
    target: Target,
    *,
    hf_config: str | Path | None = None,
    workers: int = 2,
    progress: Progress | None = None,
) -> Prepared:
    """Convert the checkpoint at `source_path` into `target_path`.

    hf_config: see `open_checkpoint`. workers: threads, each with one target tensor in memory. progress: called with the bytes done since
    the last call.
    Raises ValueError for bad input, OSError for a full disk; what stood at the target is then untouched.
    """
    source = open_checkpoint(source_path, hf_config)
    try:
        prepared = prepare(source, target)
        publish(prepared, Path(target_path), workers=workers, progress=progress)
    finally:
        source.close()
    return prepared


def publish(prepared: Prepared, path: Path, *, workers: int = 2, progress: Progress | None = None) -> None:
    """Write a prepared conversion to `path`; see `convert`."""
    source, target, kind = prepared.source, prepared.target, KINDS[prepared.target.kind]
    here, there = path.resolve(), source.path.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"the target {path} and the source {source.path} contain each other; choose another target")
    output = OutputDirectory(path, _fingerprint(prepared), target.overwrite)
    try:
        check_replicas(prepared.plan, source)
        run = Execution(source=source, output=output, file_of=prepared.file_of, open_file=kind.open_file, cast=target.cast, workers=workers)
        execute(prepared.plan, run, progress)
        output.carry(source.config_dir, kind.carried_into, _new_config(prepared))
        kind.finish(output, source.arch, prepared.plan, prepared.file_of)
        output.publish(_manifest(prepared))
    finally:
        output.close()


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
        "source": prepared.source.path.resolve().name,  # a path would name a directory of another machine, or one that is gone
        "source_kind": prepared.source.kind,
        "cast": prepared.target.cast,
    }


def _fingerprint(prepared: Prepared) -> dict[str, Any]:
    """Describe all that decides the target's bytes: the source files as they are now, and the target."""
    files = sorted({path for file in set(prepared.source.files.values()) for path in file.paths})
    stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return {**_manifest(prepared), "files": stats, "max_shard_bytes": prepared.target.max_shard_bytes}
