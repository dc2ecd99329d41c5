"""The rotation of rope.py in one pass on a GPU: the same FP32 products, the same one rounding.

Enters: x [T, heads, D] with contiguous heads, BF16 tables of cosine and sine, positions. Leaves: a new contiguous tensor. A product of two
BF16 values is exact in FP32, so contraction into a fused multiply-add changes nothing: the bytes are those of the torch form.
"""

import torch
import triton
import triton.language as tl

from jetrl_megatron.fp8.block_scaled import power_of_two
from jetrl_megatron.fp8.triton_source import round_bf16


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, inverse: bool) -> torch.Tensor:
    """Rotate x [T, heads, D] by the angles of `positions` [T] int64, or back; cos, sin: [P, D / 2]; all BF16."""
    toks, heads, dim = x.shape
    assert x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous(), (x.stride(), cos.stride())
    out = x.new_empty(x.shape)
    if out.numel():
        _rope_kernel[(toks,)](
            x, out, cos, sin, positions, x.stride(0), x.stride(1), heads,
            HALF=dim // 2, SIGN=-1.0 if inverse else 1.0, HEADS=power_of_two(heads), DIM=power_of_two(dim // 2),
            SOFT=bool(triton.knobs.runtime.interpret),
        )  # fmt: skip
    return out


@triton.jit
def _rope_kernel(
    x_ptr, out_ptr, cos_ptr, sin_ptr, positions_ptr, stride_t, stride_h, heads,
    HALF: tl.constexpr, SIGN: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """One token, all heads."""
    t = tl.program_id(0).to(tl.int64)
    d, h = tl.arange(0, DIM), tl.arange(0, HEADS)
    angle = tl.load(positions_ptr + t) * HALF + d
    cos = tl.load(cos_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :] * SIGN
    mask = (h < heads)[:, None] & (d < HALF)[None, :]
    at = x_ptr + t * stride_t + h[:, None].to(tl.int64) * stride_h + d[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    to = out_ptr + (t * heads + h[:, None]) * (2 * HALF) + d[None, :]
    kind = out_ptr.dtype.element_ty
    tl.store(to, round_bf16(first * cos - second * sin, SOFT).to(kind), mask=mask)
    tl.store(to + HALF, round_bf16(second * cos + first * sin, SOFT).to(kind), mask=mask)
