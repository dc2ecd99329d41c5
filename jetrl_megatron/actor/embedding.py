"""The word embedding: rows of this rank's vocabulary, with a gradient that is added in FP32, row by row, where Megatron sums it.

Enters: token ids [1, T]; `NO_TOKEN` stands at padding. Leaves: [T/TP, 1, H] under sequence parallelism, else [1, T, H], BF16, zeros at
padding; backwards, `main_grad[id_t] += dy_t` in FP32 for the T tokens. Megatron's own makes a dense BF16 gradient [V/TP, H] a micro-batch,
in which the sum of a frequent token's rows is rounded, and adds it. Under deterministic algorithms CUDA sorts the ids and adds the rows of
one token one after the other: it costs more where one token fills a micro-batch (not measured).
Invariants: a row's bits are Megatron's; with torch's deterministic algorithms the sums are in one order, on CUDA too, without them CUDA
adds in any; the weight's name and marks are Megatron's. Left out: weights tied to the head (model.py), exchange of gradients (Megatron's).

Legend: T tokens, V_r vocabulary rows of this rank.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from torch import Tensor
from torch.nn.functional import embedding

from jetrl_megatron.fp8 import deliver_weight_gradient

NO_TOKEN = -1
"""The id whose row is zeros on every rank."""


class FlowEmbedding(VocabParallelEmbedding):
    """Megatron's vocabulary-parallel embedding with this file's gradient."""

    @classmethod
    def in_place_of(cls, plain: VocabParallelEmbedding, config: Any) -> "FlowEmbedding":
        """Return one with the parameter of `plain`, the same object: LanguageModelEmbedding names its class itself and takes no spec."""
        new = cls(
            plain.num_embeddings,
            plain.embedding_dim,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=plain.reduce_scatter_embeddings,
            config=config,
            tp_group=plain.tp_group,
        )
        new.weight = plain.weight
        return new

    def forward(self, input_: Tensor) -> Tensor:
        """Map ids [1, T] int64 to rows, [T/TP, 1, H] or [1, T, H]; an id that no rank holds fails in the last rank's lookup."""
        local = input_ - self.vocab_start_index
        absent = local < 0
        if self.vocab_end_index < self.num_embeddings:
            absent |= local >= self.num_embeddings_per_partition
        rows = _Rows.apply(local, absent, self.weight)
        if self.reduce_scatter_embeddings:
            return mappings.reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(rows, group=self.tp_group)


class _Rows(torch.autograd.Function):
    """Rows [1, T, H] of the weight [V_r, H], zeros where `absent` [1, T]."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, absent: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(local, absent)
        ctx.weight_ref = weight
        return embedding(local.masked_fill(absent, 0), weight).masked_fill_(absent[..., None], 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        local, absent = (tensor.flatten() for tensor in ctx.saved_tensors)
        weight = ctx.weight_ref
        dy_TH = grads[0].flatten(0, 1).float().masked_fill(absent[:, None], 0.0)
        # A token that is not here adds zeros, each to another row: all to one would be added one after the other.
        spread = torch.arange(local.numel(), device=local.device) % weight.shape[0]

        def accumulate(out: Tensor | None) -> Tensor:
            total = torch.zeros_like(weight, dtype=torch.float32) if out is None else out
            return total.index_add_(0, torch.where(absent, spread, local), dy_TH)

        return None, None, deliver_weight_gradient(weight, accumulate)
