"""What Megatron's process groups cost a GPU before anything is sent."""

import pytest
import torch

from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.device import local_device
from jetrl_megatron.config import ParallelConfig
from tests.dist.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def taken() -> int:
    """Return the bytes of GPU memory that setting up the groups takes, on whoever's behalf."""
    device = local_device()
    torch.zeros(1, device=device)
    before, _ = torch.cuda.mem_get_info(device)
    parallel_state.initialize(ParallelConfig(), device)
    after, _ = torch.cuda.mem_get_info(device)
    parallel_state.destroy()
    return before - after


def test_groups_that_nobody_has_used_take_no_memory():
    """With a communicator for every group it was 7 GiB, which a server on the same GPU did not get. A neighbour may start meanwhile."""
    assert any(run_ranks(taken, 1)[0] < 2**28 for _ in range(3))
