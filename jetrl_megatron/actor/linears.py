"""Column- and row-parallel linears that run the unified precision flow; Megatron builds them from the layer spec.

Enters: activations [T or T/TP, 1, K] BF16. Leaves: [T or T/TP, 1, N/TP or N] BF16. The GEMMs and their quantisation are
`jetrl_megatron.fp8`'s; this file says what tensor- and sequence-parallel ranks exchange around them. X on its way in and dX on its way back
belong to the linear's own autograd function (fp8/exchange.py), which runs them beside the backward's GEMMs. No GEMM of the layer could run
beside the output's way out and its gradient's way in: an autograd function in exchange.py where columns are traded for tokens, else
Megatron's mappings.

Each linear has two sides, `train` and `rollout`, with a precision each and, where it is FP8, a weight cache that holds the bytes quantised
once a step. In the `jetrl` arm both sides are the same object. Which side runs is set on the whole model (`sides.py`), never guessed.

Row-parallel layers come in two kinds. `k_complete` (default): the weight is sharded by output rows, the input is gathered along K, so no
contraction is cut and every TP degree gives the same bits. `k_split`: the usual one, weight sharded along K, BF16 partial sums added.

What is exchanged, by where the input lies:
- cut along tokens (column-parallel under sequence parallelism) or along K (`k_complete`): X is gathered for fprop and again for wgrad, dX
  is reduce-scattered. FP8: each rank quantises its own part, and codes and scales are gathered (fp8/gather.py). BF16: X goes in BF16.
- whole on every rank (column-parallel without sequence parallelism): dX is all-reduced.
- this rank's own (`k_split`): nothing.
Two cases of an FP8 linear gather BF16 by Megatron's mapping in front of it, keep the whole X and overlap nothing; every rank quantises all
of X, to the same bits: both `wgrad` and `saved_activation` are bf16 and there are gradients, so that the backward reads X in BF16; K/TP, or
with gradients T/TP, is not a multiple of 128. The last case is for callers of the layers: the packer's lengths are multiples of 128 * TP,
decoding has no gradients, and a layout with another K/TP is refused.
dX is added up over ranks in BF16 in every case.

What stands in front of a linear asks for its `input_format` and, where there is one, hands over X quantised (fp8/quantized_input.py), so
that X is never written in BF16; the norms are told of their linear by `FlowSides`, SwiGLU is the MLP's (mlp.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide, get_pg_size
from torch import Tensor
from torch.nn import Module, Parameter

from jetrl_megatron.config import Backend, LinearPrecision, RowParallel
from jetrl_megatron.fp8 import (
    GemmPrecision,
    InputFormat,
    QuantizedInput,
    WeightCache,
    bf16_linear,
    bf16_linear_swiglu,
    fp8_linear,
    fp8_linear_swiglu,
    input_format,
)
from jetrl_megatron.fp8.exchange import LOCAL, InputExchange, columns_for_tokens
from jetrl_megatron.fp8.gather import exact_in_fp8
from jetrl_megatron.fp8.precision import Side


@dataclass(frozen=True, kw_only=True)
class SideFlow:
    """What a linear runs on one side."""

    precision: GemmPrecision
    cache: WeightCache | None
    """None where the side is BF16."""
    backend: Backend


class FlowLinear:
    """Mixin: the GEMM of a linear layer on the side that is active.

    Attributes set after construction by `FlowSides`: `flow_name` (key in the weight cache), `flow_sides`, `flow_side`, `row_order`.
    """

    flow_name: str = ""
    flow_sides: dict[str, SideFlow]
    flow_side: Side = "train"
    tp_group: Any
    config: Any
    row_order: Tensor | None = None
    wants_bf16: bool = False
    """Set by whoever looks at what passes between a layer's steps: its `input_format` is None, so that hooks see X in BF16."""
    weight: Parameter

    @property
    def flow(self) -> SideFlow:
        """What the active side runs.

        Raises:
            AssertionError: when no flow was attached: a linear never runs in a precision that nobody chose.
        """
        flow = getattr(self, "flow_sides", {}).get(self.flow_side)
        assert flow is not None, f"{type(self).__name__} {self.flow_name!r} has no precision flow for side {self.flow_side!r}"
        return flow

    @cached_property
    def exchange(self) -> InputExchange:
        """How this layer's input lies over the tensor-parallel ranks."""
        raise NotImplementedError

    def input_format(self, part: tuple[int, int]) -> InputFormat | None:
        """What the active side makes of a part [tokens, features] of X that this rank holds; None where it wants it in BF16."""
        flow, axis = self.flow, self.exchange.axis
        for_wgrad = torch.is_grad_enabled() and self.weight.requires_grad
        if self.wants_bf16 or (axis is not None and not exact_in_fp8(part, axis, flow.precision, for_wgrad=for_wgrad)):
            return None
        return input_format(flow.precision, flow.backend, for_wgrad=for_wgrad)

    def gemm(self, x: Tensor | QuantizedInput, *, swiglu: bool = False, h_format: InputFormat | None = None) -> Tensor | QuantizedInput:
        """Multiply the input by the local weight [N, K], with what ranks exchange around it.

        x: what this rank holds of X, [T/TP, 1, K], [T, 1, K/TP] or [T, 1, K] BF16, or that quantised. h_format: see `forward`.
        Behind SwiGLU [gate | up] is kept for the backward or, with parallel.recompute=fc1, made again there.
        Returns [T, 1, N] BF16, or behind SwiGLU [T, 1, N/2] or, with `h_format`, that quantised if the linear is FP8.
        """
        flow, exchange, weight, recompute = self.flow, self.exchange, self.weight, self.config.flow_recompute_fc1
        if flow.precision.linear is LinearPrecision.bf16:
            assert isinstance(x, Tensor), f"{self.flow_name} reads BF16: its input_format is None"
            if swiglu:
                return bf16_linear_swiglu(x.squeeze(1), weight, flow.backend, exchange, recompute=recompute).unsqueeze(1)
            return bf16_linear(x.squeeze(1), weight, exchange=exchange).unsqueeze(1)
        operand = x.squeeze(1) if isinstance(x, Tensor) else x
        if isinstance(operand, Tensor) and exchange.axis is not None:
            for_wgrad = torch.is_grad_enabled() and weight.requires_grad
            if not exact_in_fp8(operand.shape, exchange.axis, flow.precision, for_wgrad=for_wgrad):
                operand, exchange = self._gathered_in_bf16(operand, exchange.axis), LOCAL
        assert flow.cache is not None, self.flow_name
        arguments = weight, flow.cache.get(self.flow_name), flow.precision, flow.backend, self.row_order, exchange
        if not swiglu:
            return fp8_linear(operand, *arguments).unsqueeze(1)
        h = fp8_linear_swiglu(operand, *arguments, h_format=h_format, recompute=recompute)
        return h.unsqueeze(1) if isinstance(h, Tensor) else h

    def _gathered_in_bf16(self, x_TK: Tensor, axis: int) -> Tensor:
        """X [T, K] from this rank's part; its gradient is reduce-scattered."""
        if axis == 0:
            return mappings.gather_from_sequence_parallel_region(x_TK, tensor_parallel_output_grad=True, group=self.tp_group)
        return mappings.all_gather_last_dim_from_tensor_parallel_region(x_TK, group=self.tp_group)


