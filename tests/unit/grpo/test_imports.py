"""What the package may load: the reward side is free of torch and sympy, the rest of torch's big companions."""

import subprocess
import sys

import pytest


def _loaded(module: str, names: str) -> str:
    code = f"import sys, {module}; print(sorted(name for name in {names.split()!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["rewards", "reward_worker", "equality"])
def test_rewards_start_without_torch_and_sympy(module: str) -> None:
    assert _loaded(f"jetrl_megatron.grpo.{module}", "torch sympy math_verify transformers megatron") == "[]"


def test_the_tensor_side_needs_torch_only() -> None:
    modules = "jetrl_megatron.grpo.batch, jetrl_megatron.grpo.loss, jetrl_megatron.grpo.mismatch, jetrl_megatron.grpo.advantages"
    assert _loaded(modules, "megatron vllm transformers math_verify jetrl_megatron.actor jetrl_megatron.fp8") == "[]"
