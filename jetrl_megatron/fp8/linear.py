"""The autograd linears: Y = X W^T with an FP8 forward and a backward whose precision each switch of `GemmPrecision` sets.

Enters: BF16 activations, the BF16 parameter (for its gradient and the BF16 arms), and its FP8 bytes from the weight cache.
Leaves: BF16 outputs; the weight gradient goes straight into `weight.main_grad` (FP32) where that attribute exists, as Megatron's
fused gradient accumulation does, else it is returned in the weight's dtype.
Invariants: the forward reads only bytes of the cache, never quantises a weight; tokens are padded to a multiple of 128 with zero codes
inside wgrad only, which is exact; without grad mode nothing is saved; T = 0 works.
Rows in another order: where the cache holds parameter rows permuted (`row_order`), Y and dW are in the parameter's order and only the
operands of fprop and dgrad are in the cache's.
X cut over ranks (`gather`, see gather.py): x is this rank's part. It is quantised, then gathered for fprop; the forward keeps the part,
which is gathered in the backward once it is wgrad's operand. dX leaves as the part's gradient.
SwiGLU behind a linear (`*_linear_swiglu`) is part of its autograd function: Y, which is [gate | up], is kept, and the backward goes from
dh to the FP8 operands of dY without writing dY. Where that is impossible, dY is written in BF16 by one kernel and quantised from there, to
the same bytes: dgrad or wgrad in BF16 (they read dY), `row_order` with FP8 dgrad (dY in two orders), no wgrad, F not a multiple of 128.
Left out: bias, other communication of tensor-parallel ranks (actor/), weight quantisation (weight_cache.py).

Legend: T tokens, K input features, N output features; F = N / 2 features behind SwiGLU.
"""

from dataclasses import dataclass
from typing import Any

import torch

from jetrl_megatron.config import Backend, LinearPrecision, SavedActivation
from jetrl_megatron.fp8.backend import Kernels, kernels_of
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.gather import InputGather, exact_in_fp8
from jetrl_megatron.fp8.gemm_reference import matmul_bf16_reference
from jetrl_megatron.fp8.main_grad import deliver_weight_gradient
from jetrl_megatron.fp8.precision import GemmPrecision
from jetrl_megatron.fp8.quantize import GROUP, ROW_BLOCK
from jetrl_megatron.fp8.weight_cache import QuantizedWeight

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class _Flow:
    """What an FP8 linear runs."""

    cached: QuantizedWeight
    precision: GemmPrecision
    kernels: Kernels
    row_order: torch.Tensor | None
    gather: InputGather | None
    swiglu: bool

    def whole_rows(self, x: BlockScaled) -> BlockScaled:
        """X in 1x128 groups from this rank's part; x itself where no rank holds another part."""
        return x if self.gather is None else self.gather.rows(x)

    def whole_transposed(self, x_t: BlockScaled) -> BlockScaled:
        """X^T from this rank's part; x_t itself where no rank holds another part."""
        return x_t if self.gather is None else self.gather.transposed(x_t)


def fp8_linear(
    x_TK: torch.Tensor,
    weight: torch.Tensor,
    cached: QuantizedWeight,
    precision: GemmPrecision,
    backend: Backend,
    row_order: torch.Tensor | None = None,
    gather: InputGather | None = None,
) -> torch.Tensor:
    """Y = X W^T with the forward in FP8.

    x_TK: [T, K] bfloat16. weight: [N, K] bfloat16 parameter that `cached` was made of. cached: its bytes. precision: the switches.
    backend: resolved. row_order: [N] int64, cache row i is parameter row row_order[i]; None where both orders are one.
    gather: how ranks make X whole where each of them holds a part; x_TK is then this rank's part, and T and K are the whole's.
    Returns [T, N] bfloat16, columns in the parameter's order. Raises ValueError on shapes or dtypes that do not fit, a BF16 precision, or a
    `gather` of parts that cannot be gathered in FP8 (`exact_in_fp8`).
    """
    kernels = kernels_of(backend)
    flow = _Flow(cached=cached, precision=precision, kernels=kernels, row_order=row_order, gather=gather, swiglu=False)
    return _fp8(x_TK, weight, flow)


