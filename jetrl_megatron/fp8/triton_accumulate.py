"""main_grad += a BF16 product, in one pass at memory bandwidth.

Enters: FP32 sums and a BF16 addend of the same shape, both contiguous. Leaves: the sums, in place: FP32(sum + FP32(addend)), one rounding.
torch's own mixed-dtype add gives the same bits at about half the bandwidth.
"""

import torch
import triton
import triton.language as tl

from jetrl_megatron.fp8.block_scaled import num_blocks

BLOCK = 2048


def accumulate(out: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
    """Add `addend` (bfloat16) to `out` (float32) in place and return it; same shape, both contiguous."""
    assert out.is_contiguous() and addend.is_contiguous() and out.shape == addend.shape, (out.shape, addend.shape)
    if out.numel():
        _accumulate_kernel[(num_blocks(out.numel(), BLOCK),)](
            out, addend, out.numel(), EVEN=out.numel() % BLOCK == 0, BLOCK=BLOCK, num_warps=8
        )
    return out


@triton.jit
def _accumulate_kernel(out_ptr, addend_ptr, size, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """One block of elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else i < size
    total = tl.load(out_ptr + i, mask=mask) + tl.load(addend_ptr + i, mask=mask).to(tl.float32)
    tl.store(out_ptr + i, total, mask=mask)
