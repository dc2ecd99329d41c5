"""`GemmPrecision`: what one side's linear layers run in, resolved from the recipe once.

Enters: `PrecisionConfig`. Leaves: the switches that linear.py, weight_cache.py and the precision-flow check read.
Left out: which layers stay BF16 by name (actor/sides.py reads `bf16_layers`), and which library runs the kernels (backend.py).
"""

from dataclasses import dataclass
from typing import Literal

import torch

from jetrl_megatron.config import GradFormat, LinearPrecision, PrecisionConfig, SavedActivation, ScaleFormat, WgradGranularity
from jetrl_megatron.fp8.quantize import ROW_BLOCK, WEIGHT_BLOCK

Side = Literal["train", "rollout"]


@dataclass(frozen=True, kw_only=True)
class GemmPrecision:
    """The precision of the three GEMMs of a linear layer and of what it saves."""

    linear: LinearPrecision = LinearPrecision.fp8
    saved_activation: SavedActivation = SavedActivation.fp8_dual
    dgrad: LinearPrecision = LinearPrecision.fp8
    wgrad: LinearPrecision = LinearPrecision.fp8
    grad_format: GradFormat = GradFormat.e4m3
    scale_format: ScaleFormat = ScaleFormat.fp32
    wgrad_granularity: WgradGranularity = WgradGranularity.blocks

    def __post_init__(self) -> None:
        """A BF16 linear has no FP8 part; raises ValueError that names the contradiction."""
        if self.linear is LinearPrecision.bf16:
            fp8 = [n for n in ("dgrad", "wgrad") if getattr(self, n) is LinearPrecision.fp8]
            if fp8 or self.saved_activation is not SavedActivation.bf16:
                raise ValueError(f"linear is bf16 but {fp8 or 'saved_activation'} is fp8; a BF16 forward keeps its backward in BF16")

    @property
    def grad_dtype(self) -> torch.dtype:
        """FP8 dtype of dY."""
        return torch.float8_e5m2 if self.grad_format is GradFormat.e5m2 else torch.float8_e4m3fn

    @property
    def x_t_block(self) -> tuple[int, int]:
        """Block of the transposed copy of X that wgrad reads."""
        return ROW_BLOCK if self.wgrad_granularity is WgradGranularity.groups else WEIGHT_BLOCK

    @classmethod
    def from_config(cls, config: PrecisionConfig, side: Side) -> "GemmPrecision":
        """The precision of one side. config: the recipe's part; side: "train" (actor) or "rollout" (local engine)."""
        if side not in ("train", "rollout"):
            raise ValueError(f"side is {side!r}; it must be 'train' or 'rollout'")
        linear = config.train_linear if side == "train" else config.rollout_linear
        scale_format = config.scale_format
        if side == "rollout" and config.rollout_scale_format is not None:
            scale_format = config.rollout_scale_format
        if linear is LinearPrecision.bf16:
            bf16 = LinearPrecision.bf16
            return cls(linear=bf16, saved_activation=SavedActivation.bf16, dgrad=bf16, wgrad=bf16, scale_format=scale_format)
        return cls(
            linear=linear,
            saved_activation=config.saved_activation,
            dgrad=config.dgrad,
            wgrad=config.wgrad,
            grad_format=config.grad_format,
            scale_format=scale_format,
            wgrad_granularity=config.wgrad_granularity,
        )
