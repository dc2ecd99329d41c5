"""The wire that a push is compared with."""

from types import SimpleNamespace

import pytest
import torch

from jetrl_megatron.bench import sync, timing
from jetrl_megatron.config import Engine, Recipe, RolloutConfig, Transport, VllmConfig


def session_of(transport, device="cuda", rank=0):
    recipe = Recipe(rollout=RolloutConfig(engine=Engine.vllm_pool, vllm=VllmConfig(transport=transport)))
    return SimpleNamespace(recipe=recipe, device=torch.device(device), ranks=SimpleNamespace(is_logger=rank == 0, dp=1))


@pytest.mark.parametrize(
    ("transport", "link", "name", "bytes_a_s"),
    [
        (Transport.nccl, 50.0, "copy between GPUs", 50.0),
        (Transport.nccl, None, "copy within a GPU", 200.0),  # the actor sees its own GPU only
        (Transport.ipc, 50.0, "copy within a GPU", 200.0),
        (Transport.disk, 50.0, "copy within a GPU", 200.0),
    ],
)
def test_a_push_is_compared_with_a_copy_along_its_way(monkeypatch, transport, link, name, bytes_a_s):
    monkeypatch.setattr(sync, "link_bandwidth", lambda: link)
    monkeypatch.setattr(sync, "copy_bandwidth", lambda: 400.0)  # bytes read plus bytes written
    assert sync.wire_of(session_of(transport)) == sync.Wire(name, bytes_a_s)


@pytest.mark.parametrize(("device", "rank"), [("cpu", 0), ("cuda", 1)])
def test_one_rank_alone_measures_and_only_on_a_gpu(device, rank):
    assert sync.wire_of(session_of(Transport.nccl, device, rank)) is None


@pytest.mark.parametrize(("here", "count", "there"), [(0, 2, 1), (1, 2, 0), (0, 4, 3), (3, 4, 2)])
def test_the_link_goes_to_another_gpu(monkeypatch, here, count, there):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    made = []
    monkeypatch.setattr(torch, "empty", lambda *a, **k: SimpleNamespace(random_=lambda: SimpleNamespace(numel=lambda: 100)))
    monkeypatch.setattr(torch, "empty_like", lambda source, device: made.append(device))
    monkeypatch.setattr(timing, "measure", lambda run, batch: timing.Timing(1000.0, 0.0, 0.0, 1))
    assert timing.link_bandwidth() == 100.0 and made == [torch.device("cuda", there)]


def test_a_single_gpu_has_no_link(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert timing.link_bandwidth() is None
