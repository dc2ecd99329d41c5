"""A directory written beside its place and renamed into it once it is whole.

Enters: the final path, and a fingerprint of everything that decides its contents. Leaves: the directory with its carried files, index,
and manifest (dtype, block, scale format, sha256 of each tensor). Work happens in `.NAME.partial`; a journal there lists the shard files
that are complete on disk, so that a run with the same fingerprint goes on after a crash and any other run starts anew. A lock keeps two
runs apart. The final path never holds half a checkpoint. What may be touched beside and at the final path: `replaceable`.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from conversion.checkpoint import INDEX, MANIFEST
from conversion.replaceable import (
    JOURNAL,
    NEW_JOURNAL,
    REPLACED,
    WEIGHT_SUFFIXES,
    check_partial,
    check_replaceable,
    left_behind,
    remove,
    remove_tree,
    resolved,
)


class OutputDirectory:
    """The directory that is being written; `publish` makes it the final one."""

    def __init__(self, final: Path, fingerprint: Mapping[str, Any], overwrite: bool = False) -> None:
        """Open or resume the partial directory of `final`.

        fingerprint: JSON-able description of source and target. overwrite: replace a checkpoint that stands at `final`.
        Raises ValueError where `final` may not be replaced, something foreign stands beside it, or another process is writing it.
        """
        self.final = resolved(final)
        self.path = self.final.parent / f".{self.final.name}.partial"
        self._old = self.final.parent / f".{self.final.name}.old"
        self._overwrite = overwrite
        check_replaceable(self.final, overwrite)
        check_partial(self.path)
        self._lock = self._locked()
        try:
            self._recover()
            check_replaceable(self.final, overwrite)
            check_partial(self.path)
            self._journal_lock = Lock()
            text = json.dumps(fingerprint, sort_keys=True)
            self._digest = hashlib.sha256(text.encode()).hexdigest()
            self.done: dict[str, dict[str, Any]] = self._resume()
        except BaseException:
            with suppress(OSError):
                self.path.rmdir()  # where it is empty
            self.close()
            raise

    def _locked(self) -> int:
        """Create the partial directory where there is none, and return a file descriptor that locks it."""
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), self.path.stat()):
                    return lock
            except BlockingIOError as error:
                os.close(lock)
                raise ValueError(f"{self.path} is being written by another process; wait for it, or choose another target") from error
            except FileNotFoundError:
                pass
            os.close(lock)  # another process published or removed the directory meanwhile

    def _recover(self) -> None:
        """Finish or undo a replacement that was cut between its two renames."""
        if self.final.exists():
            self._check_not_publishing()
        if not left_behind(self._old):
            return
        if self.final.exists():
            remove_tree(self._old)
        else:
            (self._old / REPLACED).unlink(missing_ok=True)
            self._old.rename(self.final)

    def _check_not_publishing(self) -> None:
        """Raise ValueError where another process has put its directory at the final path and is still removing the old one."""
        published = os.open(self.final, os.O_RDONLY)
        try:
            fcntl.flock(published, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.final} is being published by another process; wait for it, or choose another target") from error
        finally:
            os.close(published)

    def _resume(self) -> dict[str, dict[str, Any]]:
        """Return the complete shard files of an earlier run with this fingerprint; empty the directory where there are none."""
        journal = self.path / JOURNAL
        lines = journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else []
        done: dict[str, dict[str, Any]] = {}
        if lines and lines[0] == self._digest:
            for line in lines[1:]:
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    break  # the line that was being written at the crash
                file = self.path / entry["file"]
                if file.is_file() and file.stat().st_size == entry["file_bytes"]:
                    done[entry["file"]] = entry
        self._write_journal(done)
        for child in self.path.iterdir():
            if child.name not in done and child.name != JOURNAL:
                remove(child)
        return done

    def _write_journal(self, done: dict[str, dict[str, Any]]) -> None:
        """Replace the journal whole: without one the directory would not be known as ours."""
        new = self.path / NEW_JOURNAL
        with new.open("w", encoding="utf-8") as file:
            file.write("\n".join([self._digest, *(json.dumps(entry) for entry in done.values())]) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path / JOURNAL)

    def record(self, name: str, tensors: dict[str, dict[str, Any]]) -> None:
        """Note that shard file `name` is complete and on disk, with a description of each tensor."""
        entry = {"file": name, "file_bytes": (self.path / name).stat().st_size, "tensors": tensors}
        with self._journal_lock, (self.path / JOURNAL).open("a", encoding="utf-8") as file:
            self.done[name] = entry
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_text(self, name: str, text: str) -> None:
        """Write a small text file and sync it."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a small file and sync it."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def carry(self, source: Path, into: str = "", config: dict[str, Any] | None = None) -> None:
        """Copy every non-weight file of `source`, byte for byte, into the subdirectory `into`.

        config: written as config.json instead of the source's own, where its contents must change.
        """
        for path in carried_files(source):
            relative = str(Path(into) / path.relative_to(source))
            if config is not None and path.name == "config.json" and path.parent == source:
                continue
            target = self.path / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            _sync(target)
        if config is not None:
            self.write_text(str(Path(into) / "config.json"), json.dumps(config, indent=2) + "\n")

    def publish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, sync, and rename the directory to its final place, replacing what stood there.

        Raises ValueError where something that may not be replaced came to the final path meanwhile.
        """
        try:
            check_replaceable(self.final, self._overwrite)
        except ValueError as error:
            raise ValueError(f"{error}; what was converted waits in {self.path} for the same command") from error
        files = {name: self.done[name]["tensors"] for name in sorted(self.done)}
        self.write_text(MANIFEST, json.dumps({**manifest, "files": files}, indent=1, sort_keys=True) + "\n")
        (self.path / JOURNAL).unlink()
        _sync(self.path)
        if self.final.exists() and any(self.final.iterdir()):
            if not (self.final / MANIFEST).is_file():
                (self.final / REPLACED).touch()
            self.final.rename(self._old)
        self.path.rename(self.final)
        _sync(self.final.parent)
        if left_behind(self._old):
            remove_tree(self._old)

    def discard(self) -> None:
        """Remove the partial directory, which no other run could use."""
        remove_tree(self.path)

    def close(self) -> None:
        """Release the lock; what is not published stays for the next run to resume."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def carried_files(source: Path) -> list[Path]:
    """Return the files that travel with a checkpoint: all but weights, their index, our manifest and hidden files."""

    def travels(path: Path) -> bool:
        hidden = any(part.startswith(".") for part in path.relative_to(source).parts)
        return path.is_file() and not hidden and not path.name.endswith(WEIGHT_SUFFIXES) and path.name not in (INDEX, MANIFEST)

    return sorted(p for p in source.rglob("*") if travels(p))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
