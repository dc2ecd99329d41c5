"""The ranks' exchange of the fused log-probs on two real processes: equal on both, and equal to one process on the whole vocabulary."""

import pytest
import torch
import torch.distributed as dist

from jetrl_megatron.actor.fused_logprobs import FusedTokenLogprobs
from jetrl_megatron.actor.logprobs import vocab_shard
from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.dist
VALID, ROWS, WIDTH, COUNT = 203, 128, 64, 19


def values_of_one_rank() -> tuple[torch.Tensor, ...]:
    """Log-probs, entropy and the gradient of the hidden states of this process's share of one vocabulary."""
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(COUNT, WIDTH, generator=generator).bfloat16().requires_grad_()
    rows = 2 * ROWS // ranks
    weight = torch.randn(2 * ROWS, WIDTH, generator=generator).bfloat16()[rank * rows : (rank + 1) * rows]
    labels = torch.randint(0, VALID, (COUNT,), generator=generator)
    logp, entropy = FusedTokenLogprobs.apply(hidden, weight, labels, vocab_shard(VALID, rows, rank, dist.group.WORLD), 0.6)
    logp.sum().backward()
    assert hidden.grad is not None
    dist.destroy_process_group()
    return logp.detach(), entropy, hidden.grad.float()


def test_two_ranks_agree_with_each_other_and_with_one() -> None:
    (one,), both = run_ranks(values_of_one_rank, 1), run_ranks(values_of_one_rank, 2)
    assert torch.equal(both[0][0], both[1][0]) and torch.equal(both[0][1], both[1][1])
    # FP32 in another order of summation; twice the bound of test_triton_logprobs.py.
    for got, want in zip(both[0][:2], one[:2], strict=True):
        assert torch.allclose(got, want, rtol=2**-22, atol=8e-6)
    assert torch.allclose(both[0][2] + both[1][2], one[2], rtol=2**-6, atol=2**-7 * float(one[2].abs().max()))
