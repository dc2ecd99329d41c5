"""The ranks' exchange of the fused log-probs on real processes: the bits of one process with the whole vocabulary."""

import pytest
import torch
import torch.distributed as dist

from jetrl_megatron.actor.fused_logprobs import FusedTokenLogprobs
from jetrl_megatron.actor.logprobs import vocab_shard
from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.dist
VALID, ROWS, WIDTH, COUNT = 2011, 2048, 64, 19


def values_of_one_rank() -> tuple[torch.Tensor, ...]:
    """Log-probs, entropy and the gradient of the hidden states of this process's share of one vocabulary."""
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(COUNT, WIDTH, generator=generator).bfloat16().requires_grad_()
    rows = ROWS // ranks
    weight = torch.randn(ROWS, WIDTH, generator=generator).bfloat16()[rank * rows : (rank + 1) * rows]
    labels = torch.randint(0, VALID, (COUNT,), generator=generator)
    logp, entropy = FusedTokenLogprobs.apply(hidden, weight, labels, vocab_shard(VALID, rows, rank, dist.group.WORLD), 0.6)
    logp.sum().backward()
    assert hidden.grad is not None
    dist.destroy_process_group()
    return logp.detach(), entropy, hidden.grad.float()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_bits_of_one(ranks: int) -> None:
    (one,), found = run_ranks(values_of_one_rank, 1), run_ranks(values_of_one_rank, ranks)
    for logp, entropy, _ in found:
        assert torch.equal(logp, one[0]) and torch.equal(entropy, one[1])
    dhidden = sum(dhidden for _, _, dhidden in found)
    assert torch.allclose(dhidden, one[2], rtol=2**-6, atol=2**-7 * float(one[2].abs().max()))
