"""Real vLLM, on the CPU or on a GPU; skipped where it is not installed."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if "tests/vllm/" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(1200))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
