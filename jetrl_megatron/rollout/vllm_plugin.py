"""The actor's operators inside vLLM, through vLLM's plugin group `vllm.general_plugins`: every process of an engine calls `register` first.

Enters: an engine that this project started (`SWITCH` is in its environment; in any other nothing happens). Leaves: RMSNorm, alone and
behind a residual sum, as the provider `jetrl` of vLLM's IR operators, which is the actor's own function; on a CPU also the block FP8
linear, which is the actor's reference: activations quantised in 1x128 groups, the GEMM exact within a block, independent of the batch.
Besides, the weight-transfer engine `IN_PLACE` (vllm_transfer.py), which a server uses where it is named.
Why: vLLM's norm sums a row in an order that depends on the batch, and its CPU backend leaves activations in BF16 (and needs AMX).
Invariant: engine and actor call one function. Left out: everything else that vLLM computes; `jetrl flow` compares it.
"""

import os
from typing import Any

import torch
from torch import Tensor

SWITCH = "JETRL_OPERATORS"
"""Environment variable that the launcher of an engine sets to 1."""
PROVIDER = "jetrl"
NORMS = ("rms_norm", "fused_add_rms_norm")
IN_PLACE = "jetrl_nccl"
"""vLLM's name of the weight-transfer engine of rollout.vllm.load=in_place."""


def register() -> None:
    """Register the operators; vLLM may call it again in the same process."""
    if os.environ.get(SWITCH) != "1":
        return
    from jetrl_megatron.rollout.compat import register_transfer, vllm_version

    vllm_version()
    register_transfer(IN_PLACE, "jetrl_megatron.rollout.vllm_transfer", "InPlaceNcclEngine")
    _register_norms()
    if torch.cuda.is_available():
        # Registers the operator. A graph that vLLM takes from its cache names it and calls none of the functions below.
        import jetrl_megatron.fp8.triton_norm  # noqa: F401
    else:
        _register_cpu_linear()


def registered() -> bool:
    """Tell whether this worker process of an engine runs the operators that the launcher asked for."""
    from vllm import ir

    from jetrl_megatron.rollout.compat import cpu_block_kernels

    norms = all(getattr(ir.ops, name).get_priority()[:1] == [PROVIDER] for name in NORMS)
    return norms and (torch.cuda.is_available() or cpu_block_kernels()[0].__module__ == __name__)


def _register_norms() -> None:
    from vllm import ir

    if PROVIDER not in ir.ops.rms_norm.impls:
        ir.ops.rms_norm.register_impl(PROVIDER)(_rms_norm)
        ir.ops.fused_add_rms_norm.register_impl(PROVIDER)(_fused_add_rms_norm)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """The signature is vLLM's; raises ValueError on what no dense Llama, Qwen2 or Qwen3 asks for."""
    if weight is None or variance_size is not None or x.dtype is not torch.bfloat16:
        raise ValueError(f"the actor's norm takes BF16 rows and a weight over all of them; got {x.dtype}, {variance_size=}, {weight=}")
    if x.is_cuda:
        y: Tensor = torch.ops.jetrl.rms_norm(x, weight, epsilon)[0]  # the operator, so that a compiled graph holds it whole
        return y
    from jetrl_megatron.actor.norm import rms_norm

    return rms_norm(x, weight, epsilon)


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The sum is rounded to BF16 before it is normalised, as the actor's residual stream is."""
    residual = x + x_residual
    return _rms_norm(residual, weight, epsilon, variance_size), residual


def _register_cpu_linear() -> None:
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel

    from jetrl_megatron.config import ScaleFormat
    from jetrl_megatron.fp8 import BlockScaled
    from jetrl_megatron.fp8.gemm_reference import fprop
    from jetrl_megatron.fp8.quantize import ROW_BLOCK, WEIGHT_BLOCK, quantize
    from jetrl_megatron.rollout.compat import cpu_block_kernels

    rounded = os.environ.get("VLLM_USE_DEEP_GEMM_E8M0") == "1"  # the switch that a GPU's engine obeys
    scales = ScaleFormat.ue8m0 if rounded else ScaleFormat.fp32

    class ReferenceBlockLinear(Fp8BlockScaledMMLinearKernel):  # type: ignore[misc]
        """Y = Q(X) W^T with the actor's quantiser and reference GEMM."""

        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            shape = config.weight_quant_key.scale.group_shape
            if (shape.row, shape.col) != WEIGHT_BLOCK or config.out_dtype is not torch.bfloat16:
                # To decline would hand the layer to a kernel with other numerics.
                raise ValueError(f"weights are in blocks {shape} and outputs {config.out_dtype}; need {WEIGHT_BLOCK} and torch.bfloat16")
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """Weights stay as they were loaded."""

        def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
            params = self._get_layer_params(layer)
            weight = BlockScaled(params.weight.detach(), params.block_scale.detach(), WEIGHT_BLOCK)
            y = fprop(quantize(x.reshape(-1, x.shape[-1]), ROW_BLOCK, scale_format=scales), weight)
            return (y if bias is None else y + bias).view(*x.shape[:-1], y.shape[-1])

        def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
            raise AssertionError("apply_weights does everything")

    kernels = cpu_block_kernels()
    if kernels[0].__module__ != __name__:
        kernels.insert(0, ReferenceBlockLinear)
