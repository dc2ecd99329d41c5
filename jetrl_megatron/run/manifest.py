"""The manifest of one checkpoint directory: which files it must hold, how large they are and what they hash to.

Enters: a directory with one subdirectory a rank. Leaves: `manifest.json`, and the answer to "is this checkpoint whole?". A directory
without a readable manifest is not a checkpoint. Every write is durable before the next depends on it: file, then its directory.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


class BrokenCheckpointError(ValueError):
    """A checkpoint directory that is not whole; the message says which file and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: path relative to the checkpoint directory, size and digest."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a complete checkpoint consists of, captured when it was saved."""

    step: int
    num_ranks: int
    files: tuple[FileEntry, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What the run wants to know before it loads: weight version, layout."""


def write_durably(path: Path, text: str) -> None:
    """Replace a small text file so that a reader sees the old or the new content, also after a power cut."""
    partial = path.with_name(path.name + ".part")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def describe_files(root: Path, folder: Path) -> list[FileEntry]:
    """Make every file under `folder` durable and describe it, paths relative to `root`."""
    entries = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        entries.append(FileEntry(path=str(path.relative_to(root)), num_bytes=path.stat().st_size, sha256=digest))
    for directory in {p.parent for p in folder.rglob("*")} | {folder}:
        sync_directory(directory)
    return entries


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest durably."""
    write_durably(path, json.dumps(asdict(manifest), indent=1))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest file; raises BrokenCheckpointError where it is missing or not one."""
    try:
        raw = json.loads(path.read_text())
        files = tuple(FileEntry(**entry) for entry in raw["files"])
        return Manifest(step=raw["step"], num_ranks=raw["num_ranks"], files=files, meta=raw["meta"])
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{path} is missing: the save never finished") from error
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise BrokenCheckpointError(f"{path} is not a manifest ({error})") from error


def check_files(root: Path, entries: tuple[FileEntry, ...], *, hashes: bool) -> None:
    """Compare files with their entries: presence and size always, digests when `hashes`; raises BrokenCheckpointError."""
    for entry in entries:
        path = root / entry.path
        if not path.is_file():
            raise BrokenCheckpointError(f"{path} is missing")
        size = path.stat().st_size
        if size != entry.num_bytes:
            raise BrokenCheckpointError(f"{path} has {size} bytes, its manifest says {entry.num_bytes}")
        if hashes:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != entry.sha256:
                raise BrokenCheckpointError(f"{path} has sha256 {digest}, its manifest says {entry.sha256}")
