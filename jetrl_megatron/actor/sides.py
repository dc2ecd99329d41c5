"""Which precision each linear runs on each side, and the weight caches behind it.

Enters: model chunks, PrecisionConfig. Leaves: every linear with its flows attached, norms that know which linear reads them, and the caches
that `refresh` after each optimizer step. Invariant: the bytes that the training forward multiplies are the bytes that the rollout
multiplies, because in the `jetrl` arm both sides hold the same cache; a cache refuses to serve a weight that changed since it was
quantised.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from conversion.architecture import ModelArchitecture
from conversion.layout import ParallelLayout, fp8_modules, stage_layers
from jetrl_megatron.actor.linears import FlowLinear, SideFlow
from jetrl_megatron.actor.model import PolicyModel
from jetrl_megatron.actor.norm import RMSNorm
from jetrl_megatron.config import Arm, Backend, LinearPrecision, PrecisionConfig
from jetrl_megatron.fp8 import GemmPrecision, WeightCache
from jetrl_megatron.fp8.precision import Side

_HF_OF = {
    "self_attention.linear_qkv": "self_attn.q_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc1": "mlp.gate_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
"""A representative Hugging Face module of each Megatron linear; merged parts share one precision (`conversion.layout`)."""

_NORM_OF = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
"""The norm whose output one linear alone reads."""


def qkv_row_order(arch: ModelArchitecture, tp: int, device: torch.device) -> Tensor | None:
    """Return the row order in which a rank's fused QKV is quantised: [q | k | v], as the rollout engine stores it.

    None where head_dim is a multiple of 128: scale blocks then lie within heads and group-major order has the same blocks.
    Otherwise [rows] int64, position in the fused weight (group-major: [q..q k v] a kv head) of each row of [q | k | v].
    """
    if arch.head_dim % 128 == 0:
        return None
    groups, per_group, dim = arch.num_kv_heads // tp, arch.heads_per_group, arch.head_dim
    rows = torch.arange(groups * (per_group + 2) * dim, device=device).view(groups, per_group + 2, dim)
    return torch.cat([rows[:, :per_group].reshape(-1), rows[:, per_group].reshape(-1), rows[:, per_group + 1].reshape(-1)])


class FlowSides:
    """The two sides of a model: attached once after the weights are loaded, refreshed after every optimizer step.

    Args:
        chunks: this pipeline rank's model chunks.
        arch: the model's dimensions.
        layout: the weight layout.
        precision: the recipe's part.
        backend: resolved, never `auto`.
        pp_rank: this process's pipeline rank.
    """

    def __init__(
        self,
        chunks: list[PolicyModel],
        *,
        arch: ModelArchitecture,
        layout: ParallelLayout,
        precision: PrecisionConfig,
        backend: Backend,
        pp_rank: int,
    ) -> None:
        """Register every FP8 weight in the cache of its side and hand the linears their flows."""
        self._chunks = chunks
        self._caches: dict[str, WeightCache] = {}
        fp8 = fp8_modules(arch, precision.bf16_layers)
        flows = {side: self._flow(side, precision, backend) for side in ("train", "rollout")}
        bf16 = SideFlow(precision=GemmPrecision.from_config(PrecisionConfig(arm=Arm.bf16), "train"), cache=None, backend=backend)
        device = chunks[0].config.flow_device
        order = qkv_row_order(arch, layout.tp, device)
        for name, hf_name, linear, norm in self._named_linears(arch, layout, pp_rank):
            linear.flow_name = name
            linear.row_order = order if name.endswith("linear_qkv") else None
            linear.flow_sides = {side: flow if hf_name in fp8 else bf16 for side, flow in flows.items()}
            if norm is not None:
                norm.format_of = linear.input_format
            for cache in {id(f.cache): f.cache for f in linear.flow_sides.values() if f.cache is not None}.values():
                cache.register(name, linear.weight, row_order=linear.row_order)

    def _flow(self, side: Side, precision: PrecisionConfig, backend: Backend) -> SideFlow:
        gemm = GemmPrecision.from_config(precision, side)
        if gemm.linear is LinearPrecision.bf16:
            return SideFlow(precision=gemm, cache=None, backend=backend)
        key = gemm.scale_format.value
        if key not in self._caches:
            # Where nothing is trained (the reference policy) nothing runs backward: a byte a parameter less.
            trained = any(p.requires_grad for chunk in self._chunks for p in chunk.parameters())
            self._caches[key] = WeightCache(gemm.scale_format, backend=backend, keep_transposed=trained)
        return SideFlow(precision=gemm, cache=self._caches[key], backend=backend)

    def _named_linears(
        self, arch: ModelArchitecture, layout: ParallelLayout, pp_rank: int
    ) -> Iterator[tuple[str, str, FlowLinear, RMSNorm | None]]:
        """Yield (global Megatron name, representative HF module name, linear, norm in front) of every linear, in the forward's order."""
        layers = stage_layers(arch, layout)
        for stage, chunk in enumerate(self._chunks):
            for number, layer in zip(layers[pp_rank, stage], chunk.decoder.layers, strict=True):
                for name, hf in _HF_OF.items():
                    linear: torch.nn.Module = layer.get_submodule(name)
                    assert isinstance(linear, FlowLinear), (name, type(linear))
                    norm = getattr(layer, _NORM_OF[name]) if name in _NORM_OF else None
                    yield f"decoder.layers.{number}.{name}", f"model.layers.{number}.{hf}", linear, norm

    @property
    def caches(self) -> dict[str, WeightCache]:
        """The distinct caches by scale format; empty in the BF16 arm."""
        return self._caches

    def invalidate(self) -> None:
        """Declare all bytes stale: Megatron's optimizer writes through flat buffers, which torch does not count as a change."""
        for cache in self._caches.values():
            cache.invalidate()

    def refresh(self) -> None:
        """Quantise every registered weight once; call after loading weights and after every optimizer step."""
        for cache in self._caches.values():
            cache.refresh()

    def in_bf16_steps(self) -> AbstractContextManager[None]:
        """Let what stands in front of a linear write BF16 in the enclosed forwards, so that hooks see it; the bits stay the same."""
        return self._with("wants_bf16", True)

    def use(self, side: Side) -> AbstractContextManager[None]:
        """Run the enclosed forwards on one side; the former side returns afterwards."""
        return self._with("flow_side", side)

    @contextmanager
    def _with(self, attribute: str, value: Any) -> Iterator[None]:
        """Set an attribute of every linear; the former values return afterwards."""
        linears = [m for chunk in self._chunks for m in chunk.modules() if isinstance(m, FlowLinear)]
        before = [getattr(m, attribute) for m in linears]
        for m in linears:
            setattr(m, attribute, value)
        try:
            yield
        finally:
            for m, old in zip(linears, before, strict=True):
                setattr(m, attribute, old)
