"""How vLLM's layers hold their weights, and what differs between CUDA and a CPU: the part of compat.py that is about parameters.

Enters: modules and parameters of a vLLM model. Leaves: weights in checkpoint layout. Checked with the same versions as compat.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_IDENTITY_ROWS = 512
"""Rows of the identity that a packed layer is multiplied by at a time."""


def held_weight(module: Any, name: str) -> tuple[Tensor, bool]:
    """Return parameter `name` of a module in checkpoint layout, read from what its forward multiplies by.

    The second value tells that negative zeros could not be told from positive ones. On CUDA parameters keep checkpoint layout, and so do
    FP8 codes on a CPU (vllm_plugin.py). On a CPU vLLM packs the BF16 weight of a linear into a handle that cannot be read, so that the
    layer is asked for its product with the identity, which is the weight itself, exactly.
    """
    parameter = getattr(module, name)
    if holds_checkpoint_bytes(parameter):
        return parameter.detach(), False
    if name == "weight" and hasattr(module, "cpu_linear"):
        return _through_identity(module), True
    if name == "bias" and parameter.dtype is torch.float32:
        return _exactly_bf16(parameter.detach()), False
    return parameter.detach(), False


def holds_checkpoint_bytes(parameter: Tensor) -> bool:
    """Tell whether a parameter other than scales is what its layer multiplies by, in checkpoint layout, whatever the layer: on CUDA."""
    return parameter.device.type != "cpu"


def keeps_addresses(model: torch.nn.Module) -> bool:
    """Tell whether parameters keep their memory behind a reload: on CUDA, where vLLM's captured graphs read it."""
    return next(model.parameters()).is_cuda


def embedding_rows(module: Any) -> Tensor:
    """Return the table that an embedding looks rows up in; its head may multiply by a packed copy (`held_weight`)."""
    return module.weight.detach()


def has_packed_head(module: Any) -> bool:
    """Tell whether a head multiplies by a copy of its own rather than by the embedding's rows."""
    return hasattr(module, "cpu_linear")


def refresh_tied_head(model: Any) -> None:
    """Pack a tied head's weight again after a load: vLLM's reload packs the embedding's copy and leaves the head's as it was.

    Without it a CPU engine goes on answering with the old head after every update (seen with 0.30; tests/vllm shows it).
    """
    head = getattr(model, "lm_head", None)
    if head is not None and has_packed_head(head):
        head.quant_method.process_weights_after_loading(head)


def _through_identity(module: Any) -> Tensor:
    """Return W [N, K] as (I W^T)^T, a block of columns at a time."""
    num_in = getattr(module, "input_size_per_partition", None) or module.embedding_dim
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = module.cpu_linear
    parts = []
    for start in range(0, num_in, _IDENTITY_ROWS):
        rows = min(_IDENTITY_ROWS, num_in - start)
        eye = torch.zeros(rows, num_in, dtype=torch.bfloat16)
        eye[torch.arange(rows), torch.arange(start, start + rows)] = 1.0
        parts.append(linear(eye, module.weight, None).t())
    return _exactly_bf16(torch.cat(parts, dim=1))


def _exactly_bf16(values: Tensor) -> Tensor:
    narrow = values.to(torch.bfloat16)
    assert torch.equal(narrow.to(values.dtype), values), "a BF16 weight was read back as something that is not BF16"
    return narrow
