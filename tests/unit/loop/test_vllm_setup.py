"""Which GPUs servers get, and what NCCL cannot join."""

import re
from dataclasses import replace

import pytest

from conversion.architecture import ModelArchitecture
from jetrl_megatron.config import Recipe, Transport, VllmConfig
from jetrl_megatron.loop import vllm_setup
from jetrl_megatron.loop.vllm_setup import check_vllm, chosen_gpus, server_gpus, server_pool, server_spec
from tests.tiny_models import tiny_config


@pytest.fixture(autouse=True)
def four_named_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")


def test_servers_get_the_visible_gpus_behind_the_actors():
    assert server_gpus(VllmConfig(servers=1, tp=2), 2) == ["5,7"]
    assert server_gpus(VllmConfig(servers=2, tp=1), 2) == ["5", "7"]
    assert server_gpus(VllmConfig(servers=2, gpus=["2", "2"]), 2) == ["2", "2"]


def test_servers_alone_get_the_first_gpus_whatever_would_bring_their_weights():
    for transport in Transport:
        assert chosen_gpus(VllmConfig(servers=2, tp=2, transport=transport), 0) == ["2,3", "5,7"]
        assert chosen_gpus(VllmConfig(servers=1, gpus=["7"], transport=transport), 0) == ["7"]


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


def test_a_tp_degree_that_the_model_cannot_be_cut_by_is_refused_by_its_key(monkeypatch):
    monkeypatch.setattr(vllm_setup, "check_engine", lambda: "0.30")
    arch = ModelArchitecture.from_hf_config(tiny_config("qwen3").to_dict())
    check_vllm(Recipe(), VllmConfig(tp=2, transport=Transport.disk), arch, on_cuda=False)
    with pytest.raises(ValueError, match=r"rollout\.vllm\.tp is 3: tp=3 is illegal for this model: .*; TP degrees that work: 1, 2"):
        check_vllm(Recipe(), VllmConfig(tp=3, transport=Transport.disk), arch, on_cuda=False)


def test_heads_that_vllms_qwen2_cannot_have_are_refused(monkeypatch):
    monkeypatch.setattr(vllm_setup, "check_engine", lambda: "0.30")
    disk = VllmConfig(transport=Transport.disk)
    own = ModelArchitecture.from_hf_config(tiny_config("qwen2").to_dict())
    assert own.head_dim * own.num_heads == own.hidden_size
    check_vllm(Recipe(), disk, own, on_cuda=False)
    check_vllm(Recipe(), disk, replace(own, family="llama", head_dim=2 * own.head_dim), on_cuda=False)
    with pytest.raises(
        ValueError, match=rf"head_dim is {2 * own.head_dim}, with .*: vLLM's qwen2 .* takes {own.head_dim}; use rollout.engine=local"
    ):
        check_vllm(Recipe(), disk, replace(own, head_dim=2 * own.head_dim), on_cuda=False)


@pytest.mark.parametrize("gib", [0.0, -1.0, 1e-10, float("inf"), float("nan")])
def test_a_kv_cache_that_vllm_could_not_hold_is_refused(gib):
    with pytest.raises(ValueError, match=r"rollout\.vllm\.kv_cache_gib is "):
        VllmConfig(kv_cache_gib=gib)


def test_a_kv_cache_of_servers_that_somebody_else_started_is_refused():
    with pytest.raises(ValueError, match=r"kv_cache_gib is 4\.0 and rollout\.vllm\.servers is 0: servers of rollout\.vllm\.urls were"):
        VllmConfig(kv_cache_gib=4.0, servers=0, urls=["http://a:1"])


def test_so_many_sequences_that_no_command_line_holds_their_graphs_are_refused():
    with pytest.raises(ValueError, match=r"rollout\.vllm\.max_num_seqs is "):
        VllmConfig(max_num_seqs=10**14)


def test_a_servers_settings_come_from_the_recipe(tmp_path):
    cfg = VllmConfig(kv_cache_gib=3.0, gpu_memory_utilization=0.25, max_num_seqs=17, tp=2, transport=Transport.disk)
    arch = ModelArchitecture.from_hf_config(tiny_config("qwen3").to_dict())
    (tmp_path / "config.json").write_text(tiny_config("qwen3").to_json_string())
    spec = server_spec(Recipe(), cfg, arch, True, tmp_path)
    pool = server_pool(Recipe(), cfg, arch, spec, ["0,1"], tmp_path)
    assert pool._members[0].server._spec is spec and spec.on_cuda and spec.max_model_len == arch.max_positions
    assert (spec.kv_cache_gib, spec.gpu_memory_utilization, spec.max_num_seqs, spec.tp) == (3.0, 0.25, 17, 2)


def test_a_server_of_several_gpus_is_given_as_many():
    with pytest.raises(ValueError, match=r"gpus gives a server '5' and rollout\.vllm\.tp is 2; name 2 for each"):
        VllmConfig(servers=2, tp=2, gpus=["2,3", "5"])


@pytest.mark.parametrize(
    "url",
    [
        "https://h:1",
        "h:1",
        "http://h",
        "http://h:1/v1",
        "http://h:1?a=b",
        "http://h:99999",
        "http://:1",
        "http://u:p@h:1",
        "http://h:x",
        "",
    ],
)
def test_an_address_that_is_none_of_a_server_is_refused_by_name(url):
    """A path or the TLS of https would be dropped on the way, and the key go out in the clear to whoever answers."""
    with pytest.raises(ValueError, match=rf"urls names {re.escape(repr(url))}; an engine server is http://HOST:PORT"):
        VllmConfig(servers=0, urls=[url])


def test_a_server_is_named_once():
    VllmConfig(servers=0, urls=["http://h:1/", "http://h:2", "http://[::1]:1"])
    with pytest.raises(ValueError, match="urls names http://H:1/ and its port more than once"):
        VllmConfig(servers=0, urls=["http://H:1/", "http://h:1"])
