"""One forward without gradients through all pipeline stages and model chunks, for decoding.

Enters: token ids [T] on every rank and a PackedContext. Leaves: hidden states [T, H] behind the final norm on the last stage, None
elsewhere. T is a multiple of TP, so the same sequence-parallel path runs as in training. Stages hand over [T/TP, 1, H] BF16 point to
point.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from jetrl_megatron.actor.model import PolicyModel
from jetrl_megatron.actor.packed import PackedContext
from jetrl_megatron.actor.pipeline_step import gathered_hidden


@torch.no_grad()
def forward_hidden(chunks: Sequence[PolicyModel], tokens_T: Tensor, context: PackedContext) -> Tensor | None:
    """Run every stage in order.

    Args:
        chunks: this rank's model chunks, bare (not wrapped).
        tokens_T: [T] int64, equal on all ranks of the model.
        context: positions, segments and the cache of this rank.

    Returns:
        [T, H] BF16 on the last stage, None elsewhere.
    """
    group = mpu.get_pipeline_model_parallel_group()
    size, rank = group.size(), group.rank()
    num_stages = size * len(chunks)
    hidden: Tensor | None = None
    for index, chunk in enumerate(chunks):
        stage = index * size + rank
        config = chunk.config
        if stage > 0:
            if size > 1:
                rows = tokens_T.shape[0] // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
                hidden = torch.empty(rows, 1, config.hidden_size, dtype=config.params_dtype, device=tokens_T.device)
                dist.recv(hidden, src=dist.get_global_rank(group, (rank - 1) % size), group=group)
            chunk.set_input_tensor(hidden)
        hidden = chunk(tokens_T[None], None, None, packed_seq_params=context)
        if stage < num_stages - 1 and size > 1:
            dist.send(hidden.contiguous(), dst=dist.get_global_rank(group, (rank + 1) % size), group=group)
    assert hidden is not None
    return gathered_hidden(chunks[-1], hidden) if rank == size - 1 else None
