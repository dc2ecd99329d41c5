"""Canonical (Hugging Face) tensors written straight into the parameters of a vLLM model, on one engine rank.

Enters: whole canonical tensors, codes and scales apart. Leaves: this rank's rectangles of them, copied to where the parameters hold them:
qkv_proj and gate_up_proj stacked, o and down cut along K, scales beside codes. No parameter gets another address.
Why: vLLM's loader takes a layer's tensors into fresh memory, processes the layer again and copies it back. On CUDA the parameters of a
dense model hold checkpoint bytes, those of block FP8 linears with FP32 scales too (`compat.held_weight`), so that one copy is all there is
to do. Nothing is believed: behind a push the hash of every rectangle is compared, whichever way it came.
Rows that pad a vocabulary shard are not written: logits end before them. A parameter of another dtype than the tensor, as of a layer that
was packed at its first load, is refused.
Left out: how tensors get here (vllm_transfer.py over NCCL, vllm_worker.py by CUDA IPC).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from conversion.architecture import ModelArchitecture
from conversion.shards import Span
from jetrl_megatron.fp8.words import copy_in_words
from jetrl_megatron.rollout.published import EnginePlans, rectangle


class InPlaceWriter:
    """Where the canonical tensors of a model go in one engine rank.

    model: vLLM's. arch: its dimensions. tp, rank: the engine's. plans: kept from one push to the next, where the writer, which holds
    tensors, serves one push. Raises ValueError where a layer is missing, or multiplies by a packed copy of its weight.
    """

    def __init__(self, model: torch.nn.Module, arch: ModelArchitecture, tp: int, rank: int, plans: EnginePlans | None = None) -> None:
        """Find every rectangle's place."""
        plan, modules = (plans or EnginePlans()).of(arch, tp, fp8_linears(model))[rank], modules_by_name(model)
        self._places: dict[str, list[tuple[Tensor, Span, Span]]] = {name: [] for name in plan.names}
        for place in plan.places:
            module = modules.get(place.module)
            if module is None:
                raise ValueError(
                    f"the engine's model has no {place.module}.{place.parameter}, and the actor's has: their config.json differ"
                )
            if hasattr(module, "cpu_linear"):
                raise ValueError(f"{place.module} multiplies by a packed copy of its weight: use rollout.vllm.load=reload")
            held = rectangle(getattr(module, place.parameter).detach(), place.rows_held, place.cols_held)
            self._places[place.hf].append((held, place.rows, place.cols))

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


def modules_by_name(model: torch.nn.Module) -> dict[str, Any]:
    """Return every module under each of its names, as `model.get_submodule` finds them one by one."""
    return dict(model.named_modules(remove_duplicate=False))


def fp8_linears(model: torch.nn.Module) -> frozenset[str]:
    """Return the Hugging Face module names of the linears whose weights the engine holds as FP8 codes."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    found = set()
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.float8_e4m3fn:
            module = name.removesuffix(".weight")
            stem, _, last = module.rpartition(".")
            found |= {f"{stem}.{part}" for part in parts.get(last, (last,))}
    return frozenset(found)