class FlowColumnParallelLinear(FlowLinear, ColumnParallelLinear):
    """Y_r = X W_r^T, W sharded by output rows; under sequence parallelism X is gathered along tokens first."""

    @cached_property
    def exchange(self) -> InputExchange:
        """X is cut along tokens under sequence parallelism, else whole on every rank."""
        if get_pg_size(self.tp_group) == 1:
            return LOCAL
        return InputExchange(axis=0 if self.sequence_parallel else None, group=self.tp_group)

    def forward(
        self,
        input_: Tensor | QuantizedInput,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        swiglu: bool = False,
        h_format: InputFormat | None = None,
    ) -> tuple[Any, Tensor | None]:
        """Map input_ [T/TP, 1, K] (sequence parallel) or [T, 1, K] to [T, 1, N/TP]; returns (output, bias to add later or None).

        With `swiglu` W_r is [gate | up] and the output is silu(gate) * up, [T, 1, N/TP/2], in one autograd function with the GEMM; with
        `h_format` too it is that as a QuantizedInput, if this linear is FP8.
        """
        assert weight is None and not runtime_gather_output, "the flow linears own their weight and never gather their output"
        assert not swiglu or self.bias is None, "no family of this project has a bias in front of SwiGLU"
        y = self.gemm(input_, swiglu=swiglu, h_format=h_format)
        if self.bias is not None and not self.skip_bias_add:
            y = y + self.bias
        return y, (self.bias if self.skip_bias_add else None)


