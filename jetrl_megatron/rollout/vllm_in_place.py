"""Canonical (Hugging Face) tensors written straight into the parameters of a vLLM model, on one engine rank.

Enters: whole canonical tensors, codes and scales apart. Leaves: this rank's rectangles of them, copied to where the parameters hold them:
qkv_proj and gate_up_proj stacked, o and down cut along K, scales beside codes. No parameter gets another address.
Why: vLLM's loader takes a layer's tensors into fresh memory, processes the layer again and copies it back. On CUDA the parameters of a
dense model hold checkpoint bytes (`compat_weights.py`), those of block FP8 linears with FP32 scales too, so that one copy is all there is
to do. Nothing is believed: behind a push the hash of every rectangle is compared, whichever way it came.
Rows that pad a vocabulary shard are not written: logits end before them. A parameter of another dtype than the tensor, as of a layer that
was packed at its first load, is refused.
Left out: where the rectangles lie (held_views.py), how tensors get here (vllm_transfer.py over NCCL, vllm_worker.py by CUDA IPC).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from conversion.shards import Span
from jetrl_megatron.fp8.words import copy_in_words
from jetrl_megatron.rollout.held_views import HeldViews
from jetrl_megatron.rollout.published import rectangle


class InPlaceWriter:
    """Where the canonical tensors of a model go in one engine rank.

    held: the rank's rectangles. Raises ValueError where a layer multiplies by a packed copy of its weight.
    """

    def __init__(self, held: HeldViews) -> None:
        """Sort the rectangles by tensor."""
        for name in {place.module for place in held.plan.places}:
            if hasattr(held.modules[name], "cpu_linear"):
                raise ValueError(f"{name} multiplies by a packed copy of its weight: use rollout.vllm.load=reload")
        self._places: dict[str, list[tuple[Tensor, Span, Span]]] = {name: [] for name in held.plan.names}
        for place in held.plan.places:
            self._places[place.hf].append((held.view(place), place.rows, place.cols))

    @torch.no_grad()
    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's rectangles of whole canonical tensors; raises ValueError for a name or a dtype that no parameter here has."""
        for name, tensor in tensors:
            if name not in self._places:
                raise ValueError(f"{name} has no place in this engine's model")
            for place, rows, cols in self._places[name]:
                if place.dtype is not tensor.dtype:
                    raise ValueError(f"{name} is {tensor.dtype} and the parameter {place.dtype}: the arms of actor and server differ")
                copy_in_words(place, rectangle(tensor, rows, cols))
