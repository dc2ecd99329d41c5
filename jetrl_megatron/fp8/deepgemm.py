"""The GPU backend: Triton quantisers, Triton SwiGLU and DeepGEMM's Hopper kernels, behind the interface of backend.py.

Enters and leaves: as gemm_reference.py, on CUDA tensors. Which kernel: fprop and dgrad run 1D2D (BF16 out); wgrad runs 1D1D, which adds its
FP32 sums into `out` by itself, or, where X^T comes in 128x128 blocks, 1D2D with a BF16 product that is added to `out` afterwards.
DeepGEMM is the copy that vLLM ships where vLLM is installed, so that both engines run one kernel; else the package `deep_gemm`.
Operands: K-major codes; scales of 1x128 groups column-major with a leading stride of a multiple of 4 (triton_quantize.py writes them
so; any other layout costs a copy inside DeepGEMM). Compiled shapes: N and K are compiled in, the number of tokens is free, so that a new
packing length costs no compilation. No call here synchronises with the host.
Left out: E5M2 operands, which DeepGEMM does not read.
"""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

from jetrl_megatron.fp8 import triton_fused, triton_quantize, triton_requantize, triton_swiglu
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.quantize import ROW_BLOCK, WEIGHT_BLOCK
from jetrl_megatron.fp8.triton_accumulate import accumulate

E4M3 = torch.float8_e4m3fn
GROUP_RECIPE = (1, 1, 128)
"""DeepGEMM's name for scales of 1x128 groups on both operands."""


@functools.cache
def load_deep_gemm() -> ModuleType:
    """The DeepGEMM module; raises ImportError where neither vLLM's nor the package is there."""
    if importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("vllm.third_party.deep_gemm") is not None:
        return importlib.import_module("vllm.third_party.deep_gemm")
    return importlib.import_module("deep_gemm")


class DeepGemmKernels:
    """Triton quantisers and SwiGLU, DeepGEMM GEMMs; meanings and shapes as in gemm_reference.py, quantize.py and swiglu.py."""

    def __init__(self) -> None:
        """Import DeepGEMM."""
        self._deep_gemm = load_deep_gemm()

    quantize = staticmethod(triton_quantize.quantize)
    quantize_dual = staticmethod(triton_quantize.quantize_dual)
    requantize_transposed = staticmethod(triton_requantize.requantize_transposed)
    quantize_weight = staticmethod(triton_quantize.quantize_weight)
    swiglu = staticmethod(triton_swiglu.swiglu)
    swiglu_quantize = staticmethod(triton_fused.swiglu_quantize)
    swiglu_backward = staticmethod(triton_swiglu.swiglu_backward)
    swiglu_backward_dual = staticmethod(triton_swiglu.swiglu_backward_dual)

    def fprop(self, x: BlockScaled, w: BlockScaled) -> torch.Tensor:
        """Y = X W^T, [T, N] bfloat16."""
        return self._block_gemm(x, w, compiled_dims="nk")

    def dgrad(self, dy: BlockScaled, w_t: BlockScaled) -> torch.Tensor:
        """dX = dY W, [T, K] bfloat16."""
        return self._block_gemm(dy, w_t, compiled_dims="nk")

    def wgrad(self, dy_t: BlockScaled, x_t: BlockScaled, out: torch.Tensor | None = None) -> torch.Tensor:
        """dW = dY^T X, added into `out` [N, K] float32 in place."""
        if x_t.block == WEIGHT_BLOCK:
            product = self._block_gemm(dy_t, x_t, compiled_dims="mn")
            return product.to(torch.float32) if out is None else accumulate(out, product)
        _check_operands(dy_t, x_t, ROW_BLOCK)
        if out is None:
            out = torch.zeros((dy_t.shape[0], x_t.shape[0]), dtype=torch.float32, device=dy_t.data.device)
        if dy_t.shape[1]:
            self._deep_gemm.fp8_gemm_nt((dy_t.data, dy_t.scale), (x_t.data, x_t.scale), out, c=out, recipe=GROUP_RECIPE, compiled_dims="mn")
        return out

    def _block_gemm(self, a: BlockScaled, b: BlockScaled, compiled_dims: str) -> torch.Tensor:
        """A B^T in BF16, b in 128x128 blocks."""
        _check_operands(a, b, WEIGHT_BLOCK)
        out = a.data.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)
        if a.shape[1] == 0:
            return out.zero_()
        if out.numel():
            self._deep_gemm.fp8_gemm_nt((a.data, a.scale), (b.data, b.scale), out, compiled_dims=compiled_dims)
        return out


def _check_operands(a: BlockScaled, b: BlockScaled, b_block: tuple[int, int]) -> None:
    """Raise ValueError on a format, block or length that the kernel would misread."""
    if a.data.dtype is not E4M3 or b.data.dtype is not E4M3:
        raise ValueError(f"operands are {a.data.dtype} and {b.data.dtype}; DeepGEMM reads float8_e4m3fn only: grad_format=e4m3")
    if a.block != ROW_BLOCK or b.block != b_block:
        raise ValueError(f"operands are in blocks {a.block} and {b.block}; this GEMM reads {ROW_BLOCK} and {b_block}")
    if a.shape[1] != b.shape[1] or a.shape[1] % 128:
        raise ValueError(f"contraction lengths are {a.shape[1]} and {b.shape[1]}; DeepGEMM needs equal multiples of 128")
