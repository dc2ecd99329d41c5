"""The three FP8 GEMMs of a linear layer, and the BF16 one, defined in torch so that they run and are exact on a CPU.

Enters: `BlockScaled` operands. Leaves: BF16 outputs (fprop, dgrad) or FP32 sums (wgrad).
Equation: out[m, n] = sum over k-blocks, in order, of fp32(sum in float64 of code_a * code_b) * fp32(scale_a * scale_b), where the product
and the sum over blocks are separate, correctly rounded FP32 operations.
Invariant: 128 products of E4M3 codes need 43 bits, so the float64 sum of a block is exact in any order; hence an output element depends on
its own row of A and B alone: not on M, not on N, not on how N is cut over ranks. (E5M2 with E4M3 can need 57 bits, only where a
block spans the whole range of both formats.)
Left out: the GPU's tensor cores, whose accumulation inside a block rounds differently.

Legend: T tokens, K input features, N output features; M rows and J contraction length of any GEMM.
"""

import functools

import torch

from jetrl_megatron.fp8.block_scaled import BlockScaled, num_blocks
from jetrl_megatron.fp8.quantize import GROUP, ROW_BLOCK, WEIGHT_BLOCK


def fprop(x: BlockScaled, w: BlockScaled) -> torch.Tensor:
    """Y = X W^T. x: [T, K] in blocks 1x128; w: [N, K] in blocks 128x128; returns [T, N] bfloat16."""
    return _block_product(x, w, WEIGHT_BLOCK).to(torch.bfloat16)


def dgrad(dy: BlockScaled, w_t: BlockScaled) -> torch.Tensor:
    """dX = dY W. dy: [T, N] in blocks 1x128; w_t: [K, N] in blocks 128x128, the transposed bytes of W; returns [T, K] bfloat16."""
    return _block_product(dy, w_t, WEIGHT_BLOCK).to(torch.bfloat16)


def wgrad(dy_t: BlockScaled, x_t: BlockScaled, out: torch.Tensor | None = None) -> torch.Tensor:
    """dW = dY^T X, added to `out` in place.

    dy_t: [N, T] in blocks 1x128 along T. x_t: [K, T] in blocks 1x128, or 128x128: then the product is rounded to BF16 before it is added,
    as the GPU kernel for such operands does. out: [N, K] float32, None starts from zero. Returns `out`.
    """
    total = _block_product(dy_t, x_t, x_t.block)
    if x_t.block == WEIGHT_BLOCK:
        total = total.to(torch.bfloat16).to(torch.float32)
    if out is None:
        return total
    if out.dtype is not torch.float32 or out.shape != total.shape:
        raise ValueError(f"wgrad accumulates into float32 {tuple(total.shape)}, got {out.dtype} {tuple(out.shape)}")
    return out.add_(total)


def matmul_bf16_reference(a: torch.Tensor, b_t: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A B^T of two BF16 matrices in float64, rounded to FP32 and then to `out_dtype`; independent of M and N like the FP8 GEMMs.

    a: [M, J] and b_t: [N, J], bfloat16 or float32. Products of BF16 numbers have 16 bits, so a float64 sum of them is exact unless their
    magnitudes spread over more than 2^(37 - log2 J); then it is right to 2^-53, and the FP32 rounding behind it hides the order of the
    sum but for about one element in 2^28 of those.
    """
    if a.dim() != 2 or b_t.dim() != 2 or a.shape[1] != b_t.shape[1]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} with the transpose of {tuple(b_t.shape)}; the last axes must be equal matrices")
    return (a.to(torch.float64) @ b_t.to(torch.float64).t()).to(torch.float32).to(out_dtype)


@functools.cache
def _decoded_values(dtype: torch.dtype) -> torch.Tensor:
    """The 256 values of an FP8 format in float64, by code."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64)


def _decode(codes: torch.Tensor) -> torch.Tensor:
    """FP8 codes as float64 numbers, by table: on a CPU four times faster than torch's conversion."""
    index = codes.contiguous().view(torch.uint8).flatten().to(torch.int32)
    return _decoded_values(codes.dtype).to(codes.device).index_select(0, index).view(codes.shape)


def _block_product(a: BlockScaled, b: BlockScaled, b_block: tuple[int, int]) -> torch.Tensor:
    """A B^T in FP32 by the module's equation; a [M, J] in 1x128, b [N, J] in `b_block`."""
    if a.block != ROW_BLOCK or b.block != b_block or b_block not in (ROW_BLOCK, WEIGHT_BLOCK):
        raise ValueError(f"operands are in blocks {a.block} and {b.block}; this GEMM reads {ROW_BLOCK} and {b_block}")
    (m, j), (n, j_b) = a.shape, b.shape
    if j != j_b:
        raise ValueError(f"contraction lengths differ: {a.shape} against {b.shape}; is an operand in the other orientation?")
    out = torch.zeros(m, n, dtype=torch.float32, device=a.data.device)
    if out.numel() == 0:
        return out
    a_codes, b_codes = _decode(a.data), _decode(b.data)
    for k in range(num_blocks(j, GROUP)):
        cut = slice(k * GROUP, min(j, (k + 1) * GROUP))
        part = (a_codes[:, cut] @ b_codes[:, cut].t()).to(torch.float32)
        b_scale = b.scale[:, k].repeat_interleave(b_block[0])[:n]
        part *= a.scale[:, k, None] * b_scale[None, :]
        out += part
    return out
