"""Real vLLM on the CPU. Every test here is skipped where it is not installed, or where the CPU cannot serve block FP8."""

import importlib.util

import pytest
import torch


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/vllm/" in str(item.path)]
    reason = None
    if importlib.util.find_spec("vllm") is None:
        reason = "vLLM is not installed"
    elif not torch.cuda.is_available() and not torch.cpu._is_amx_tile_supported():
        reason = "vLLM serves block FP8 on a CPU with AMX only"
    for item in here:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.timeout(1200))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
