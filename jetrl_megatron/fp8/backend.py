"""Which code runs the quantisers, SwiGLU and the GEMMs: resolved once, then never changed.

Enters: `Backend` of the recipe and a device. Leaves: a resolved `Backend`, its `Kernels`, and the name of the kernel that a GEMM shape
runs, which the precision-flow check prints and compares.
Invariant: a backend that was asked for and cannot run raises with the reason; nothing falls back.
Left out: the kernels themselves (quantize.py, swiglu.py and gemm_reference.py; deepgemm.py and triton_*.py).
"""

import functools
import importlib.util
from typing import Literal, Protocol

import torch

from jetrl_megatron.config import Backend, GradFormat, LinearPrecision, ScaleFormat, WgradGranularity
from jetrl_megatron.fp8 import gemm_reference
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.precision import GemmPrecision
from jetrl_megatron.fp8.quantize import GROUP, ROW_BLOCK, WeightBuffers, quantize, quantize_dual, quantize_weight, requantize_transposed
from jetrl_megatron.fp8.swiglu import swiglu, swiglu_backward, swiglu_backward_dual, swiglu_quantize

Gemm = Literal["fprop", "dgrad", "wgrad"]


class Kernels(Protocol):
    """What a backend offers; signatures and meaning are those of quantize.py, swiglu.py and gemm_reference.py."""

    def quantize(self, x: torch.Tensor, block: tuple[int, int], *, dtype: torch.dtype, scale_format: ScaleFormat) -> BlockScaled:
        """See `quantize.quantize`."""

    def quantize_dual(
        self, x: torch.Tensor, *, dtype: torch.dtype, scale_format: ScaleFormat, t_block: tuple[int, int] = ROW_BLOCK
    ) -> tuple[BlockScaled, BlockScaled]:
        """See `quantize.quantize_dual`."""

    def requantize_transposed(self, x: BlockScaled, *, scale_format: ScaleFormat, t_block: tuple[int, int] = ROW_BLOCK) -> BlockScaled:
        """See `quantize.requantize_transposed`."""

    def quantize_weight(
        self, w: torch.Tensor, *, scale_format: ScaleFormat, with_transpose: bool, out: WeightBuffers | None = None
    ) -> WeightBuffers:
        """See `quantize.quantize_weight`."""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `swiglu.swiglu`."""

    def swiglu_quantize(
        self, gate_up: torch.Tensor, *, scale_format: ScaleFormat, t_block: tuple[int, int] | None
    ) -> tuple[BlockScaled, BlockScaled | None]:
        """See `swiglu.swiglu_quantize`."""

    def swiglu_backward(self, dh: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        """See `swiglu.swiglu_backward`."""

    def swiglu_backward_dual(
        self, dh: torch.Tensor, gate_up: torch.Tensor, *, dtype: torch.dtype, scale_format: ScaleFormat
    ) -> tuple[BlockScaled, BlockScaled]:
        """See `swiglu.swiglu_backward_dual`; called only where F is a multiple of 128."""

    def fprop(self, x: BlockScaled, w: BlockScaled) -> torch.Tensor:
        """See `gemm_reference.fprop`."""

    def dgrad(self, dy: BlockScaled, w_t: BlockScaled) -> torch.Tensor:
        """See `gemm_reference.dgrad`."""

    def wgrad(self, dy_t: BlockScaled, x_t: BlockScaled, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `gemm_reference.wgrad`."""


class ReferenceKernels:
    """The torch definition, on any device."""

    quantize = staticmethod(quantize)
    quantize_dual = staticmethod(quantize_dual)
    requantize_transposed = staticmethod(requantize_transposed)
    quantize_weight = staticmethod(quantize_weight)
    swiglu = staticmethod(swiglu)
    swiglu_quantize = staticmethod(swiglu_quantize)
    swiglu_backward = staticmethod(swiglu_backward)
    swiglu_backward_dual = staticmethod(swiglu_backward_dual)
    fprop = staticmethod(gemm_reference.fprop)
    dgrad = staticmethod(gemm_reference.dgrad)
    wgrad = staticmethod(gemm_reference.wgrad)


def resolve_backend(backend: Backend, device: torch.device | str) -> Backend:
    """The backend that will run on `device`: `auto` is `deepgemm` on CUDA and `reference` elsewhere.

    Raises ValueError, with the reason, where `deepgemm` is asked for or implied and cannot run.
    """
    device = torch.device(device)
    if backend is Backend.auto:
        backend = Backend.deepgemm if device.type == "cuda" else Backend.reference
    if backend is Backend.deepgemm:
        reason = deepgemm_obstacle(device)
        if reason:
            raise ValueError(f"precision.backend deepgemm cannot run on {device}: {reason}; backend=reference runs anywhere, slowly")
    return backend


def deepgemm_obstacle(device: torch.device) -> str:
    """Why DeepGEMM cannot run on `device`; empty when nothing stands against it."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 9:
        return f"its block-scaled FP8 kernels here are for compute capability 9.x (Hopper), this GPU has {capability[0]}.{capability[1]}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if importlib.util.find_spec("vllm") is None and importlib.util.find_spec("deep_gemm") is None:
        return "neither vllm (which ships it) nor the package deep_gemm is installed"
    return ""


@functools.cache
def kernels_of(backend: Backend) -> Kernels:
    """The kernels of a resolved backend; raises ValueError on `auto`, which has to be resolved first."""
    if backend is Backend.reference:
        return ReferenceKernels()
    if backend is Backend.deepgemm:
        from jetrl_megatron.fp8.deepgemm import DeepGemmKernels

        return DeepGemmKernels()
    raise ValueError("backend is auto; call resolve_backend(backend, device) once and pass its result")


def kernel_for(gemm: Gemm, shape: tuple[int, int, int], precision: GemmPrecision, backend: Backend) -> str:
    """The name of the kernel that a GEMM runs; equal names mean equal arithmetic.

    gemm: which of the three. shape: (T, N, K) of the linear layer. precision: the side's switches. backend: resolved.
    """
    which = {"fprop": precision.linear, "dgrad": precision.dgrad, "wgrad": precision.wgrad}
    if gemm not in which:
        raise ValueError(f"gemm is {gemm!r}; it must be one of {sorted(which)}")
    if which[gemm] is LinearPrecision.bf16:
        return "reference.bf16_f64acc" if backend is Backend.reference else "torch.mm.bf16"
    kind = "1d2d.bf16"
    if gemm == "wgrad":
        kind = "1d1d.fp32" if precision.wgrad_granularity is WgradGranularity.groups else "1d2d.bf16_then_fp32_add"
    if backend is Backend.reference:
        return f"reference.block_fp8.{kind}"
    if backend is Backend.deepgemm:
        _, n, k = shape
        if gemm != "fprop" and precision.grad_format is GradFormat.e5m2:
            raise ValueError("precision.grad_format e5m2: DeepGEMM reads E4M3 operands only; use grad_format=e4m3, or backend=reference")
        if n % GROUP or k % GROUP:
            raise ValueError(f"linear N={n}, K={k}: DeepGEMM needs multiples of {GROUP}; list the layer in precision.bf16_layers")
        return f"deep_gemm.fp8_gemm_nt.{kind}"
    raise ValueError("backend is auto; call resolve_backend(backend, device) once and pass its result")
