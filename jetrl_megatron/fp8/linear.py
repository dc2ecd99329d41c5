"""The FP8 autograd linear: Y = X W^T with an FP8 forward and a backward whose precision each switch of `GemmPrecision` sets.

Enters: BF16 activations, the BF16 parameter (for its gradient and a BF16 dgrad), and its FP8 bytes from the weight cache.
Leaves: BF16 outputs; the weight gradient goes straight into `weight.main_grad` (FP32) where that attribute exists, as Megatron's
fused gradient accumulation does, else it is returned in the weight's dtype.
Invariants: the forward reads only bytes of the cache, never quantises a weight; tokens are padded to a multiple of 128 with zero codes
inside wgrad only, which is exact; without grad mode nothing is saved; T = 0 works.
Rows in another order: where the cache holds parameter rows permuted (`row_order`), Y and dW are in the parameter's order and only the
operands of fprop and dgrad are in the cache's.
X that tensor-parallel ranks share (`exchange`, see exchange.py): x is what this rank holds. A part is quantised, then gathered for fprop;
the forward keeps the part, which is gathered in the backward, as wgrad's operand, beside dgrad. dX is added up over the ranks beside wgrad.
X that was never written in BF16 (`QuantizedInput`, see quantized_input.py) is taken as the operands that the linear would make of it.
SwiGLU behind a linear (`fp8_linear_swiglu`) is part of its autograd function: Y, which is [gate | up], is kept, and the backward goes from
dh to the FP8 operands of dY without writing dY. With `h_format` the forward goes from Y to the operands of the next linear without h.
Where the backward cannot, dY is written in BF16 by one kernel and quantised from there, to the same bytes: dgrad or wgrad in BF16
(which read dY), `row_order` with FP8 dgrad (dY in two orders), no wgrad, F not a multiple of 128.
With `recompute` the codes of X along K are kept in place of Y, K bytes a token for 4 F, and the backward makes Y again by the same GEMM of
the same operands; nothing is quantised again. Where X is cut, its rows are gathered once more, before wgrad's X.
Left out: bias, BF16 linears and GEMMs (linear_bf16.py), which linears share X (actor/linears.py), weight quantisation (weight_cache.py).

Legend: T tokens, K input features, N output features; F = N / 2 features behind SwiGLU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from jetrl_megatron.config import Backend, LinearPrecision
from jetrl_megatron.fp8.backend import Kernels, kernels_of
from jetrl_megatron.fp8.backward_operands import quantize_grad, start_x
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.exchange import LOCAL, InputExchange
from jetrl_megatron.fp8.gather import exact_in_fp8
from jetrl_megatron.fp8.linear_bf16 import mm, wgrad_bf16
from jetrl_megatron.fp8.main_grad import deliver_weight_gradient
from jetrl_megatron.fp8.precision import GemmPrecision
from jetrl_megatron.fp8.quantize import GROUP, ROW_BLOCK
from jetrl_megatron.fp8.quantized_input import InputFormat, Operands, QuantizedInput, input_format, stand_in
from jetrl_megatron.fp8.weight_cache import QuantizedWeight

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class _Flow:
    """What an FP8 linear runs."""

    cached: QuantizedWeight
    precision: GemmPrecision
    backend: Backend
    row_order: torch.Tensor | None
    exchange: InputExchange
    swiglu: bool = False
    h_format: InputFormat | None = None
    """Of what SwiGLU gives; None: BF16."""
    recompute: bool = False
    """[gate | up] is not kept: the backward makes it again."""

    @property
    def kernels(self) -> Kernels:
        """Those of the backend."""
        return kernels_of(self.backend)


def fp8_linear(
    x: torch.Tensor | QuantizedInput,
    weight: torch.Tensor,
    cached: QuantizedWeight,
    precision: GemmPrecision,
    backend: Backend,
    row_order: torch.Tensor | None = None,
    exchange: InputExchange = LOCAL,
) -> torch.Tensor:
    """Y = X W^T with the forward in FP8.

    x: [T, K] bfloat16, or its operands in the linear's `input_format`. weight: [N, K] bfloat16 parameter that `cached` was made of.
    cached: its bytes. precision: the switches.
    backend: resolved. row_order: [N] int64, cache row i is parameter row row_order[i]; None where both orders are one.
    exchange: how tensor-parallel ranks share X; x is then what this rank holds, and T and K are the whole's.
    Returns [T, N] bfloat16, columns in the parameter's order. Raises ValueError on shapes or dtypes that do not fit, a BF16 precision, or
    parts that cannot be gathered in FP8 (`exact_in_fp8`).
    """
    y_TN, _ = _fp8(x, weight, _Flow(cached=cached, precision=precision, backend=backend, row_order=row_order, exchange=exchange))
    return y_TN


def fp8_linear_swiglu(
    x: torch.Tensor | QuantizedInput,
    weight: torch.Tensor,
    cached: QuantizedWeight,
    precision: GemmPrecision,
    backend: Backend,
    row_order: torch.Tensor | None = None,
    exchange: InputExchange = LOCAL,
    *,
    h_format: InputFormat | None = None,
    recompute: bool = False,
) -> torch.Tensor | QuantizedInput:
    """h = silu(gate) * up with [gate | up] = X W^T, the linear in FP8; arguments and errors are those of `fp8_linear`.

    weight: [2F, K] bfloat16, the gate's rows first. h_format: the `input_format` of the linear that reads h. recompute: see the module.
    Returns h [T, F] bfloat16 or, with `h_format`, as the operands that the next linear would make of it.
    Raises ValueError on an odd number of rows too.
    """
    flow = _Flow(
        cached=cached,
        precision=precision,
        backend=backend,
        row_order=row_order,
        exchange=exchange,
        swiglu=True,
        h_format=h_format,
        recompute=recompute,
    )
    h_TF, operands = _fp8(x, weight, flow)
    return h_TF if operands is None else QuantizedInput(operands=operands, graph_TK=h_TF)


def _fp8(x: torch.Tensor | QuantizedInput, weight: torch.Tensor, flow: _Flow) -> tuple[torch.Tensor, Operands | None]:
    """Check what enters, then run with what the backward needs or, without gradients, without keeping anything; (Y or h, operands of h)."""
    cached, precision, exchange = flow.cached, flow.precision, flow.exchange
    x_TK, given = (x.graph_TK, x.operands) if isinstance(x, QuantizedInput) else (x, None)
    exchange.check(x_TK, weight)
    if precision.linear is not LinearPrecision.fp8:
        raise ValueError("precision.linear is bf16; call bf16_linear for this layer")
    if cached.w.shape != tuple(weight.shape):
        raise ValueError(f"cached weight is {cached.w.shape}, the parameter {tuple(weight.shape)}; they must be one layer's")
    for_wgrad = torch.is_grad_enabled() and weight.requires_grad
    if exchange.axis is not None and not exact_in_fp8(x_TK.shape, exchange.axis, precision, for_wgrad=for_wgrad):
        raise ValueError(
            f"a part {tuple(x_TK.shape)} of X, cut along axis {exchange.axis}, cannot be gathered in FP8 with saved_activation="
            f"{precision.saved_activation.value}, wgrad={precision.wgrad.value}: gather X in BF16 and call without `exchange`"
        )
    form = input_format(precision, flow.backend, for_wgrad=for_wgrad)
    if given is not None:
        _check_given(given, form)
    if torch.is_grad_enabled() and (x_TK.requires_grad or weight.requires_grad):
        if precision.dgrad is LinearPrecision.fp8 and x_TK.requires_grad and cached.w_t is None:
            raise ValueError("dgrad is fp8 but the cache holds no transposed weight; build WeightCache with keep_transposed=True")
        made: tuple[torch.Tensor, Operands | None] = _Fp8Linear.apply(x_TK, weight, flow, given, form)
        return made
    rows = given[0] if given else flow.kernels.quantize(x_TK, ROW_BLOCK, dtype=E4M3, scale_format=precision.scale_format)
    return _activated(_gemm(exchange.rows(rows), cached.w, flow), flow)


def _check_given(given: Operands, form: InputFormat | None) -> None:
    """Raise ValueError where X came quantised otherwise than this linear would have done it, as far as shapes tell."""
    if form is None:
        raise ValueError("X came quantised, and this linear reads or keeps X in BF16: its `input_format` is None")
    block = None if given[1] is None else given[1].block
    if form.t_block is not None and block != form.t_block:
        raise ValueError(f"X came with X^T in blocks {block}, and wgrad of this linear reads {form.t_block}: ask for its `input_format`")


def _activated(y_TN: torch.Tensor, flow: _Flow) -> tuple[torch.Tensor, Operands | None]:
    """What leaves the linear: Y, h of it, or a stand-in for h with its operands."""
    if not flow.swiglu:
        return y_TN, None
    if flow.h_format is None:
        return flow.kernels.swiglu(y_TN), None
    form = flow.h_format
    operands = kernels_of(form.backend).swiglu_quantize(y_TN, scale_format=form.scale_format, t_block=form.t_block)
    return stand_in(operands[0].shape, y_TN.device), operands


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: torch.Tensor, weight: torch.Tensor, flow: _Flow, given: Operands | None, form: InputFormat | None
    ) -> tuple[torch.Tensor, Operands | None]:
        cached, precision = flow.cached, flow.precision
        keep, ctx.block = [x_TK] if form is None else [], None
        if given is not None:
            x, x_t = given
        elif form is not None:
            x, x_t = form.quantize(x_TK)
        else:
            x, x_t = flow.kernels.quantize(x_TK, ROW_BLOCK, dtype=E4M3, scale_format=precision.scale_format), None
        if weight.requires_grad and form is not None:
            kept = x if form.t_block is None else x_t
            assert kept is not None, "_fp8 checks it"
            keep, ctx.block = [kept.data, kept.scale], kept.block
        ctx.flow, ctx.num_kept = flow, len(keep)
        ctx.weight_ref = weight
        if ctx.needs_input_grad[0]:
            if precision.dgrad is LinearPrecision.bf16:
                keep.append(weight)
            else:
                assert cached.w_t is not None, "_fp8 checks it"
                keep += [cached.w_t.data, cached.w_t.scale]
        ctx.w_t_block = None if cached.w_t is None else cached.w_t.block
        y_TN = _gemm(flow.exchange.rows(x), cached.w, flow)
        behind = [x.data, x.scale, cached.w.data, cached.w.scale] if flow.recompute else [y_TN]
        ctx.save_for_backward(*keep, *(behind if flow.swiglu else []))
        return _activated(y_TN, flow)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flow, kernels, precision = ctx.flow, ctx.flow.kernels, ctx.flow.precision
        kept, for_dgrad = ctx.saved_tensors[: ctx.num_kept], ctx.saved_tensors[ctx.num_kept :]
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        fp8_dgrad = needs_dx and precision.dgrad is LinearPrecision.fp8
        fp8_wgrad = needs_dw and precision.wgrad is LinearPrecision.fp8
        dy_TN, dy, dy_t = grads[0], None, None
        # First, in the order in which they are waited for: X's rows where they are read again, then wgrad's X, beside everything up to it.
        gate_up_of = _start_gate_up(for_dgrad, flow) if flow.swiglu else None
        whole_x = start_x(kept, ctx.block, precision, kernels, flow.exchange, dy_TN.shape[0]) if needs_dw else None
        if gate_up_of is not None:
            gate_up = gate_up_of()
            in_two_orders = fp8_dgrad and flow.row_order is not None
            if fp8_wgrad and fp8_dgrad == needs_dx and not in_two_orders and dy_TN.shape[1] % GROUP == 0:
                dy, dy_t = kernels.swiglu_backward_dual(dy_TN, gate_up, dtype=precision.grad_dtype, scale_format=precision.scale_format)
            else:
                dy_TN = kernels.swiglu_backward(dy_TN, gate_up)
            del gate_up, gate_up_of  # what was made again, and the rows that it was made of, are free before the GEMMs
        if dy_t is None:
            dy, dy_t = quantize_grad(dy_TN, flow.row_order, precision, kernels, (fp8_dgrad, fp8_wgrad))
        dx = dx_sum = dw = None
        if fp8_dgrad:
            dx = kernels.dgrad(dy, BlockScaled(for_dgrad[0], for_dgrad[1], ctx.w_t_block))
        elif needs_dx:
            dx = mm(dy_TN, for_dgrad[0].t(), torch.bfloat16)
        if dx is not None:
            dx_sum = flow.exchange.start_sum(dx)
        if whole_x is not None:
            x = whole_x()
            wgrad = (lambda out: kernels.wgrad(dy_t, x, out)) if fp8_wgrad else (lambda out: wgrad_bf16(dy_TN, x, out))
            dw = deliver_weight_gradient(ctx.weight_ref, wgrad)
        return None if dx_sum is None else dx_sum(), dw, None, None, None


def _gemm(x: BlockScaled, w: BlockScaled, flow: _Flow) -> torch.Tensor:
    """Y of all of X, its columns in the parameter's order."""
    y_TN, row_order = flow.kernels.fprop(x, w), flow.row_order
    return y_TN if row_order is None else torch.empty_like(y_TN).index_copy_(1, row_order, y_TN)


def _start_gate_up(kept: tuple[torch.Tensor, ...], flow: _Flow) -> Callable[[], torch.Tensor]:
    """Start to gather what [gate | up] is made again of; call what returns for [gate | up].

    kept: what the forward saved, at its end what it saved for this.
    """
    if not flow.recompute:
        return lambda: kept[-1]
    x_codes, x_scale, w_codes, w_scale = kept[-4:]
    rows = flow.exchange.start_rows(BlockScaled(x_codes, x_scale, ROW_BLOCK))
    return lambda: _gemm(rows(), BlockScaled(w_codes, w_scale, flow.cached.w.block), flow)
