"""Weights that reach a real engine in buckets, as over CUDA IPC, after a sleep: every tensor is verified, and it answers with them."""

import pytest
import torch
from safetensors.torch import load_file

from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.rollout import vllm_server
from jetrl_megatron.rollout.bucket import fill_buckets
from jetrl_megatron.rollout.vllm_server import new_key, server_command
from jetrl_megatron.rollout.vllm_verify import WeightMismatch
from tests.vllm.engines import make_pool, publish, write_model

NUM_BYTES = 300_000
"""Of a bucket: layers are cut over several."""


def load_in_buckets(path, left_out=""):
    def load(client, published):
        buffer = torch.from_file(str(path), shared=True, size=NUM_BYTES, dtype=torch.uint8)
        tensors = [(n, t) for n, t in load_file(published.directory / "model.safetensors").items() if n != left_out]
        handles = {"file": {"path": str(path), "num_bytes": NUM_BYTES}}
        buckets = 0
        for bucket in fill_buckets(tensors, [buffer]):
            client.rpc("jetrl_load", {"bucket": {**bucket, "handles": handles}}, 60.0)
            buckets += 1
        assert buckets > 3

    return load


@pytest.mark.skipif(torch.cuda.is_available(), reason="the buckets are files of the host")
def test_an_engine_loaded_in_buckets_holds_what_a_directory_holds(tmp_path, monkeypatch):
    def command(*given):
        real = "jetrl_megatron.rollout.vllm_worker.WeightReader"
        return ["tests.vllm.file_reader.FileReader" if word == real else word for word in server_command(*given)]

    monkeypatch.setattr(vllm_server, "server_command", command)
    a, b = (write_model(tmp_path / name, "qwen3", seed, fp8=True) for seed, name in enumerate("ab"))
    pool = make_pool(a, 1, tmp_path / "logs", new_key())
    greedy = SamplingParams(max_new_toks=16, temperature=0.0)
    try:
        pool.update(publish(a, 0), load_in_buckets(tmp_path / "buffer"))  # it starts on a
        before = pool.complete(0, [5, 6, 7], greedy, 1)
        for step, model in enumerate((b, a), 1):
            pool.rest()
            pool.update(publish(model, step), load_in_buckets(tmp_path / "buffer"))
            assert (pool.complete(0, [5, 6, 7], greedy, 1).token_ids == before.token_ids) == (model is a)
        with pytest.raises(WeightMismatch, match=r"version 3: rank 0: model\.norm\.weight.* differs"):
            pool.update(publish(b, 3), load_in_buckets(tmp_path / "buffer", left_out="model.norm.weight"))
    finally:
        pool.close()
