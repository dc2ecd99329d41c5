"""Real vLLM on the CPU. Skipped where it is not installed; and where the CPU cannot serve block FP8, but for tests marked `any_cpu`."""

import importlib.util

import pytest
import torch


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/vllm/" in str(item.path)]
    missing = importlib.util.find_spec("vllm") is None
    no_amx = not missing and not torch.cuda.is_available() and not torch.cpu._is_amx_tile_supported()
    for item in here:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.timeout(1200))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
        elif no_amx and item.get_closest_marker("any_cpu") is None:
            item.add_marker(pytest.mark.skip(reason="vLLM serves block FP8 on a CPU with AMX only"))