def fp8_linear_swiglu(
    x_TK: torch.Tensor,
    weight: torch.Tensor,
    cached: QuantizedWeight,
    precision: GemmPrecision,
    backend: Backend,
    row_order: torch.Tensor | None = None,
    gather: InputGather | None = None,
) -> torch.Tensor:
    """silu(gate) * up with [gate | up] = X W^T, the linear in FP8; arguments and errors are those of `fp8_linear`.

    weight: [2F, K] bfloat16, the gate's rows first. Returns [T, F] bfloat16. Raises ValueError on an odd number of rows too.
    """
    kernels = kernels_of(backend)
    flow = _Flow(cached=cached, precision=precision, kernels=kernels, row_order=row_order, gather=gather, swiglu=True)
    return _fp8(x_TK, weight, flow)


def bf16_linear(x_TK: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Y = X W^T in BF16: on a CPU by the float64 reference, whose rows do not depend on T or N, on CUDA by torch.

    x_TK: [T, K] bfloat16. weight: [N, K] bfloat16. out_dtype: bfloat16, or float32 for the logits of an lm_head.
    Returns [T, N]. The weight gradient follows the module's convention.
    """
    _check(x_TK, weight)
    return _Bf16Linear.apply(x_TK, weight, out_dtype, None)


def bf16_linear_swiglu(x_TK: torch.Tensor, weight: torch.Tensor, backend: Backend) -> torch.Tensor:
    """silu(gate) * up with [gate | up] = X W^T, the linear as `bf16_linear`, SwiGLU by `backend` (resolved).

    x_TK: [T, K] bfloat16. weight: [2F, K] bfloat16, the gate's rows first. Returns [T, F] bfloat16.
    """
    _check(x_TK, weight)
    kernels = kernels_of(backend)
    if torch.is_grad_enabled() and (x_TK.requires_grad or weight.requires_grad):
        return _Bf16Linear.apply(x_TK, weight, torch.bfloat16, kernels)
    return kernels.swiglu(_mm(x_TK, weight, torch.bfloat16))


def _fp8(x_TK: torch.Tensor, weight: torch.Tensor, flow: _Flow) -> torch.Tensor:
    """Check what enters, then run with what the backward needs or, without gradients, without keeping anything."""
    cached, precision, kernels, gather = flow.cached, flow.precision, flow.kernels, flow.gather
    _check(x_TK, weight, gather)
    if precision.linear is not LinearPrecision.fp8:
        raise ValueError("precision.linear is bf16; call bf16_linear for this layer")
    if cached.w.shape != tuple(weight.shape):
        raise ValueError(f"cached weight is {cached.w.shape}, the parameter {tuple(weight.shape)}; they must be one layer's")
    for_wgrad = torch.is_grad_enabled() and weight.requires_grad
    if gather is not None and not exact_in_fp8(x_TK.shape, gather.axis, precision, for_wgrad=for_wgrad):
        raise ValueError(
            f"a part {tuple(x_TK.shape)} of X, cut along axis {gather.axis}, cannot be gathered in FP8 with saved_activation="
            f"{precision.saved_activation.value}, wgrad={precision.wgrad.value}: gather X in BF16 and call without `gather`"
        )
    if torch.is_grad_enabled() and (x_TK.requires_grad or weight.requires_grad):
        if precision.dgrad is LinearPrecision.fp8 and x_TK.requires_grad and cached.w_t is None:
            raise ValueError("dgrad is fp8 but the cache holds no transposed weight; build WeightCache with keep_transposed=True")
        return _Fp8Linear.apply(x_TK, weight, flow)
    x = flow.whole_rows(kernels.quantize(x_TK, ROW_BLOCK, dtype=E4M3, scale_format=precision.scale_format))
    y_TN = _to_stored_order(kernels.fprop(x, cached.w), flow.row_order)
    return kernels.swiglu(y_TN) if flow.swiglu else y_TN


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, weight: torch.Tensor, flow: _Flow) -> torch.Tensor:
        cached, precision, kernels = flow.cached, flow.precision, flow.kernels
        saved, scale_format = precision.saved_activation, precision.scale_format
        keep: list[torch.Tensor] = []
        ctx.block = None
        if weight.requires_grad and saved is SavedActivation.fp8_dual:
            x, x_t = kernels.quantize_dual(x_TK, dtype=E4M3, scale_format=scale_format, t_block=precision.x_t_block)
            keep, ctx.block = [x_t.data, x_t.scale], x_t.block
        else:
            x = kernels.quantize(x_TK, ROW_BLOCK, dtype=E4M3, scale_format=scale_format)
            if weight.requires_grad:
                keep = [x_TK] if saved is SavedActivation.bf16 else [x.data, x.scale]
                ctx.block = None if saved is SavedActivation.bf16 else x.block
        ctx.flow, ctx.num_kept = flow, len(keep)
        ctx.weight_ref = weight
        if ctx.needs_input_grad[0]:
            if precision.dgrad is LinearPrecision.bf16:
                keep.append(weight)
            else:
                assert cached.w_t is not None, "_fp8 checks it"
                keep += [cached.w_t.data, cached.w_t.scale]
        ctx.w_t_block = None if cached.w_t is None else cached.w_t.block
        y_TN = _to_stored_order(kernels.fprop(flow.whole_rows(x), cached.w), flow.row_order)
        ctx.save_for_backward(*keep, *([y_TN] if flow.swiglu else []))
        return kernels.swiglu(y_TN) if flow.swiglu else y_TN

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flow, kernels, precision = ctx.flow, ctx.flow.kernels, ctx.flow.precision
        kept, for_dgrad = ctx.saved_tensors[: ctx.num_kept], ctx.saved_tensors[ctx.num_kept :]
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        fp8_dgrad = needs_dx and precision.dgrad is LinearPrecision.fp8
        fp8_wgrad = needs_dw and precision.wgrad is LinearPrecision.fp8
        dy_TN, dy, dy_t = grads[0], None, None
        if flow.swiglu:
            gate_up = for_dgrad[-1]
            in_two_orders = fp8_dgrad and flow.row_order is not None
            if fp8_wgrad and fp8_dgrad == needs_dx and not in_two_orders and dy_TN.shape[1] % GROUP == 0:
                dy, dy_t = kernels.swiglu_backward_dual(dy_TN, gate_up, dtype=precision.grad_dtype, scale_format=precision.scale_format)
            else:
                dy_TN = kernels.swiglu_backward(dy_TN, gate_up)
        if dy_t is None:
            dy, dy_t = _quantize_grad(dy_TN, flow.row_order, precision, kernels, (fp8_dgrad, fp8_wgrad))
        dx = dw = None
        if fp8_dgrad:
            dx = kernels.dgrad(dy, BlockScaled(for_dgrad[0], for_dgrad[1], ctx.w_t_block))
        elif needs_dx:
            dx = _mm(dy_TN, for_dgrad[0].t(), torch.bfloat16)
        if fp8_wgrad:
            x_t = flow.whole_transposed(_saved_transposed(kept, ctx.block, flow))
            dw = deliver_weight_gradient(ctx.weight_ref, lambda out: kernels.wgrad(dy_t, x_t, out))
        elif needs_dw:
            x_TK = _saved_bf16(kept, ctx.block, flow, dy_TN.shape[0])
            dw = deliver_weight_gradient(ctx.weight_ref, lambda out: _wgrad_bf16(dy_TN, x_TK, out))
        if dx is not None and flow.gather is not None:
            dx = flow.gather.reduce_scatter(dx)
        return dx, dw, None


class _Bf16Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, swiglu_kernels: Kernels | None) -> torch.Tensor:
        y_TN = _mm(x_TK, weight, out_dtype)
        ctx.weight_ref, ctx.swiglu_kernels = weight, swiglu_kernels
        ctx.save_for_backward(x_TK, weight, *([] if swiglu_kernels is None else [y_TN]))
        return y_TN if swiglu_kernels is None else swiglu_kernels.swiglu(y_TN)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TK, weight, *gate_up = ctx.saved_tensors
        dy_TN = grads[0].to(torch.bfloat16)
        if gate_up:
            dy_TN = ctx.swiglu_kernels.swiglu_backward(dy_TN, gate_up[0])
        dx = _mm(dy_TN, weight.t(), torch.bfloat16) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            dw = deliver_weight_gradient(ctx.weight_ref, lambda out: _wgrad_bf16(dy_TN, x_TK, out))
        return dx, dw, None, None


def _check(x_TK: torch.Tensor, weight: torch.Tensor, gather: InputGather | None = None) -> None:
    """Raise ValueError unless x [T, K], or with `gather` a part of it, and weight [N, K] are BF16 matrices that fit."""
    shape = x_TK.shape if gather is None or x_TK.dim() != 2 else gather.whole_shape(x_TK.shape)
    if x_TK.dim() != 2 or weight.dim() != 2 or shape[1] != weight.shape[1]:
        raise ValueError(f"linear: input {tuple(x_TK.shape)} and weight {tuple(weight.shape)} must be [T, K] and [N, K]")
    if x_TK.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        raise ValueError(f"linear: input is {x_TK.dtype}, weight {weight.dtype}; both must be bfloat16")


def _mm(a: torch.Tensor, b_t: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """A B^T of BF16 matrices: the reference on a CPU, torch's GEMM (FP32 accumulation) on CUDA."""
    if a.device.type != "cuda":
        return matmul_bf16_reference(a, b_t, out_dtype)
    if out_dtype is torch.bfloat16:
        return a @ b_t.t()
    return torch.mm(a, b_t.t(), out_dtype=out_dtype)


def _to_stored_order(y_TN: torch.Tensor, row_order: torch.Tensor | None) -> torch.Tensor:
    """Columns of Y from the cache's order to the parameter's."""
    return y_TN if row_order is None else torch.empty_like(y_TN).index_copy_(1, row_order, y_TN)


def _quantize_grad(
    dy_TN: torch.Tensor, row_order: torch.Tensor | None, precision: GemmPrecision, kernels: Kernels, wanted: tuple[bool, bool]
) -> tuple[BlockScaled | None, BlockScaled | None]:
    """(dY along N in the cache's order for dgrad, dY^T along T in the parameter's order for wgrad), each None where not wanted."""
    dtype, scale_format = precision.grad_dtype, precision.scale_format
    for_dgrad, for_wgrad = wanted
    if not for_dgrad and not for_wgrad:
        return None, None
    dy = dy_t = None
    if for_wgrad:
        dy, dy_t = kernels.quantize_dual(dy_TN, dtype=dtype, scale_format=scale_format)
    if for_dgrad and (dy is None or row_order is not None):
        rows = dy_TN if row_order is None else dy_TN.index_select(1, row_order)
        dy = kernels.quantize(rows, ROW_BLOCK, dtype=dtype, scale_format=scale_format)
    return dy, dy_t


def _saved_transposed(kept: tuple[torch.Tensor, ...], block: tuple[int, int] | None, flow: _Flow) -> BlockScaled:
    """X^T in FP8, [K, T128], or this rank's part of it, from what the forward kept."""
    precision, kernels = flow.precision, flow.kernels
    scale_format, t_block = precision.scale_format, precision.x_t_block
    if precision.saved_activation is SavedActivation.bf16:
        return kernels.quantize_dual(kept[0], dtype=E4M3, scale_format=scale_format, t_block=t_block)[1]
    assert block is not None, precision
    saved = BlockScaled(kept[0], kept[1], block)
    if precision.saved_activation is SavedActivation.fp8_dual:
        return saved
    return kernels.requantize_transposed(saved, scale_format=scale_format, t_block=t_block)


def _saved_bf16(kept: tuple[torch.Tensor, ...], block: tuple[int, int] | None, flow: _Flow, num_toks: int) -> torch.Tensor:
    """The whole X [T, K] in BF16 from what the forward kept; FP8 copies are gathered, then dequantised."""
    saved = flow.precision.saved_activation
    if saved is SavedActivation.bf16:
        return kept[0]
    assert block is not None, flow.precision
    codes = BlockScaled(kept[0], kept[1], block)
    if saved is SavedActivation.fp8_dual:
        return flow.whole_transposed(codes).dequantize(torch.bfloat16)[:, :num_toks].t()
    return flow.whole_rows(codes).dequantize(torch.bfloat16)


def _wgrad_bf16(dy_TN: torch.Tensor, x_TK: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """dY^T X of BF16 matrices, added into FP32 `out` in place, or alone in BF16."""
    if out is None:
        return _mm(dy_TN.t(), x_TK.t(), torch.bfloat16)
    if dy_TN.device.type == "cuda" and dy_TN.shape[0]:
        return torch.addmm(out, dy_TN.t(), x_TK, out_dtype=torch.float32, out=out)
    return out.add_(_mm(dy_TN.t(), x_TK.t(), torch.float32))
