"""Block-scaled FP8 for both engines: one quantiser, three GEMMs, the autograd linears, the weight cache. A leaf: torch only.

Files, in the order the data flows:
block_scaled.py (codes + scales as one value) <- quantize.py (the definition of the bytes) <- swiglu.py (SwiGLU and its gradient)
<- gemm_reference.py (the definition of the GEMMs) <- precision.py (switches of one side) <- backend.py (who runs it, which kernel a
shape gets) <- weight_cache.py (once per optimizer step) <- main_grad.py (where a weight's gradient goes) <- words.py (copies as
words) <- gather.py (FP8 matrices cut over ranks) <- exchange.py (what ranks exchange around a linear) <- quantized_input.py (X in FP8
alone) <- linear_bf16.py (BF16 autograd and GEMMs) <- backward_operands.py (what an FP8 backward multiplies) <-
linear.py (FP8 autograd).
triton_*.py and deepgemm.py are the GPU backend, imported only when it is resolved; triton_norm.py (the norm of both engines) and the
rounding in triton_source.py also by every actor on CUDA.
"""

from jetrl_megatron.fp8.backend import kernel_for, resolve_backend
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.linear import fp8_linear, fp8_linear_swiglu
from jetrl_megatron.fp8.linear_bf16 import bf16_linear, bf16_linear_swiglu
from jetrl_megatron.fp8.main_grad import deliver_weight_gradient
from jetrl_megatron.fp8.precision import GemmPrecision
from jetrl_megatron.fp8.quantized_input import InputFormat, QuantizedInput, input_format
from jetrl_megatron.fp8.weight_cache import QuantizedWeight, WeightCache

__all__ = [
    "BlockScaled",
    "GemmPrecision",
    "InputFormat",
    "QuantizedInput",
    "QuantizedWeight",
    "WeightCache",
    "bf16_linear",
    "bf16_linear_swiglu",
    "deliver_weight_gradient",
    "fp8_linear",
    "fp8_linear_swiglu",
    "input_format",
    "kernel_for",
    "resolve_backend",
]
