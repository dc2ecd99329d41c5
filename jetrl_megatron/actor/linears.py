"""Column- and row-parallel linears that run the unified precision flow; Megatron builds them from the layer spec.

Enters: activations [T or T/TP, 1, K] BF16. Leaves: [T or T/TP, 1, N/TP or N] BF16. The GEMMs and their quantisation are
`jetrl_megatron.fp8`'s; this file adds the communication of tensor and sequence parallelism around them, through Megatron's own autograd
mappings, and says which input is gathered in FP8.

Each linear has two sides, `train` and `rollout`, with a precision each and, where it is FP8, a weight cache that holds the bytes quantised
once a step. In the `jetrl` arm both sides are the same object. Which side runs is set on the whole model (`sides.py`), never guessed.

Row-parallel layers come in two kinds. `k_complete` (default): the weight is sharded by output rows, the input is gathered along K, so no
contraction is cut and every TP degree gives the same bits. `k_split`: the usual one, weight sharded along K, BF16 partial sums added.

Where an input is cut over ranks (along tokens in front of a column-parallel linear under sequence parallelism, along K in front of a
`k_complete` one) each rank quantises its own part, and codes and scales are gathered (fp8/gather.py). In three cases BF16 is gathered and
every rank quantises all of it, to the same bits: the side is BF16; both `wgrad` and `saved_activation` are bf16 and there are gradients, so
that the backward reads X in BF16; K/TP, or with gradients T/TP, is not a multiple of 128. The last case is for callers of the layers: the
packer's lengths are multiples of 128 * TP, decoding has no gradients, and a layout with another K/TP is refused.
dX is added up over ranks in BF16 in either case.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide, get_pg_size
from torch import Tensor
from torch.nn import Module, Parameter

from jetrl_megatron.config import Backend, LinearPrecision, RowParallel
from jetrl_megatron.fp8 import GemmPrecision, WeightCache, bf16_linear, bf16_linear_swiglu, fp8_linear, fp8_linear_swiglu
from jetrl_megatron.fp8.gather import InputGather, exact_in_fp8
from jetrl_megatron.fp8.precision import Side


@dataclass(frozen=True, kw_only=True)
class SideFlow:
    """What a linear runs on one side."""

    precision: GemmPrecision
    cache: WeightCache | None
    """None where the side is BF16."""
    backend: Backend


class FlowLinear:
    """Mixin: the local GEMM of a linear layer on the side that is active.

    Attributes set after construction by `FlowSides`: `flow_name` (key in the weight cache), `flow_sides`, `flow_side`, `row_order`.
    """

    flow_name: str = ""
    flow_sides: dict[str, SideFlow]
    flow_side: Side = "train"
    tp_group: Any
    row_order: Tensor | None = None

    @property
    def flow(self) -> SideFlow:
        """What the active side runs.

        Raises:
            AssertionError: when no flow was attached: a linear never runs in a precision that nobody chose.
        """
        flow = getattr(self, "flow_sides", {}).get(self.flow_side)
        assert flow is not None, f"{type(self).__name__} {self.flow_name!r} has no precision flow for side {self.flow_side!r}"
        return flow

    def local_gemm(self, x: Tensor, weight: Parameter, *, swiglu: bool = False, gather: InputGather | None = None) -> Tensor:
        """Multiply flattened tokens by the local weight: x [..., K], weight [N, K] -> [..., N], BF16, or [..., N/2] behind SwiGLU.

        With `gather` x is this rank's part of the input, and what returns has all tokens.
        """
        flow = self.flow
        x_TK = x.reshape(-1, x.shape[-1])
        if flow.precision.linear is LinearPrecision.bf16:
            assert gather is None, self.flow_name
            y_TN = bf16_linear_swiglu(x_TK, weight, flow.backend) if swiglu else bf16_linear(x_TK, weight)
        else:
            assert flow.cache is not None, self.flow_name
            cached = flow.cache.get(self.flow_name)
            linear = fp8_linear_swiglu if swiglu else fp8_linear
            y_TN = linear(x_TK, weight, cached, flow.precision, flow.backend, row_order=self.row_order, gather=gather)
        parts = self.tp_group.size() if gather is not None and gather.axis == 0 else 1
        return y_TN.view(parts * x.shape[0], *x.shape[1:-1], y_TN.shape[-1])

    def gathered_gemm(self, x: Tensor, weight: Parameter, *, axis: int, swiglu: bool = False) -> Tensor:
        """Multiply an input that is cut over ranks along `axis`, 0 tokens or 1 features, by the local weight.

        x: [T/TP, 1, K] or [T, 1, K/TP]; weight [N, K] -> [T, 1, N], or [T, 1, N/2] behind SwiGLU.
        """
        part = x.numel() // max(x.shape[-1], 1), x.shape[-1]
        for_wgrad = torch.is_grad_enabled() and weight.requires_grad
        group = self.tp_group
        if group.size() > 1 and exact_in_fp8(part, axis, self.flow.precision, for_wgrad=for_wgrad):
            # Called in the backward, where nothing is recorded, Megatron's mappings are what they do in their forward.
            back = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if axis == 0
                else mappings.reduce_scatter_last_dim_to_tensor_parallel_region
            )
            gather = InputGather(axis=axis, group=group, reduce_scatter=partial(back, group=group))
            return self.local_gemm(x, weight, swiglu=swiglu, gather=gather)
        if axis == 0:
            x = mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
        else:
            x = mappings.all_gather_last_dim_from_tensor_parallel_region(x, group=group)
        return self.local_gemm(x, weight, swiglu=swiglu)


class FlowColumnParallelLinear(FlowLinear, ColumnParallelLinear):
    """Y_r = X W_r^T, W sharded by output rows; under sequence parallelism X is gathered along tokens first."""

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, *, swiglu: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Map input_ [T/TP, 1, K] (sequence parallel) or [T, 1, K] to [T, 1, N/TP]; returns (output, bias to add later or None).

        With `swiglu` W_r is [gate | up] and the output is silu(gate) * up, [T, 1, N/TP/2], in one autograd function with the GEMM.
        """
        assert weight is None and not runtime_gather_output, "the flow linears own their weight and never gather their output"
        assert not swiglu or self.bias is None, "no family of this project has a bias in front of SwiGLU"
        if self.sequence_parallel:
            y = self.gathered_gemm(input_, self.weight, axis=0, swiglu=swiglu)
        else:
            y = self.local_gemm(mappings.copy_to_tensor_model_parallel_region(input_, group=self.tp_group), self.weight, swiglu=swiglu)
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

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Map input_ [T, 1, K/TP] to [T/TP, 1, N] under sequence parallelism, else [T, 1, N]; the second value is the absent bias."""
        if self.row_parallel is RowParallel.k_complete:
            return self._complete(input_), None
        y = self.local_gemm(input_, self.weight)
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group), None
        return mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group), None

    def _complete(self, input_: Tensor) -> Tensor:
        """Gather along K, multiply by the local output rows, then trade columns for tokens (or gather the columns)."""
        y = self.gathered_gemm(input_, self.weight, axis=1)
        if self.sequence_parallel:
            return mappings.all_to_all_hp2sp(y, group=self.tp_group).unsqueeze(1)
        return mappings.gather_from_tensor_model_parallel_region(y, group=self.tp_group)

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
