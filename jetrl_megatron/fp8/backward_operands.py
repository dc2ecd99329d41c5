"""What the backward of an FP8 linear multiplies: dY in the two forms that dgrad and wgrad read, and wgrad's X from what the forward kept.

Enters: the BF16 gradient; codes or BF16 values that the forward saved, this rank's part of X. Leaves: operands of the GEMMs, X made whole
over the tensor-parallel ranks beside what runs before it is waited for.
Left out: SwiGLU's gradient and the order of the backward (linear.py).

Legend: T tokens, K input features, N output features.
"""

from collections.abc import Callable
from typing import Any

import torch

from jetrl_megatron.config import LinearPrecision, SavedActivation
from jetrl_megatron.fp8.backend import Kernels
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.exchange import InputExchange
from jetrl_megatron.fp8.precision import GemmPrecision
from jetrl_megatron.fp8.quantize import ROW_BLOCK


def quantize_grad(
    dy_TN: torch.Tensor, row_order: torch.Tensor | None, precision: GemmPrecision, kernels: Kernels, wanted: tuple[bool, bool]
) -> tuple[BlockScaled | None, BlockScaled | None]:
    """(dY along N in the cache's order for dgrad, dY^T along T in the parameter's order for wgrad), each None where not wanted."""
    dtype, scale_format = precision.grad_dtype, precision.scale_format
    for_dgrad, for_wgrad = wanted
    if not for_dgrad and not for_wgrad:
        return None, None
    dy = dy_t = None
    if for_wgrad:
        dy, dy_t = kernels.quantize_dual(dy_TN, dtype=dtype, scale_format=scale_format)
    if for_dgrad and (dy is None or row_order is not None):
        rows = dy_TN if row_order is None else dy_TN.index_select(1, row_order)
        dy = kernels.quantize(rows, ROW_BLOCK, dtype=dtype, scale_format=scale_format)
    return dy, dy_t


def start_x(
    kept: tuple[torch.Tensor, ...],
    block: tuple[int, int] | None,
    precision: GemmPrecision,
    kernels: Kernels,
    exchange: InputExchange,
    num_toks: int,
) -> Callable[[], Any]:
    """Start to make wgrad's X whole from what the forward kept; call what returns to wait.

    kept, block: this rank's part as `precision.saved_activation` has it, codes with scales and their block, or BF16 and None. num_toks: T.
    It gives X^T [K, T128] in FP8, or, where wgrad is BF16, X [T, K] in BF16: FP8 copies are gathered, then dequantised.
    """
    saved, scale_format, t_block = precision.saved_activation, precision.scale_format, precision.x_t_block
    fp8 = precision.wgrad is LinearPrecision.fp8
    if saved is SavedActivation.bf16:
        if not fp8:
            return lambda: kept[0]
        return exchange.start_transposed(
            kernels.quantize_dual(kept[0], dtype=torch.float8_e4m3fn, scale_format=scale_format, t_block=t_block)[1]
        )
    assert block is not None, precision
    codes = BlockScaled(kept[0], kept[1], block)
    if saved is SavedActivation.fp8_dual:
        columns = exchange.start_transposed(codes)
        return columns if fp8 else lambda: columns().dequantize(torch.bfloat16)[:, :num_toks].t()
    if fp8:
        return exchange.start_transposed(kernels.requantize_transposed(codes, scale_format=scale_format, t_block=t_block))
    rows = exchange.start_rows(codes)
    return lambda: rows().dequantize(torch.bfloat16)
