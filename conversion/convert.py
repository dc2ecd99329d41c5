"""One checkpoint to another, whole: open, check legality, plan, execute, carry files, publish.

Enters: two paths and what the target should be. Leaves: the target directory. `Target` says the kind (`targets`) and layout; precision
changes only where `cast` names it. Left out: a rank's own shard for the actor (`actor_io`), comparison (`verify`).
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conversion.architecture import read_config
from conversion.assemble import check_replicas
from conversion.checkpoint import MANIFEST, Checkpoint, open_checkpoint, read_manifest
from conversion.execute import Execution, Progress, execute
from conversion.layout import fp8_modules
from conversion.output import OutputDirectory
from conversion.plan import Plan, make_plan
from conversion.quantization_config import quantization_config
from conversion.replaceable import resolved
from conversion.targets import KINDS, Target

_log = logging.getLogger(__name__)


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
    if _was_dequantised(source):
        _log.warning(
            "%s was dequantised from FP8: quantising it again need not give the codes it was made of; convert the FP8 checkpoint itself",
            source.path,
        )
    return fp8_modules(source.arch, target.bf16_layers)


def _was_dequantised(source: Checkpoint) -> bool:
    """Tell whether a manifest says that the values of a BF16 source came out of FP8, in this conversion or one before it."""
    if source.fp8 or not (source.path / MANIFEST).is_file():
        return False
    manifest = read_manifest(source.path)
    return manifest.get("cast") == "bf16" or manifest.get("dequantised") is True


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
    Raises ValueError for bad input, a source that changes meanwhile, and a target that is no checkpoint or holds more than one; OSError
    for a full disk. What stood at the target is then untouched.
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
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least 1 is needed")
    _check_apart(prepared.source, path)
    before = _fingerprint(prepared)
    output = OutputDirectory(path, before, prepared.target.overwrite)
    try:
        try:
            _fill(prepared, output, workers, progress)
            _check_unchanged(prepared, before)
        except (OSError, MemoryError):
            raise  # the next run goes on with what is complete
        except Exception:
            output.discard()
            raise
        output.publish(_manifest(prepared))
    finally:
        output.close()


def _fill(prepared: Prepared, output: OutputDirectory, workers: int, progress: Progress | None) -> None:
    source, target, kind = prepared.source, prepared.target, KINDS[prepared.target.kind]
    check_replicas(prepared.plan, source)
    run = Execution(source=source, output=output, file_of=prepared.file_of, open_file=kind.open_file, cast=target.cast, workers=workers)
    execute(prepared.plan, run, progress)
    output.carry(source.config_dir, kind.carried_into, _new_config(prepared))
    kind.finish(output, source.arch, prepared.plan, prepared.file_of)


def _check_apart(source: Checkpoint, path: Path) -> None:
    """Raise ValueError where the target, links followed, is, holds or lies in a directory that is read."""
    here = resolved(path)
    for what, directory in (("source", source.path), ("config directory", source.config_dir)):
        there = directory.resolve()
        if here == there or here in there.parents or there in here.parents:
            raise ValueError(f"the target {path} and the {what} {directory} contain each other; choose another target")


def _check_unchanged(prepared: Prepared, before: Mapping[str, Any]) -> None:
    """Raise ValueError naming a file of the source that is not what it was when reading began."""
    try:
        after = _fingerprint(prepared)
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} was removed while it was read; nothing was put at the target: convert again") from error
    was = {name: rest for name, *rest in before["files"]}
    changed = [name for name, *rest in after["files"] if was[name] != rest]
    if after["config_sha256"] != before["config_sha256"]:
        changed.append(str(prepared.source.config_dir / "config.json"))
    if changed:
        raise ValueError(
            f"{', '.join(changed[:8])} changed while the source was read; nothing was put at the target: convert again when it rests"
        )


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
        "dequantised": not prepared.fp8 and (prepared.target.cast == "bf16" or _was_dequantised(prepared.source)),
    }


def _fingerprint(prepared: Prepared) -> dict[str, Any]:
    """Describe all that decides the target's bytes: the source files and its config as they are now, and the target."""
    files = sorted({path for file in set(prepared.source.files.values()) for path in file.paths})
    stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    config = hashlib.sha256((prepared.source.config_dir / "config.json").read_bytes()).hexdigest()
    return {**_manifest(prepared), "files": stats, "config_sha256": config, "max_shard_bytes": prepared.target.max_shard_bytes}
