"""Which GPUs servers get, and what NCCL cannot join."""

import pytest

from jetrl_megatron.config import Transport, VllmConfig
from jetrl_megatron.loop.vllm_setup import server_gpus


@pytest.fixture(autouse=True)
def four_named_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")


def test_servers_get_the_visible_gpus_behind_the_actors():
    assert server_gpus(VllmConfig(servers=1, tp=2), 2) == ["5,7"]
    assert server_gpus(VllmConfig(servers=2, tp=1), 2) == ["5", "7"]
    assert server_gpus(VllmConfig(servers=2, gpus=["2", "2"]), 2) == ["2", "2"]


def test_too_few_gpus_are_counted():
    with pytest.raises(ValueError, match=r"3 actor processes and rollout\.vllm.servers=1 of tp=2 need 5 GPUs and this machine has 4"):
        server_gpus(VllmConfig(servers=1, tp=2), 3)


def test_nccl_on_the_actors_own_gpu_is_refused():
    with pytest.raises(ValueError, match="puts servers on GPU 3, where the actor runs: NCCL cannot join"):
        server_gpus(VllmConfig(servers=1, tp=2, gpus=["3,5"], transport=Transport.nccl), 2)
    assert server_gpus(VllmConfig(servers=1, gpus=["5"], transport=Transport.nccl), 2) == ["5"]


def test_ipc_to_a_gpu_without_the_actor_is_refused():
    with pytest.raises(ValueError, match=r"ipc and there are servers on GPU 5, where no process of the actor runs"):
        server_gpus(VllmConfig(servers=2, gpus=["2", "5"], transport=Transport.ipc), 2)
    assert server_gpus(VllmConfig(servers=2, gpus=["2", "2"], transport=Transport.ipc), 2) == ["2", "2"]
