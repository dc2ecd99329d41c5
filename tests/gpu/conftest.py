"""The kernels that a GPU resolves to."""

import pytest

from jetrl_megatron.config import Backend
from jetrl_megatron.fp8 import resolve_backend
from jetrl_megatron.fp8.backend import kernels_of


@pytest.fixture(scope="module")
def kernels():
    return kernels_of(resolve_backend(Backend.auto, "cuda"))
