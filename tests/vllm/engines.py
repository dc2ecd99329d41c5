"""Small models for real servers, what was published of them, and a pool on them."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from conversion.architecture import ModelArchitecture, read_config
from conversion.convert import Target, convert
from conversion.names import SCALE_SUFFIX
from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.data.tokenizer import build_char_tokenizer
from jetrl_megatron.loop.synthetic_model import ALPHABET
from jetrl_megatron.rollout.published import Expected, Fingerprints, Published
from jetrl_megatron.rollout.vllm_client import EngineClient
from jetrl_megatron.rollout.vllm_pool import PoolLimits, ServerPool
from jetrl_megatron.rollout.vllm_server import ServerSpec, VllmServer
from jetrl_megatron.rollout.vllm_verify import verify_weights
from tests.tiny_models import write_tiny_model

MAX_LEN = 256


def write_model(out: Path, family: str, seed: int, fp8: bool) -> Path:
    """Write a tiny tied model with a tokenizer and a generation_config.json full of sampling habits."""
    source = write_tiny_model(out.with_name(out.name + "-bf16"), family, seed=seed, num_hidden_layers=2, tie_word_embeddings=True)
    if fp8:
        convert(source, out, Target(kind="hf", cast="fp32"))
    else:
        shutil.copytree(source, out)
    tokenizer = out.with_name(out.name + "-tokenizer")
    build_char_tokenizer(tokenizer, ALPHABET)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, out)
    habits = {"repetition_penalty": 1.1, "top_k": 20, "temperature": 0.3, "eos_token_id": [2, 7], "do_sample": True}
    (out / "generation_config.json").write_text(json.dumps(habits))
    return out


def publish(directory: Path, step: int) -> Published:
    """Describe a directory as the actor would have published it."""
    tensors = load_file(directory / "model.safetensors")
    fp8 = frozenset(n.removesuffix(".weight" + SCALE_SUFFIX) for n in tensors if n.endswith(SCALE_SUFFIX))
    prints = Fingerprints(ModelArchitecture.from_hf_directory(directory), 1, fp8, "sha256")
    for name, tensor in tensors.items():
        prints.add(name, tensor)
    expected, unsigned = prints.take()
    held = Expected(version=WeightVersion(step, directory.name), by_rank=tuple(expected), unsigned=unsigned)
    return Published(step=step, directory=directory, has_weights=True, algorithm="sha256", expected=held.at_hand())


def make_pool(directory: Path, num_servers: int, log_dir: Path, key: str) -> ServerPool:
    """Return a pool, not yet started, for models like the one in `directory`; on CUDA with graphs, and all servers on the first GPU."""
    on_cuda = torch.cuda.is_available()
    spec = ServerSpec(
        tp=1,
        max_model_len=MAX_LEN,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        kv_cache_gib=1.0,
        cuda_graphs=on_cuda,
        prefix_caching=True,
        transport="disk",
        power_of_two_scales=False,
        on_cuda=on_cuda,
        log_dir=log_dir,
        start_timeout_s=550.0,
    )
    servers = [VllmServer(number, spec, key, "0" if on_cuda else "") for number in range(num_servers)]
    limits = PoolLimits(request_timeout_s=120.0, push_timeout_s=120.0, max_restarts=2)
    return ServerPool(servers, [], read_config(directory), limits)


def load_from_disk(client, published):
    client.rpc("reload_weights", {"weights_path": str(published.directory)}, 120.0)


def verify(pool: ServerPool, number: int, client: EngineClient | None, published: Published | None, refresh: bool = False) -> None:
    """Ask a server, as an outsider, whether it holds what was published; without `refresh` nothing in it changes."""
    assert client is not None and published is not None
    verify_weights(f"engine server {number}", client, published, pool._members[number].model_config, 120.0, refresh=refresh, slept=False)
