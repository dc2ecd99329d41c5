"""RMSNorm of the residual stream and of q and k: high precision inside, one rounding to BF16.

    y = bf16(x / sqrt(mean(x^2) + eps) * w)

Enters: x [..., H] BF16. Leaves: y [..., H] BF16, or, where a linear alone reads it and wants it so, the operands of that linear, y never
written in BF16. Invariant: a row's result depends on that row alone; vLLM runs this very function
(rollout/vllm_plugin.py). Hugging Face's models round before the weight too; with weights far from 1 that moves a fifth of the outputs by
one BF16 step (`jetrl flow` shows it).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from jetrl_megatron.actor.device import accumulate_dtype
from jetrl_megatron.config import Backend
from jetrl_megatron.fp8 import InputFormat, QuantizedInput
from jetrl_megatron.fp8.quantized_input import Operands, stand_in

FormatOf = Callable[[tuple[int, int]], InputFormat | None]
"""`FlowLinear.input_format`."""


class RMSNorm(Module):
    """RMSNorm that Megatron-core builds from a layer spec; works under sequence parallelism.

    Args:
        config: Megatron's TransformerConfig; gives `params_dtype` and `sequence_parallel`.
        hidden_size: H, the width that is normalised.
        eps: added to the mean square, unitless.

    Attribute set after construction by `FlowSides` where one linear reads what leaves: `format_of`, that linear's `input_format`.
    """

    format_of: FormatOf | None = None

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """Allocate the weight [H] in the parameter dtype, ones."""
        super().__init__()
        self.eps = eps
        self.weight = Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=config.flow_device))
        # Megatron adds up this gradient over TP ranks when each of them saw only its own tokens (or, for q and k, its own heads).
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor | QuantizedInput:
        """Normalise the last axis: [..., H] -> [..., H], same dtype, or [T, H] quantised where `format_of` gives a format for it."""
        if self.format_of is not None:
            rows = x.flatten(0, -2)
            form = self.format_of((rows.shape[0], rows.shape[1]))
            if form is not None:
                return rms_norm_quantized(rows, self.weight, self.eps, form)
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x [..., H] BF16 by weight [H] BF16, with its gradient; on CUDA one Triton kernel each, on a CPU in float64."""
    if x.is_cuda:
        y: Tensor = _TritonNorm.apply(x, weight, eps)
        return y
    wide = x.to(accumulate_dtype(x.device))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight.to(wide.dtype)).to(x.dtype)


def rms_norm_quantized(x_TH: Tensor, weight: Tensor, eps: float, form: InputFormat) -> QuantizedInput:
    """Return `rms_norm` of x [T, H] as the input of a linear, with its gradient.

    form: that linear's `input_format`; the quantisers of its backend run, those of `deepgemm` without a BF16 copy in memory.
    """
    if form.backend is Backend.deepgemm:
        return _triton_quantized(x_TH, weight, eps, form)
    return QuantizedInput.of(rms_norm(x_TH, weight, eps), form)


def _triton_quantized(x_TH: Tensor, weight: Tensor, eps: float, form: InputFormat) -> QuantizedInput:
    graph, operands = _QuantizedNorm.apply(x_TH, weight, eps, form)
    return QuantizedInput(operands=operands, graph_TK=graph)


class _QuantizedNorm(torch.autograd.Function):
    """The kernels of triton_fused.py and triton_norm.py."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight: Tensor, eps: float, form: InputFormat) -> tuple[Tensor, Operands]:
        from jetrl_megatron.fp8.triton_fused import rms_norm_quantize

        rows, transposed, rstd = rms_norm_quantize(x_TH, weight, eps, scale_format=form.scale_format, t_block=form.t_block)
        ctx.save_for_backward(x_TH, weight, rstd)
        return stand_in(rows.shape, x_TH.device), (rows, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        return *_norm_gradients(ctx, grads[0]), None, None


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
        return *_norm_gradients(ctx, grads[0]), None


def _norm_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    from jetrl_megatron.fp8.triton_norm import rms_norm_backward

    x, weight, rstd = ctx.saved_tensors
    return rms_norm_backward(dy, x, weight, rstd, want_dw=ctx.needs_input_grad[1])
