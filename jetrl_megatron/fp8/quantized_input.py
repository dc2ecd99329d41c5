"""`QuantizedInput`: the input of a linear as the FP8 operands of its GEMMs, when what made it never wrote it in BF16.

Enters: what stands in front of a linear (a norm, SwiGLU) and the format that the linear asks for (`input_format`). Leaves: X in groups
along K for fprop, X^T for wgrad where it is kept, and a stand-in for autograd.
The stand-in has the shape and dtype of X, so that dX finds its way back through it, but one element of memory, NaN: whoever reads it as
values sees that. Invariant: the bytes are those of quantising the BF16 X.
Left out: the kernels that make the operands (triton_fused.py), who asks whom (actor/linears.py).

Legend: T tokens, K input features, as far as this rank holds them.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from jetrl_megatron.config import Backend, LinearPrecision, SavedActivation, ScaleFormat
from jetrl_megatron.fp8.backend import kernels_of
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.precision import GemmPrecision
from jetrl_megatron.fp8.quantize import ROW_BLOCK

Operands = tuple[BlockScaled, BlockScaled | None]
"""X [T, K] in blocks 1x128; X^T [K, T128] as wgrad reads it, or None where nothing is kept of it."""


@dataclass(frozen=True, kw_only=True)
class InputFormat:
    """What a linear makes of its input."""

    scale_format: ScaleFormat
    t_block: tuple[int, int] | None
    """Block of X^T; None where it is not wanted."""
    backend: Backend
    """Resolved: whose quantisers run."""

    def quantize(self, x_TK: torch.Tensor) -> Operands:
        """Return the operands of x [T, K] bfloat16."""
        kernels = kernels_of(self.backend)
        if self.t_block is None:
            return kernels.quantize(x_TK, ROW_BLOCK, dtype=torch.float8_e4m3fn, scale_format=self.scale_format), None
        return kernels.quantize_dual(x_TK, dtype=torch.float8_e4m3fn, scale_format=self.scale_format, t_block=self.t_block)


def input_format(precision: GemmPrecision, backend: Backend, *, for_wgrad: bool) -> InputFormat | None:
    """What a linear makes of its input, or None where it reads, or keeps, BF16.

    precision: its side's. backend: resolved. for_wgrad: whether the gradient of the weight will be asked for.
    """
    if precision.linear is LinearPrecision.bf16 or (for_wgrad and precision.saved_activation is SavedActivation.bf16):
        return None
    keeps_columns = for_wgrad and precision.saved_activation is SavedActivation.fp8_dual
    return InputFormat(scale_format=precision.scale_format, t_block=precision.x_t_block if keeps_columns else None, backend=backend)


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedInput:
    """X [T, K] as the operands of a linear; see the module."""

    operands: Operands
    graph_TK: torch.Tensor
    """The stand-in."""

    def __post_init__(self) -> None:
        """Hold the operands and the stand-in to one shape."""
        assert self.operands[0].shape == tuple(self.graph_TK.shape), (self.operands[0].shape, self.graph_TK.shape)

    @classmethod
    def of(cls, x_TK: torch.Tensor, form: InputFormat) -> "QuantizedInput":
        """Quantise x [T, K] bfloat16; gradients flow to it."""
        return cls(operands=form.quantize(x_TK), graph_TK=_StandIn.apply(x_TK))


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor) -> torch.Tensor:
        return stand_in((x_TK.shape[0], x_TK.shape[1]), x_TK.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def stand_in(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """A new BF16 matrix of NaN that shares one element of memory with all others of the device."""
    storage = _nan(device).untyped_storage()
    # No view of that element: autograd would treat all stand-ins as relatives.
    return torch.empty(0, dtype=torch.bfloat16, device=device).set_(storage, 0, shape, (0, 0))


@functools.cache
def _nan(device: torch.device) -> torch.Tensor:
    return torch.full((1,), math.nan, dtype=torch.bfloat16, device=device)
