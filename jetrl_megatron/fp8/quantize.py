"""The one quantiser: this torch code defines the bytes; every kernel in the project must equal it byte for byte.

Enters: BF16 or FP32 matrices. Leaves: `BlockScaled`.
Equation, over each block of x read as FP32: amax = max(max|x|, 1e-10); s = amax / max_fp8, correctly rounded in FP32, or rounded up
to a power of two for `ue8m0`; code = round-to-nearest-even(clamp(x / s, -max_fp8, max_fp8)).
Invariants: the last block of a row or column may be partial and is the block of the elements that exist; an all-zero block has zero codes
and a positive scale; a block that holds NaN or Inf has NaN codes (0x7F) and a NaN scale, so that it stays visible behind every GEMM.
Both divisions are tensor by tensor: divided by a Python number, CUDA torch multiplies with the reciprocal and flips codes.
Left out: kernels for the GPU (triton_*.py).

Legend: R rows, C columns; br, bc one block; lower-case r, c count blocks.
"""

import torch
import torch.nn.functional as F

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import FP8_MAX, BlockScaled, num_blocks

AMAX_FLOOR = 1e-10
"""Smallest amax: keeps the scale of a zero block positive and finite (the rollout engine has the same floor)."""
GROUP = 128
"""Elements along the contraction axis that share a scale."""
ROW_BLOCK = (1, GROUP)
"""Activations and gradients."""
WEIGHT_BLOCK = (GROUP, GROUP)
"""Weights."""
WeightBuffers = tuple[BlockScaled, BlockScaled | None]
"""A weight's codes as fprop reads them, and transposed as dgrad does or None."""
NAN_CODE = 0x7F
"""The NaN of both FP8 formats that we write."""


def scale_of(amax: torch.Tensor, dtype: torch.dtype, scale_format: ScaleFormat) -> torch.Tensor:
    """The scale of blocks whose largest magnitude is `amax` (FP32, any shape); NaN where amax is NaN or Inf."""
    amax = torch.clamp(amax, min=AMAX_FLOOR)
    scale = amax / torch.full_like(amax, FP8_MAX[dtype])
    if scale_format is ScaleFormat.ue8m0:
        bits = scale.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
        scale = (exponent.to(torch.int32) << 23).view(torch.float32)
    return torch.where(torch.isfinite(amax), scale, torch.full_like(scale, float("nan")))


def quantize(
    x: torch.Tensor,
    block: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_format: ScaleFormat = ScaleFormat.fp32,
) -> BlockScaled:
    """Quantise a matrix by blocks, as the module's equation says.

    x: [R, C] bfloat16 or float32, any strides. block: (br, bc), such as (1, 128), (128, 128) or (128, 1).
    dtype: float8_e4m3fn or float8_e5m2. Returns codes [R, C] contiguous and scales [ceil(R / br), ceil(C / bc)] contiguous.
    Raises ValueError on another rank or dtype.
    """
    check_input(x, dtype)
    rows, cols = x.shape
    br, bc = block
    grid_r, grid_c = num_blocks(rows, br), num_blocks(cols, bc)
    if x.numel() == 0:
        return BlockScaled(x.new_empty((rows, cols), dtype=dtype), x.new_empty((grid_r, grid_c), dtype=torch.float32), block)
    x32 = x.detach().to(torch.float32)
    if rows % br or cols % bc:
        x32 = F.pad(x32, (0, grid_c * bc - cols, 0, grid_r * br - rows))
    x_rbcb = x32.reshape(grid_r, br, grid_c, bc)
    amax_rc = x_rbcb.abs().amax(dim=(1, 3))
    scale_rc = scale_of(amax_rc, dtype, scale_format)
    limit = FP8_MAX[dtype]
    scaled = torch.clamp(x_rbcb / scale_rc[:, None, :, None], -limit, limit)
    codes = scaled.to(dtype).view(torch.uint8)
    if not bool(torch.isfinite(scale_rc).all()):
        codes = codes.masked_fill(torch.isnan(scale_rc)[:, None, :, None], NAN_CODE)
    codes = codes.reshape(grid_r * br, grid_c * bc)[:rows, :cols].contiguous()
    return BlockScaled(codes.view(dtype), scale_rc, block)


def quantize_dual(
    x: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_format: ScaleFormat = ScaleFormat.fp32,
    t_block: tuple[int, int] = ROW_BLOCK,
) -> tuple[BlockScaled, BlockScaled]:
    """Quantise x along its rows and, from the same BF16 values, along its columns.

    x: [R, C]. t_block: (1, 128), or (128, 128) for wgrad with `WgradGranularity.blocks`.
    Returns (x in blocks 1x128: codes [R, C]; x^T in `t_block`, stored transposed: codes [C, R128]), where R128 is R rounded up to a
    multiple of 128 and the columns behind R are exact zero codes: they are the contraction axis of wgrad.
    """
    check_input(x, dtype)
    padding = num_blocks(x.shape[0], GROUP) * GROUP - x.shape[0]
    x_t = F.pad(x.detach(), (0, 0, 0, padding)).t()
    row_wise = quantize(x, ROW_BLOCK, dtype=dtype, scale_format=scale_format)
    return row_wise, quantize(x_t, t_block, dtype=dtype, scale_format=scale_format)


def quantize_weight(
    w: torch.Tensor, *, scale_format: ScaleFormat = ScaleFormat.fp32, with_transpose: bool = True, out: WeightBuffers | None = None
) -> WeightBuffers:
    """w [N, K] in 128x128 blocks, and the byte transpose of that [K, N], or None where it is not wanted.

    out: what a former call with the same shape and `with_transpose` returned, to be overwritten and returned.
    """
    codes = quantize(w, WEIGHT_BLOCK, scale_format=scale_format)
    codes_t = codes.transpose() if with_transpose else None
    if out is None:
        return codes, codes_t
    assert (out[1] is None) != with_transpose, "with_transpose is not that of the former call"
    return out[0].copy_(codes), None if codes_t is None or out[1] is None else out[1].copy_(codes_t)


def requantize_transposed(
    x: BlockScaled, *, scale_format: ScaleFormat = ScaleFormat.fp32, t_block: tuple[int, int] = ROW_BLOCK
) -> BlockScaled:
    """x^T in `t_block`, [C, R128], from the FP32 values of an FP8 x: the double rounding of `SavedActivation.fp8_requant`."""
    return quantize_dual(x.dequantize(), dtype=x.data.dtype, scale_format=scale_format, t_block=t_block)[1]


def check_input(x: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless x is a BF16 or FP32 matrix and `dtype` is a supported FP8 format."""
    if x.dim() != 2:
        raise ValueError(f"the quantiser takes a matrix, got shape {tuple(x.shape)}; flatten the leading axes first")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the quantiser reads bfloat16 or float32, got {x.dtype}")
    if dtype not in FP8_MAX:
        raise ValueError(f"target dtype is {dtype}; it must be float8_e4m3fn or float8_e5m2")
