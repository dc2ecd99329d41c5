"""Where the actor runs: the device of this rank and the scope that Megatron-core calls need there.

Enters: nothing but the machine. Leaves: a `torch.device`, the floating type in which the operators around the GEMMs accumulate, and
the scope. Invariant: the choice is made once from what the machine has; nothing changes device later.
"""

import os
from contextlib import AbstractContextManager, nullcontext

import torch


def local_device() -> torch.device:
    """Return the device of this rank: CUDA device LOCAL_RANK where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def megatron_scope(device: torch.device) -> AbstractContextManager[None]:
    """Return the scope to hold open while Megatron-core builds or steps on `device`; on CUDA it does nothing."""
    if device.type == "cuda":
        return nullcontext()
    from jetrl_megatron.actor.cpu_device import megatron_on_cpu

    return megatron_on_cpu()


def accumulate_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which norms, softmax and attention accumulate before the one rounding to BF16.

    On a CPU it is float64: products of BF16 numbers are then summed exactly or to 2^-53, so that the rounded result does not depend on how
    many rows are computed together or in which order. On CUDA it is float32, and order is the kernel's own.
    """
    return torch.float64 if device.type == "cpu" else torch.float32
