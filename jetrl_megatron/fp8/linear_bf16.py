"""The BF16 autograd linear, Y = X W^T, and the BF16 GEMMs that an FP8 linear with a BF16 dgrad or wgrad runs too.

Enters: BF16 activations and the BF16 parameter. Leaves: BF16 (or FP32) outputs; the weight gradient goes straight into `weight.main_grad`
(FP32) where that attribute exists, as Megatron's fused gradient accumulation does, else it is returned in the weight's dtype.
X that tensor-parallel ranks share (`exchange`, see exchange.py): x is what this rank holds. X is gathered in BF16 for the forward; only the
rank's part is kept, and gathered again in the backward beside dgrad. dX is added up over the ranks beside wgrad.
Invariants: on a CPU the float64 reference runs, whose rows do not depend on T or N, on CUDA torch's GEMM; T = 0 works.
Left out: bias, FP8 (linear.py), which linears share X (actor/linears.py).

Legend: T tokens, K input features, N output features; F = N / 2 features behind SwiGLU.
"""

from typing import Any

import torch

from jetrl_megatron.config import Backend
from jetrl_megatron.fp8.backend import Kernels, kernels_of
from jetrl_megatron.fp8.exchange import LOCAL, InputExchange
from jetrl_megatron.fp8.gemm_reference import matmul_bf16_reference
from jetrl_megatron.fp8.main_grad import deliver_weight_gradient


def bf16_linear(
    x_TK: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, exchange: InputExchange = LOCAL
) -> torch.Tensor:
    """Y = X W^T in BF16.

    x_TK: [T, K] bfloat16. weight: [N, K] bfloat16. out_dtype: bfloat16, or float32 for the logits of an lm_head.
    exchange: how tensor-parallel ranks share X; x_TK is then what this rank holds, and T and K are the whole's.
    Returns [T, N]. The weight gradient follows the module's convention. Raises ValueError on shapes or dtypes that do not fit.
    """
    exchange.check(x_TK, weight)
    return _Bf16Linear.apply(x_TK, weight, out_dtype, None, exchange, False)


def bf16_linear_swiglu(
    x_TK: torch.Tensor, weight: torch.Tensor, backend: Backend, exchange: InputExchange = LOCAL, *, recompute: bool = False
) -> torch.Tensor:
    """silu(gate) * up with [gate | up] = X W^T, the linear as `bf16_linear`, SwiGLU by `backend` (resolved).

    x_TK: [T, K] bfloat16. weight: [2F, K] bfloat16, the gate's rows first. exchange: as in `bf16_linear`. recompute: [gate | up] is not
    kept, the backward makes it again from X. Returns [T, F] bfloat16.
    Raises ValueError on shapes or dtypes that do not fit.
    """
    exchange.check(x_TK, weight)
    kernels = kernels_of(backend)
    if torch.is_grad_enabled() and (x_TK.requires_grad or weight.requires_grad):
        return _Bf16Linear.apply(x_TK, weight, torch.bfloat16, kernels, exchange, recompute)
    return kernels.swiglu(mm(exchange.whole(x_TK), weight, torch.bfloat16))


class _Bf16Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TK: torch.Tensor,
        weight: torch.Tensor,
        out_dtype: torch.dtype,
        swiglu_kernels: Kernels | None,
        exchange: InputExchange,
        recompute: bool,
    ) -> torch.Tensor:
        y_TN = mm(exchange.whole(x_TK), weight, out_dtype)
        ctx.weight_ref, ctx.swiglu_kernels, ctx.exchange, ctx.recompute = weight, swiglu_kernels, exchange, recompute
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        kept = None if swiglu_kernels is None or recompute else y_TN
        ctx.save_for_backward(x_TK if needs_dw or recompute else None, weight if needs_dx or recompute else None, kept)
        return y_TN if swiglu_kernels is None else swiglu_kernels.swiglu(y_TN)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TK, weight, gate_up = ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        # First: the gather runs beside everything up to wgrad, or up to the GEMM that makes [gate | up] again.
        whole_x = ctx.exchange.start_whole(x_TK) if needs_dw or ctx.recompute else None
        dy_TN = grads[0].to(torch.bfloat16)
        if ctx.swiglu_kernels is not None:
            if ctx.recompute:
                assert whole_x is not None
                gate_up = mm(whole_x(), weight, torch.bfloat16)
            dy_TN = ctx.swiglu_kernels.swiglu_backward(dy_TN, gate_up)
            gate_up = None  # where it was made again, it is free before the GEMMs
        dx_sum = ctx.exchange.start_sum(mm(dy_TN, weight.t(), torch.bfloat16)) if needs_dx else None
        dw = None
        if needs_dw:
            assert whole_x is not None
            x_whole = whole_x()
            dw = deliver_weight_gradient(ctx.weight_ref, lambda out: wgrad_bf16(dy_TN, x_whole, out))
        return None if dx_sum is None else dx_sum(), dw, None, None, None, None


def mm(a: torch.Tensor, b_t: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """A B^T of BF16 matrices: the reference on a CPU, torch's GEMM (FP32 accumulation) on CUDA.

    a: [M, C] bfloat16. b_t: [P, C] bfloat16. out_dtype: bfloat16 or float32. Returns [M, P].
    """
    if a.device.type != "cuda":
        return matmul_bf16_reference(a, b_t, out_dtype)
    if out_dtype is torch.bfloat16:
        return a @ b_t.t()
    return torch.mm(a, b_t.t(), out_dtype=out_dtype)


def wgrad_bf16(dy_TN: torch.Tensor, x_TK: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """dY^T X of BF16 matrices, added into FP32 `out` in place, or alone in BF16.

    dy_TN: [T, N] bfloat16. x_TK: [T, K] bfloat16. out: [N, K] float32 or None. Returns [N, K], `out` where it is given.
    """
    if out is None:
        return mm(dy_TN.t(), x_TK.t(), torch.bfloat16)
    if dy_TN.device.type == "cuda" and dy_TN.shape[0]:
        return torch.addmm(out, dy_TN.t(), x_TK, out_dtype=torch.float32, out=out)
    return out.add_(mm(dy_TN.t(), x_TK.t(), torch.float32))
