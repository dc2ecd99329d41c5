"""Checkpoints that are either complete or invisible, whatever kills the run.

Enters: a step number and a function that writes this rank's files. Leaves: `ROOT/step_00000010/` with `rank_0000/...` for each rank
and `manifest.json`, and the pointer `ROOT/latest`. Order of one save, each arrow durable before the next:

    step.tmp/ made -> every rank writes and hashes its own files -> manifest -> renamed into place -> pointer renamed -> old ones removed

Invariant: the directory `step_N` appears by one rename and holds its manifest from then on; the step is the one given to `save`, never
read later. A reader takes the highest step whose files agree with the manifest; the pointer only tells whether somebody moved things.
ROOT must be one file system that all ranks see. Left out: what the files hold.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetrl_megatron.run.manifest import (
    MANIFEST,
    BrokenCheckpointError,
    Manifest,
    check_files,
    describe_files,
    read_manifest,
    sync_directory,
    write_durably,
    write_manifest,
)

logger = logging.getLogger(__name__)
POINTER = "latest"
_STEP_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY = ".tmp"
_REPLACED = ".replaced"
_REMOVED = ".removed"
_ABANDONED = ".abandoned"


def _no_barrier() -> None:
    pass


def _same(ok: bool) -> bool:
    return ok


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that save together; the defaults are a run of one process."""

    rank: int = 0
    num_ranks: int = 1
    barrier: Callable[[], None] = _no_barrier
    all_true: Callable[[bool], bool] = _same
    """Logical and over all ranks: everybody gets the same answer."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files were found whole."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.step

    @property
    def meta(self) -> Mapping[str, Any]:
        """What `save` was given."""
        return self.manifest.meta

    def rank_dir(self, rank: int) -> Path:
        """Give the folder that `rank` wrote."""
        return self.path / _rank_name(rank)


def _rank_name(rank: int) -> str:
    return f"rank_{rank:04d}"


class CheckpointStore:
    """The checkpoints under one directory.

    root: made when missing. keep_last: complete ones kept; the newest complete one is never removed. Every method is collective: all
    ranks call it with equal arguments.
    """

    def __init__(self, root: Path, keep_last: int, ranks: Ranks | None = None) -> None:
        """Make the directory; raises ValueError for keep_last below 1."""
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; it must be at least 1, or a run could not be resumed")
        self.root = root
        self.keep_last = keep_last
        self.ranks = ranks or Ranks()
        root.mkdir(parents=True, exist_ok=True)

    def path_of(self, step: int) -> Path:
        """Give the directory of a step."""
        return self.root / f"step_{step:08d}"

    def save(self, step: int, write: Callable[[Path], None], meta: Mapping[str, Any] | None = None) -> Path:
        """Save one checkpoint; when it returns on any rank, the checkpoint is complete and the pointer names it.

        step: captured here, also in the manifest and the pointer. write: called with this rank's own empty folder. meta: plain JSON.
        An error of `write` leaves every earlier checkpoint and the pointer as they were. An earlier save of `step` is replaced.
        """
        ranks, final = self.ranks, self.path_of(step)
        temporary = final.with_name(final.name + _TEMPORARY)
        if ranks.rank == 0:
            self._recover()
            temporary.mkdir()
        ranks.barrier()
        folder = temporary / _rank_name(ranks.rank)
        folder.mkdir()
        write(folder)
        entries = tuple(describe_files(temporary, folder))
        part = Manifest(step=step, num_ranks=ranks.num_ranks, files=entries, meta=dict(meta or {}))
        write_manifest(temporary / f"{_rank_name(ranks.rank)}.json", part)
        ranks.barrier()
        if ranks.rank == 0:
            self._publish(temporary, final, part)
            self._retain()
        ranks.barrier()
        return final

    def newest_complete(self) -> Checkpoint | None:
        """Find the newest whole checkpoint, skipping broken ones with a warning; None where nothing was ever saved.

        Raises ValueError when checkpoints are there and none is whole: starting over would overwrite them.
        """
        broken = []
        for path in sorted(self._candidates(), key=_step_of, reverse=True):
            try:
                found = self._verified(path)
            except BrokenCheckpointError as error:
                logger.warning("checkpoint %s is skipped: %s", path, error)
                broken.append(f"{path.name}: {error}")
                continue
            self._compare_with_pointer(found)
            return found
        pointer = self.root / POINTER
        if pointer.exists() and not broken:
            broken.append(f"{POINTER} is {pointer.read_text()!r}, but no step directory is there")
        if broken:
            way_out = "remove the directory to start over, or set another run.dir"
            raise ValueError(f"{self.root} was saved to and holds no whole checkpoint ({'; '.join(broken)}); {way_out}")
        return None

    def open(self, step: int) -> Checkpoint:
        """Open the checkpoint of a step that was asked for by number; raises BrokenCheckpointError (a ValueError) when it is not whole."""
        path = self.path_of(step)
        if not path.is_dir():
            there = sorted(_step_of(p) for p in self._candidates())
            raise BrokenCheckpointError(f"there is no checkpoint of step {step} in {self.root}; steps there: {there}")
        return self._verified(path)

    def _verified(self, path: Path) -> Checkpoint:
        """Check a directory, each rank hashing its share of the files; every rank returns or every rank raises."""
        manifest, problem = None, None
        try:
            manifest = read_manifest(path / MANIFEST)
            if manifest.step != _step_of(path):
                raise BrokenCheckpointError(f"{path / MANIFEST} is of step {manifest.step}")
            check_files(path, manifest.files, hashes=False)
            check_files(path, manifest.files[self.ranks.rank :: self.ranks.num_ranks], hashes=True)
        except BrokenCheckpointError as error:
            problem = error
        if self.ranks.all_true(problem is None):
            assert manifest is not None
            return Checkpoint(path=path, manifest=manifest)
        raise problem or BrokenCheckpointError(f"{path} was found broken by another rank")

    def _candidates(self) -> list[Path]:
        """Directories that claim to be checkpoints; a replaced one counts while its successor is not in place."""
        found = [p for p in self.root.iterdir() if p.is_dir() and _STEP_NAME.fullmatch(p.name)]
        for path in self.root.glob("step_*" + _REPLACED):
            if path.with_name(path.name.removesuffix(_REPLACED)) not in found:
                found.append(path)
        return found

    def _compare_with_pointer(self, found: Checkpoint) -> None:
        pointer = self.root / POINTER
        try:
            named = json.loads(pointer.read_text())["step"]
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read (%s); the newest whole checkpoint, step %d, is used", pointer, error, found.step)
            return
        if named != found.step:
            logger.warning("%s names step %s; the newest whole checkpoint, step %d, is used", pointer, named, found.step)

    def _recover(self) -> None:
        """Finish or undo what a killed save left behind (rank 0)."""
        for path in self._candidates():
            if path.name.endswith(_REPLACED):
                path.rename(path.with_name(path.name.removesuffix(_REPLACED)))
        for suffix in (_TEMPORARY, _REPLACED, _REMOVED):
            for path in self.root.glob("step_*" + suffix):
                shutil.rmtree(path)

    def _publish(self, temporary: Path, final: Path, own: Manifest) -> None:
        """Join the ranks' parts, put the directory into place and move the pointer last (rank 0)."""
        parts = [temporary / f"{_rank_name(rank)}.json" for rank in range(own.num_ranks)]
        files = tuple(entry for part in parts for entry in read_manifest(part).files)
        for part in parts:
            part.unlink()
        write_manifest(temporary / MANIFEST, Manifest(step=own.step, num_ranks=own.num_ranks, files=files, meta=own.meta))
        self._set_aside_later_than(own.step)
        replaced = final.with_name(final.name + _REPLACED)
        if final.exists():
            final.rename(replaced)
        temporary.rename(final)
        sync_directory(self.root)
        write_durably(self.root / POINTER, json.dumps({"step": own.step, "path": final.name}))
        if replaced.exists():
            shutil.rmtree(replaced)

    def _set_aside_later_than(self, step: int) -> None:
        """Rename checkpoints of a future that this run left by resuming at an earlier step, or they would be resumed next (rank 0)."""
        for path in self._candidates():
            if _step_of(path) > step:
                aside = path.with_name(path.name + _ABANDONED)
                logger.warning("%s is later than step %d, which is being saved; it is kept as %s", path, step, aside.name)
                if aside.exists():
                    shutil.rmtree(aside)
                path.rename(aside)

    def _retain(self) -> None:
        """Remove complete checkpoints beyond the newest `keep_last` (rank 0); broken ones are kept for whoever wants to look."""
        complete = []
        for path in self._candidates():
            try:
                check_files(path, read_manifest(path / MANIFEST).files, hashes=False)
            except BrokenCheckpointError:
                continue
            complete.append(path)
        newest = json.loads((self.root / POINTER).read_text())["path"]
        old = sorted(complete, key=_step_of)[: -self.keep_last]
        for path in old:
            if path.name == newest:
                continue
            doomed = path.with_name(path.name + _REMOVED)
            path.rename(doomed)
            shutil.rmtree(doomed)


def _step_of(path: Path) -> int:
    match = _STEP_NAME.match(path.name)
    assert match is not None, path
    return int(match.group(1))
