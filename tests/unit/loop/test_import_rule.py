"""fp8 <- conversion <- {actor, rollout, sync} <- loop <- train; grpo stands on torch alone: read from the sources, then from what loads."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONTRACTS = {"config", "choices", "config_rl", "contracts", "failure"}
MAY_IMPORT = {  # inside this project, besides itself
    "fp8": CONTRACTS,
    "conversion": CONTRACTS | {"fp8"},
    "actor": CONTRACTS | {"fp8", "conversion"},
    "rollout": CONTRACTS | {"fp8", "conversion", "actor", "sync"},
    "sync": CONTRACTS | {"fp8", "conversion", "actor", "rollout"},
    "grpo": CONTRACTS,
    "data": CONTRACTS | {"grpo"},
    "run": CONTRACTS | {"load"},
}
MAY_IMPORT_FROM_OUTSIDE = {
    "fp8": {"torch", "triton"},
    "conversion": {"torch", "numpy", "safetensors", "tqdm"},
    "grpo": {"torch", "math_verify", "sympy", "latex2sympy2_extended"},
}
UPPER = {"train", "evaluate", "cli", "loop"}
GRPO = ("grpo.batch", "grpo.loss", "grpo.advantages", "grpo.mismatch")
STAGES = ("fp8", *GRPO, "conversion.actor_io", "actor.actor", "rollout.local", "train")


def imports_of(package):
    """(project packages, others) that any file of a package imports, at its top or inside a function."""
    folder = ROOT / package if package == "conversion" else ROOT / "jetrl_megatron" / package
    inside, outside = set(), set()
    for path in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = [node.module]
                if node.module == "jetrl_megatron":
                    names = [f"jetrl_megatron.{a.name}" for a in node.names]
            for name in names:
                first, _, rest = name.partition(".")
                if first in ("jetrl_megatron", "conversion", "launch"):
                    inside.add(rest.split(".")[0] if first == "jetrl_megatron" else first)
                elif first not in sys.stdlib_module_names:
                    outside.add(first)
    return inside - {package}, outside


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it(package):
    inside, outside = imports_of(package)
    assert inside <= MAY_IMPORT[package]
    assert outside <= MAY_IMPORT_FROM_OUTSIDE.get(package, outside)
    if package == "data":
        assert "torch" not in outside and "megatron" not in outside


def test_nothing_but_the_command_line_imports_the_loop():
    packages = [p.name for p in (ROOT / "jetrl_megatron").iterdir() if (p / "__init__.py").exists()]
    # The benches are commands of their own: they start servers and runs as the command line does.
    above = {"loop", "bench"}
    below = {package for package in packages if imports_of(package)[0] & UPPER}
    assert below <= above and "loop" in packages
    assert "train" not in imports_of("evaluate")[0]


@pytest.fixture(scope="module")
def loaded():
    """What is in sys.modules after importing each stage in turn, in one fresh process, then around the scopes of CUDA and of the CPU."""
    code = (
        "import importlib, json, sys\n"
        f"stages = {STAGES!r}\n"
        "seen = {}\n"
        "for stage in stages:\n"
        "    importlib.import_module(stage if stage.startswith('conversion') else f'jetrl_megatron.{stage}')\n"
        "    seen[stage] = sorted(sys.modules)\n"
        "import torch\n"
        "from jetrl_megatron.actor.device import megatron_scope\n"
        "for device in ('cuda', 'cpu'):\n"
        "    with megatron_scope(torch.device(device)): pass\n"
        "    seen[device] = sorted(sys.modules)\n"
        "print(json.dumps(seen))\n"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
    assert out.returncode == 0, out.stderr
    return {stage: set(modules) for stage, modules in json.loads(out.stdout.splitlines()[-1]).items()}


HEAVY = {"megatron", "vllm", "deep_gemm", "transformers", "triton", "math_verify", "sympy", "datasets"}


@pytest.mark.parametrize("stage", [s for s in STAGES if s.startswith(("fp8", "grpo", "conversion"))])
def test_fp8_grpo_and_conversion_load_none_of_the_heavy_packages(loaded, stage):
    # torch itself loads sympy and triton where they are installed, for its compiler; only ours count for those two.
    by_torch = {"sympy", "triton"}
    assert loaded[stage] & (HEAVY - by_torch) == set()
    own = {m for m in loaded[stage] if m.startswith("jetrl_megatron.")}
    assert not any(m.startswith(("jetrl_megatron.actor", "jetrl_megatron.rollout", "jetrl_megatron.loop")) for m in own)


def test_the_default_run_loads_no_optional_package(loaded):
    # Megatron-core itself loads tensorboard where it is installed.
    optional = {"vllm", "deep_gemm", "transformer_engine", "nemo_run", "datasets", "wandb", "matplotlib"}
    assert loaded["train"] & optional == set()
    assert {"megatron", "transformers"} <= loaded["train"]


def test_a_cuda_run_never_loads_the_answers_for_the_cpu(loaded):
    name = "jetrl_megatron.actor.cpu_device"
    assert name not in loaded["train"] and name not in loaded["cuda"]
    assert name in loaded["cpu"], "the check must be able to fail"
