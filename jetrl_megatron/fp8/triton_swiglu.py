"""SwiGLU, its gradient, and its gradient in FP8 on the GPU: the equations of swiglu.py with FP32 inside.

Enters: gate_up [T, 2F] BF16 with contiguous rows, the gate in the first F columns, and in the backward dh [T, F]. Leaves: h [T, F] and
d_gate_up [T, 2F] in BF16, or d_gate_up as the FP8 operands of the linear in front, never written in BF16.
Invariants: silu and its derivative are the device functions of triton_source.py, so that h has the bytes that the fused quantiser sees and
the FP8 operands are those of quantising the BF16 d_gate_up; offsets are 64-bit (of the tile kernel as in triton_quantize.py); an empty
matrix launches nothing.
Traffic, bytes for an element of h: 6 forward, 10 backward, 10 and the scales for the FP8 operands, 18 for the same in two passes.

Legend: T tokens, F features of h.
"""

import torch
import triton
import triton.language as tl

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import BlockScaled, num_blocks
from jetrl_megatron.fp8.quantize import GROUP
from jetrl_megatron.fp8.swiglu import check_gate_up
from jetrl_megatron.fp8.triton_cast import contiguous_rows
from jetrl_megatron.fp8.triton_quantize import GROUPED, quantize_tiles
from jetrl_megatron.fp8.triton_source import SWIGLU_GRAD, Source, d_silu, round_bf16, silu

BLOCK = 1024
"""Features of one program; one token each."""
WARPS = 4


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`swiglu.swiglu` in one pass: gate_up [T, 2F] bfloat16 -> [T, F]."""
    check_gate_up(gate_up)
    gate_up = contiguous_rows(gate_up)
    toks, features = gate_up.shape[0], gate_up.shape[1] // 2
    h = gate_up.new_empty((toks, features))
    if h.numel():
        swiglu_kernel[(toks, num_blocks(features, BLOCK))](
            gate_up, h, features, gate_up.stride(0), BLOCK=BLOCK, SOFT=_interpreted(), num_warps=WARPS
        )
    return h


def swiglu_backward(dh: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """`swiglu.swiglu_backward` in one pass: dh [T, F] and gate_up [T, 2F] bfloat16 -> d_gate_up [T, 2F]."""
    check_gate_up(gate_up, dh)
    dh, gate_up = contiguous_rows(dh), contiguous_rows(gate_up)
    toks, features = dh.shape
    out = gate_up.new_empty(gate_up.shape)
    if out.numel():
        swiglu_backward_kernel[(toks, num_blocks(features, BLOCK))](
            dh, gate_up, out, features, dh.stride(0), gate_up.stride(0), BLOCK=BLOCK, SOFT=_interpreted(), num_warps=WARPS
        )
    return out


def swiglu_backward_dual(
    dh: torch.Tensor, gate_up: torch.Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, scale_format: ScaleFormat = ScaleFormat.fp32
) -> tuple[BlockScaled, BlockScaled]:
    """`swiglu.swiglu_backward_dual` in one read of dh and gate_up; raises ValueError where F is not a multiple of 128."""
    check_gate_up(gate_up, dh)
    if dh.shape[1] % GROUP:
        raise ValueError(
            f"dh has {dh.shape[1]} features; a scale group of {GROUP} may not hold both d_gate and d_up: quantise swiglu_backward"
        )
    gate_up = contiguous_rows(gate_up)
    source = Source(SWIGLU_GRAD, gate_up, gate_up.shape[1], contiguous_rows(dh))
    row_wise, transposed = quantize_tiles(source, GROUPED, GROUPED, dtype=dtype, scale_format=scale_format)
    assert transposed is not None
    return row_wise, transposed


def _interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


@triton.jit
def swiglu_kernel(gate_up_ptr, h_ptr, features, stride, BLOCK: tl.constexpr, SOFT: tl.constexpr):
    """BLOCK features of one token."""
    t, f = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = f < features
    gate = tl.load(gate_up_ptr + t * stride + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + t * stride + features + f, mask=inside, other=0.0).to(tl.float32)
    tl.store(h_ptr + t * features + f, round_bf16(round_bf16(silu(gate, SOFT), SOFT) * up, SOFT).to(tl.bfloat16), mask=inside)


@triton.jit
def swiglu_backward_kernel(dh_ptr, gate_up_ptr, out_ptr, features, dh_stride, stride, BLOCK: tl.constexpr, SOFT: tl.constexpr):
    """BLOCK features of one token, d_gate and d_up."""
    t, f = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = f < features
    dh = tl.load(dh_ptr + t * dh_stride + f, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + t * stride + f, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + t * stride + features + f, mask=inside, other=0.0).to(tl.float32)
    to = out_ptr + t * (2 * features) + f
    tl.store(to, round_bf16(dh * up * d_silu(gate, SOFT), SOFT).to(tl.bfloat16), mask=inside)
    tl.store(to + features, round_bf16(dh * round_bf16(silu(gate, SOFT), SOFT), SOFT).to(tl.bfloat16), mask=inside)
