"""RMSNorm of the residual stream and of q and k: high precision inside, one rounding to BF16.

    y = bf16(x / sqrt(mean(x^2) + eps) * w)

Enters: x [..., H] BF16. Leaves: y [..., H] BF16. Invariant: a row's result depends on that row alone; vLLM runs this very function
(rollout/vllm_plugin.py). Hugging Face's models round before the weight too; with weights far from 1 that moves a fifth of the outputs by
one BF16 step (`jetrl flow` shows it).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from jetrl_megatron.actor.device import accumulate_dtype


class RMSNorm(Module):
    """RMSNorm that Megatron-core builds from a layer spec; works under sequence parallelism.

    Args:
        config: Megatron's TransformerConfig; gives `params_dtype` and `sequence_parallel`.
        hidden_size: H, the width that is normalised.
        eps: added to the mean square, unitless.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """Allocate the weight [H] in the parameter dtype, ones."""
        super().__init__()
        self.eps = eps
        self.weight = Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=config.flow_device))
        # Megatron adds up this gradient over TP ranks when each of them saw only its own tokens (or, for q and k, its own heads).
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis: [..., H] -> [..., H], same dtype."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [..., H] BF16 by weight [H] BF16, with its gradient; on CUDA one Triton kernel each, on a CPU in float64."""
    if x.is_cuda:
        y: Tensor = _TritonNorm.apply(x, weight, eps)
        return y
    wide = x.to(accumulate_dtype(x.device))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(wide.dtype)).to(x.dtype)


class _TritonNorm(torch.autograd.Function):
    """The kernels of triton_norm.py; the backward reads the saved rstd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from jetrl_megatron.fp8.triton_norm import rms_norm as kernel

        y, rstd = kernel(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        from jetrl_megatron.fp8.triton_norm import rms_norm_backward

        x, weight, rstd = ctx.saved_tensors
        dx, dw = rms_norm_backward(grads[0], x, weight, rstd, want_dw=ctx.needs_input_grad[1])
        return dx, dw, None
