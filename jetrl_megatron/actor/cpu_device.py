"""Megatron-core on a host without a GPU: every CUDA assumption it makes is answered here, and only while the scope is open.

Enters: nothing. Leaves: a context manager that the actor holds open around build and step when its device is a CPU. CUDA runs never
import this file (a test checks it). Checked on megatron-core 0.16.1 and torch 2.13.

What is answered:
- `torch.cuda.current_device()` gives the CPU device, `synchronize()` and `empty_cache()` do nothing, the CUDA generator's state is the
  CPU generator's;
- tensor factories called with `device="cuda"` and `Tensor.cuda()` stay on the CPU;
- `Tensor.type()` names the CUDA class, because the distributed optimizer sorts parameters by that string;
- `Tensor.is_cuda` is left alone;
- the CUDA random-number tracker forks nothing: dropout is 0 everywhere in this project.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _CudaOnCpu(TorchFunctionMode):
    """Redirects the tensor calls that name CUDA to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        device = kwargs.get("device")
        if device is not None and "cuda" in str(device):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device) and "cuda" in str(args[1]):
            args = (args[0], CPU, *args[2:])
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


class _NullTracker:
    """Stands in for Megatron's CUDA random-number tracker."""

    def fork(self, name: str = "") -> Any:
        """Return a scope that changes no generator."""
        return nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return no states."""
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Accept no states."""

    def is_initialized(self) -> bool:
        """Say yes: nothing needs a seed."""
        return True


def _null_tracker(*args: Any, **kwargs: Any) -> _NullTracker:
    return _NullTracker()


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Open the scope in which Megatron-core's CUDA calls are answered by the CPU; nesting is harmless.

    Raises:
        RuntimeError: when a GPU is there, because then nothing may be redirected.
    """
    if torch.cuda.is_available():
        raise RuntimeError("megatron_on_cpu() was opened on a host with a GPU; build the actor with device cuda instead")
    import megatron.core.tensor_parallel as tensor_parallel
    import megatron.core.tensor_parallel.random as mcore_random

    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", lambda *a, **k: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "get_rng_state", lambda *a, **k: torch.get_rng_state()),
        (torch.cuda.random, "get_rng_state", lambda *a, **k: torch.get_rng_state()),
        (mcore_random, "get_cuda_rng_tracker", _null_tracker),
        (mcore_random, "_set_cuda_rng_state", lambda *a, **k: None),
        (tensor_parallel, "get_cuda_rng_tracker", _null_tracker),
    ]
    patches = [mock.patch.object(owner, name, answer) for owner, name, answer in answers]
    for patch in patches:
        patch.start()
    try:
        with _CudaOnCpu():
            yield
    finally:
        for patch in reversed(patches):
            patch.stop()
