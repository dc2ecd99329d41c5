"""Which directories the writer may touch: what stands at a target, and what an earlier run left beside it.

Enters: paths. Leaves: nothing, or a ValueError that names the path, what is in the way, and the way out. A directory is never judged by
its name: one beside the target is touched only where it carries a file that this package put there.
"""

import os
import re
import shutil
from pathlib import Path

from conversion.checkpoint import MANIFEST

JOURNAL = "journal.jsonl"
NEW_JOURNAL = JOURNAL + ".new"
"""The journal before it is renamed to its name."""
REPLACED = ".replaced_by_conversion"
"""Put into a checkpoint without a manifest right before it is moved aside."""
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".msgpack",
    ".h5",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
    ".npz",
    ".distcp",
    ".index.json",
)
_CARRIED_SUFFIXES = (".json", ".jsonl", ".txt", ".model", ".tiktoken", ".jinja", ".md", ".py")
_CARRIED_NAMES = ("LICENSE", "NOTICE", ".gitattributes", REPLACED)


def resolved(path: Path) -> Path:
    """Return the place a target means, links followed; raises ValueError for a file, a mount point, and a circle of links."""
    try:
        final = path.resolve()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"the target {path} cannot be followed to a place ({error}); choose another target") from error
    if os.path.ismount(final):
        raise ValueError(f"the target {path} is a mount point, which cannot be replaced by a directory; give a directory inside it")
    if final.exists() and not final.is_dir():
        raise ValueError(f"the target {path} is a file, and a checkpoint is a directory; remove the file or choose another target")
    return final


def check_replaceable(final: Path, overwrite: bool) -> None:
    """Raise ValueError unless `final` is free, or a checkpoint and nothing else that the caller wants replaced."""
    if not os.path.lexists(final) or (final.is_dir() and not any(final.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{final} is not empty; choose another target, or pass overwrite (--overwrite) to replace it")
    names = sorted(p.name for p in final.iterdir()) if final.is_dir() else []
    whole = "config.json" in names and any(n.endswith(WEIGHT_SUFFIXES) for n in names)
    if not (final / MANIFEST).is_file() and not whole:
        raise ValueError(f"{final} does not look like a checkpoint, so it is not replaced; remove it yourself or choose another target")
    foreign = _foreign(final, names)
    if foreign:
        raise ValueError(
            f"{final} holds {', '.join(foreign[:8])}{' and more' if len(foreign) > 8 else ''} beside a checkpoint, so it is not replaced; "
            "move that away, or choose another target"
        )


def _foreign(final: Path, names: list[str]) -> list[str]:
    """Return what is no checkpoint's. Ours carries whatever its source had, but no hidden directory."""
    if (final / MANIFEST).is_file():
        return [n for n in names if n.startswith(".") and (final / n).is_dir()]
    known = _CARRIED_SUFFIXES + WEIGHT_SUFFIXES
    return [n for n in names if (final / n).is_dir() or not (n.endswith(known) or n in _CARRIED_NAMES)]


def check_partial(partial: Path) -> None:
    """Raise ValueError unless `partial` is absent, empty, or left by an earlier run."""
    journal = partial / JOURNAL
    if not os.path.lexists(partial):
        return
    if _is_directory(partial):
        names = {p.name for p in partial.iterdir()}
        if names <= {NEW_JOURNAL} or (partial / MANIFEST).is_file():
            return
        if journal.is_file():
            with journal.open("rb") as file:
                if re.fullmatch(rb"[0-9a-f]{64}\n", file.readline(128)):
                    return
    raise ValueError(_not_ours(partial, "the conversion works there"))


def left_behind(old: Path) -> bool:
    """Tell whether a replaced checkpoint stands at `old`; raises ValueError where something else does."""
    if not os.path.lexists(old):
        return False
    if _is_directory(old):
        if not any(old.iterdir()):
            return False
        if any((old / name).is_file() for name in (MANIFEST, REPLACED)):
            return True
    raise ValueError(_not_ours(old, "a replaced checkpoint is moved there"))


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _not_ours(path: Path, why: str) -> str:
    return f"{path} was not left by a conversion, so it is not touched, but {why}; move it away, or choose another target"


def remove_tree(path: Path) -> None:
    """Remove a directory of ours, what shows that it is ours last, so that a cut removal can be gone on with."""
    marks = (JOURNAL, MANIFEST, REPLACED)
    for child in path.iterdir():
        if child.name not in marks:
            remove(child)
    shutil.rmtree(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a directory."""
    if _is_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink()
