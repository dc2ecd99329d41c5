"""The embedding of two tensor-parallel ranks: rows and gradient are those of one rank with the whole vocabulary."""

import os

import pytest
import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig

from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.embedding import NO_TOKEN, FlowEmbedding
from jetrl_megatron.actor.device import local_device, megatron_scope
from jetrl_megatron.config import ParallelConfig
from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.dist
VOCAB, WIDTH, TOTAL, REAL = 256, 64, 512, 400


def rows_and_gradient(sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's output, tokens first, and its rows of main_grad."""
    device = local_device()
    tp = parallel_state.initialize(ParallelConfig(tp=int(os.environ["WORLD_SIZE"])), device)
    config = ModelParallelConfig(
        tensor_model_parallel_size=tp.tp,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.bfloat16,
        sequence_parallel=sequence_parallel,
    )
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(VOCAB, WIDTH, generator=generator).bfloat16()
    ids = torch.randint(0, VOCAB, (1, TOTAL), generator=generator)
    ids[:, REAL:] = NO_TOKEN
    dy = torch.randn(TOTAL, 1, WIDTH, generator=generator).bfloat16()
    with megatron_scope(device):
        module = FlowEmbedding(
            VOCAB, WIDTH, init_method=None, reduce_scatter_embeddings=sequence_parallel, config=config, tp_group=dist.group.WORLD
        )
        with torch.no_grad():
            module.weight.copy_(whole.chunk(tp.tp)[tp.tp_rank])
        module.weight.main_grad = torch.zeros(module.weight.shape)
        out = module(ids)
        out.backward(dy.chunk(tp.tp)[tp.tp_rank] if sequence_parallel else dy.transpose(0, 1))
    parallel_state.destroy()
    return (out if sequence_parallel else out.transpose(0, 1)).detach(), module.weight.main_grad


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_two_ranks_are_one_bit_for_bit(sequence_parallel: bool) -> None:
    (one,) = run_ranks(rows_and_gradient, 1, False)
    both = run_ranks(rows_and_gradient, 2, sequence_parallel)
    assert torch.count_nonzero(one[0][:REAL].any(-1)) == REAL and torch.count_nonzero(one[0][REAL:]) == 0
    rows = torch.cat([rank[0] for rank in both]) if sequence_parallel else both[0][0]
    assert torch.equal(rows, one[0]) and (sequence_parallel or torch.equal(both[1][0], one[0]))
    assert torch.equal(torch.cat([rank[1] for rank in both]), one[1]) and torch.count_nonzero(one[1]) > 0