class FlowRowParallelLinear(FlowLinear, Module):
    """Y = sum_r X_r W_r^T (`k_split`) or Y[:, N_r] = X W_r^T (`k_complete`); leaves [T/TP, 1, N] or [T, 1, N].

    Args:
        input_size: K, over all TP ranks.
        output_size: N, over all TP ranks.
        config: the actor's transformer config.
        init_method: fills the weight where `config.perform_initialization` is set.
        bias: must be False: none of the families has one here.
        input_is_parallel: must be True: X comes cut along K.
        tp_group: the tensor-parallel group.

    Raises:
        ValueError: when a bias is asked for.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        input_is_parallel: bool,
        tp_group: Any = None,
        **_: Any,
    ) -> None:
        """Allocate this rank's weight: [N/TP, K] in `k_complete`, [N, K/TP] in `k_split`."""
        super().__init__()
        if bias:
            raise ValueError("a bias on o_proj or down_proj is not supported: no family of this project has one")
        assert input_is_parallel and tp_group is not None
        self.config, self.tp_group = config, tp_group
        self.row_parallel: RowParallel = config.flow_row_parallel
        self.sequence_parallel = config.sequence_parallel
        size = get_pg_size(tp_group)
        complete = self.row_parallel is RowParallel.k_complete
        shape = (divide(output_size, size), input_size) if complete else (output_size, divide(input_size, size))
        self.weight = Parameter(torch.empty(shape, dtype=config.params_dtype, device=config.flow_device))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0 if complete else 1, stride=1)
        self.weight.allreduce = True  # type: ignore[attr-defined]
        if config.perform_initialization:
            with torch.no_grad():
                init_method(self.weight)

    @cached_property
    def exchange(self) -> InputExchange:
        """X is gathered along K in `k_complete`; in `k_split` every rank has what it multiplies."""
        if self.row_parallel is RowParallel.k_split or get_pg_size(self.tp_group) == 1:
            return LOCAL
        return InputExchange(axis=1, group=self.tp_group)

    def forward(self, input_: Tensor | QuantizedInput) -> tuple[Tensor, None]:
        """Map input_ [T, 1, K/TP] to [T/TP, 1, N] under sequence parallelism, else [T, 1, N]; the second value is the absent bias."""
        y = self.gemm(input_)
        assert isinstance(y, Tensor)
        if self.row_parallel is RowParallel.k_complete:
            # Every rank has all tokens of its output columns: trade columns for tokens, or gather the columns.
            if self.sequence_parallel:
                return columns_for_tokens(y.squeeze(1), self.tp_group).unsqueeze(1), None
            return mappings.gather_from_tensor_model_parallel_region(y, group=self.tp_group), None
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group), None
        return mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weight for Megatron's distributed checkpoints: cut over TP ranks along the axis that this kind cuts."""
        axis = 0 if self.row_parallel is RowParallel.k_complete else 1
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": axis},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def backward_dw(self) -> None:
        """Do nothing: the weight gradient is never delayed."""
