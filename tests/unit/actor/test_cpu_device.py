"""Megatron's CUDA answers exist inside the scope only (that a CUDA run never loads them: tests/unit/loop/test_import_rule.py)."""

import ast
from pathlib import Path

import megatron.core.tensor_parallel as tensor_parallel
import megatron.core.tensor_parallel.random as mcore_random
import pytest
import torch

from jetrl_megatron.actor.cpu_device import megatron_on_cpu
from jetrl_megatron.actor.device import megatron_scope

ROOT = Path(__file__).parents[3]
REPLACED = [
    (torch.cuda, "current_device"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "empty_cache"),
    (torch.cuda, "get_rng_state"),
    (torch.cuda.random, "get_rng_state"),
    (mcore_random, "get_cuda_rng_tracker"),
    (mcore_random, "_set_cuda_rng_state"),
    (tensor_parallel, "get_cuda_rng_tracker"),
]


def test_inside_the_scope_cuda_calls_are_answered_by_the_cpu():
    with megatron_on_cpu():
        assert torch.cuda.current_device() == torch.device("cpu")
        torch.cuda.synchronize()
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).cuda().device.type == torch.zeros(2).to("cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.equal(torch.cuda.get_rng_state(), torch.get_rng_state())
        before = torch.get_rng_state()
        with mcore_random.get_cuda_rng_tracker().fork():
            torch.rand(1)
        assert not torch.equal(before, torch.get_rng_state()), "the tracker forks nothing"


@pytest.mark.parametrize("leave_by", ["end", "error", "nested"])
def test_everything_is_as_before_when_the_scope_is_left(leave_by):
    originals = [getattr(owner, name) for owner, name in REPLACED]
    try:
        with megatron_on_cpu():
            replaced = [getattr(owner, name) for owner, name in REPLACED]
            if leave_by == "nested":
                with megatron_on_cpu():
                    pass
                assert [getattr(owner, name) for owner, name in REPLACED] == replaced
            if leave_by == "error":
                raise KeyError
    except KeyError:
        assert leave_by == "error"
    assert all(a is not b for a, b in zip(originals, replaced, strict=True))
    assert [getattr(owner, name) for owner, name in REPLACED] == originals
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_the_scope_refuses_a_host_with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="build the actor with device cuda"), megatron_on_cpu():
        pass


def test_a_cuda_scope_replaces_nothing():
    originals = [getattr(owner, name) for owner, name in REPLACED]
    with megatron_scope(torch.device("cuda", 0)):
        assert [getattr(owner, name) for owner, name in REPLACED] == originals


def test_only_device_py_names_it_and_only_inside_a_function():
    found = []
    for path in sorted((ROOT / "jetrl_megatron").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
            if isinstance(node, ast.Import | ast.ImportFrom) and any(n.endswith("cpu_device") for n in names):
                found.append((path.relative_to(ROOT).as_posix(), node in tree.body))
    assert found == [("jetrl_megatron/actor/device.py", False)]
