"""Quantisers fused with the operation before them: RMSNorm and SwiGLU.

Enters: BF16 inputs of the norm or of the activation. Leaves: the FP8 operands of a linear layer behind them, and the rstd that a backward
of the norm needs. The BF16 result never goes to memory: for [R, C] this saves 4 bytes an element of traffic.
Invariant: the codes are those of quantising the BF16 values that the unfused operation gives (triton_source.py has the roundings).
Left out: the backward, of the norm in triton_norm.py, of SwiGLU in triton_swiglu.py.

Legend: R rows, C columns of the quantised matrix.
"""

import torch

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.quantize import ROW_BLOCK
from jetrl_megatron.fp8.triton_cast import contiguous_rows
from jetrl_megatron.fp8.triton_norm import rms_rstd
from jetrl_megatron.fp8.triton_quantize import quantize_operands
from jetrl_megatron.fp8.triton_source import NORM, SWIGLU, Source

E4M3 = torch.float8_e4m3fn


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    scale_format: ScaleFormat = ScaleFormat.fp32,
    t_block: tuple[int, int] | None = ROW_BLOCK,
) -> tuple[BlockScaled, BlockScaled | None, torch.Tensor]:
    """Quantise RMSNorm(x).

    x: [R, C] bfloat16. weight: [C] bfloat16. eps: added to the mean square. t_block: of the transposed copy, 1x128 or
    128x128; None where it is not wanted.
    Returns (row-wise 1x128 [R, C], transposed [C, R128] or None, rstd [R, 1] float32). Raises ValueError on other shapes or dtypes.
    """
    if x.dim() != 2 or weight.shape != (x.shape[1],) or x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}; need bfloat16 [R, C] and [C]")
    x = contiguous_rows(x)
    rstd = rms_rstd(x, weight, eps)
    source = Source(NORM, x, x.shape[1], rstd, weight.detach())
    return (*quantize_operands(source, t_block, dtype=E4M3, scale_format=scale_format), rstd)


def swiglu_quantize(
    gate_up: torch.Tensor, *, scale_format: ScaleFormat = ScaleFormat.fp32, t_block: tuple[int, int] | None = ROW_BLOCK
) -> tuple[BlockScaled, BlockScaled | None]:
    """`swiglu.swiglu_quantize` in one pass.

    gate_up: [R, 2C] bfloat16, gate in the first C columns. t_block: as in `rms_norm_quantize`.
    Returns (row-wise 1x128 [R, C], transposed [C, R128] or None). Raises ValueError on another shape or dtype.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype is not torch.bfloat16:
        raise ValueError(f"gate_up is {gate_up.dtype} {tuple(gate_up.shape)}; need bfloat16 [R, 2C]")
    gate_up = contiguous_rows(gate_up)
    return quantize_operands(Source(SWIGLU, gate_up, gate_up.shape[1] // 2), t_block, dtype=E4M3, scale_format=scale_format)
