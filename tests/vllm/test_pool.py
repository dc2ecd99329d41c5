"""Two real servers: pushes, verification, restarts, the prefix cache, sampling, and who is let in.

The tests share the servers and follow each other in this order: each leaves the pool verified on some model.
"""

import json
import os
import re
import shutil
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.architecture import read_config
from conversion.cast import dequantize_bytes
from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.rollout.vllm_client import GENERATE, EngineClient, ServerGone
from jetrl_megatron.rollout.vllm_pool import PoolLimits, ServerPool
from jetrl_megatron.rollout.vllm_server import new_key
from jetrl_megatron.rollout.vllm_verify import WeightMismatch
from tests.vllm.engines import MAX_LEN, load_from_disk, make_pool, publish, verify, write_model

ENGINE_NOISE = 0.5 if torch.cuda.is_available() else 0.15
"""Nats that BF16 (and on CUDA FP8 activations) may move a log-prob; temperature 0.3, top-k 20 or a repetition penalty move it by more."""
PROMPT = [5 + i % 60 for i in range(64)]
GREEDY = SamplingParams(max_new_toks=16, temperature=0.0)


class World:
    """The servers and models that the tests of this file share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.a, self.b = (write_model(root / name, "qwen3", seed, fp8=torch.cuda.is_available()) for seed, name in enumerate("ab"))
        self.key = new_key()
        self.pool = make_pool(self.a, 2, root / "logs", self.key)
        self.pool.update(publish(self.a, 0), self.refuse)

    @staticmethod
    def refuse(client, published):
        raise AssertionError("a server that was started on the published weights is not loaded again")

    def client(self, number: int) -> EngineClient:
        client = self.pool._members[number].client
        assert client is not None
        return client

    def push(self, directory: Path, step: int) -> None:
        self.pool.update(publish(directory, step), load_from_disk)

    def draws(self, number: int):
        """Return a greedy and a sampled completion of a long prompt."""
        sampled = SamplingParams(max_new_toks=16, temperature=0.8)
        return [self.pool.complete(number, PROMPT, p, 1234) for p in (GREEDY, sampled)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    shared = World(tmp_path_factory.mktemp("pool"))
    yield shared
    shared.pool.close()


def test_two_servers_start_verified_and_agree(world):
    assert world.pool.version == 0 and world.pool.ready() == [0, 1]
    assert world.draws(0) == world.draws(1)


def test_identical_pushes_change_nothing(world):
    before = world.draws(0)
    for step in (1, 2, 3):
        world.push(world.a, step)
        assert world.draws(0) == before
    assert world.pool.version == 3


def test_pushed_weights_equal_a_fresh_engine_and_no_prefix_is_remembered(world):
    before = world.draws(0)
    world.push(world.b, 4)
    pushed = world.draws(0)
    assert pushed != before
    os.kill(world.pool.pids()[1], signal.SIGKILL)
    with pytest.raises(ServerGone) as gone:
        world.pool.complete(1, PROMPT, GREEDY, 1)
    world.pool.gone(1, gone.value)
    assert world.pool.ready() == [0]
    deadline = time.monotonic() + 300
    while world.pool.ready() != [0, 1]:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert world.draws(1) == pushed, "a server that saw another model before answers like one that did not"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA a tied head shares the embedding's memory")
def test_a_tied_head_that_a_reload_leaves_behind_is_seen_and_brought_up_to_date(world):
    """The reason for `refresh_tied_head`. Without AVX-512 the engine's head multiplies by the embedding's rows, and none is stale."""
    published, client = publish(world.a, 5), world.client(0)
    client.pause(30.0)
    load_from_disk(client, published)
    try:
        verify(world.pool, 0, client, published)
    except WeightMismatch as stale:
        assert re.search(r"model\.embed_tokens\.weight\[0:203,0:256\] differs$", str(stale)), stale
    verify(world.pool, 0, client, published, refresh=True)
    world.push(world.a, 5)


def changed_copy(world, name, change):
    out = world.root / name
    shutil.copytree(world.a, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_a_push_that_did_not_happen_is_seen_and_named(world):
    norm = "model.layers.1.input_layernorm.weight"

    def other(tensors):
        tensors[norm] = tensors[norm] * 2

    changed = changed_copy(world, "changed", other)
    with pytest.raises(WeightMismatch, match=rf"server \d does not hold version 6: rank 0: {norm}\[0:256,0:1\] differs$"):
        world.pool.update(publish(changed, 6), lambda client, published: None)
    assert world.pool.version == 5 and world.pool.ready() == []
    world.push(changed, 7)
    assert world.pool.version == 7


def test_a_misspelt_name_fails_the_push(world):
    norm = "model.layers.1.input_layernorm.weight"
    right = publish(world.a, 8)
    misspelt = changed_copy(world, "misspelt", lambda t: t.update({"model.layers.1.input_layernrom.weight": t.pop(norm)}))

    def load(client, published):
        client.rpc("reload_weights", {"weights_path": str(misspelt)}, 120.0)

    restarts = world.pool.counts.restarts
    try:
        world.pool.update(right, load)
    except WeightMismatch as error:
        assert norm in str(error)
        world.push(world.a, 9)
    else:
        # vLLM refuses the name and its engine dies of it: the servers then came back on what was really published.
        assert world.pool.counts.restarts > restarts
    assert world.pool.ready() == [0, 1] and world.pool.version in (8, 9)


def reference_logprobs(directory: Path, ids: list[int], temperature: float) -> torch.Tensor:
    """Return the log-probs of every next token by transformers, on the dequantised weights, at a temperature and nothing else."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    tensors = load_file(directory / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        weight, scales = name.removesuffix("_scale_inv"), tensors.pop(name)
        codes = tensors[weight].view(torch.uint8).numpy()
        plain = torch.from_numpy(dequantize_bytes(name, codes, scales.numpy())).view(torch.bfloat16)
        tensors[weight] = plain.reshape(tensors[weight].shape)
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**config), dtype=torch.float32)
    model.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0] / temperature, -1)


def test_log_probs_are_those_of_the_sampled_distribution_whatever_the_model_directory_says(world):
    world.push(world.a, 10)
    for temperature in (0.6, 1.0):
        params = SamplingParams(max_new_toks=24, temperature=temperature)
        drawn = [world.pool.complete(i % 2, PROMPT[:20], params, seed) for i, seed in enumerate(range(6))]
        assert len({d.token_ids for d in drawn}) == 6
        for one in drawn:
            table = reference_logprobs(world.a, PROMPT[:20] + list(one.token_ids), temperature)
            wanted = table[19:-1].gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
            assert (torch.tensor(one.logprobs) - wanted).abs().max() < ENGINE_NOISE
    greedy = world.pool.complete(0, PROMPT[:20], GREEDY, 0)
    table = reference_logprobs(world.a, PROMPT[:20] + list(greedy.token_ids), 1.0)
    assert (torch.tensor(greedy.logprobs) - table[19:-1].amax(-1)).abs().max() < ENGINE_NOISE


def test_a_stop_token_is_kept_with_its_log_prob_and_the_reason_tells_truncation(world):
    whole = world.pool.complete(0, PROMPT, GREEDY, 0)
    assert len(whole.token_ids) == 16 and whole.finish_reason == "length"
    place = next(i for i in range(1, 16) if whole.token_ids[i] not in whole.token_ids[:i])
    stop = whole.token_ids[place]
    for limit in (16, place + 1):  # the second: a stop token exactly at the limit
        params = SamplingParams(max_new_toks=limit, temperature=0.0, stop_token_ids=(201, stop))
        short = world.pool.complete(0, PROMPT, params, 0)
        assert short.token_ids == whole.token_ids[: place + 1] and short.logprobs == whole.logprobs[: place + 1]
        assert short.finish_reason == "stop"
    one = world.pool.complete(0, PROMPT, SamplingParams(max_new_toks=1, temperature=0.0), 0)
    assert one.token_ids == whole.token_ids[:1] and one.finish_reason == "length"


def test_a_request_that_the_server_refuses_is_no_dead_server(world):
    with pytest.raises(ValueError, match="answered 400"):
        world.pool.complete(0, PROMPT * 10, GREEDY, 0)
    assert world.client(0).healthy()


@pytest.mark.parametrize("level", [None, 0, 2])
def test_a_server_found_by_its_url_serves_if_it_was_paused_or_asleep_and_says_how_much_it_takes(world, level):
    client = world.client(0)
    if level is not None:
        client.control(f"/sleep?level={level}", None, 30.0)
    limits = PoolLimits(request_timeout_s=30.0, push_timeout_s=120.0, max_restarts=0)
    found = ServerPool([], [client], read_config(world.a), limits)
    found.update(publish(world.a, 11), load_from_disk)
    assert found.ready() == [0] and found.shortest() == (MAX_LEN, f"{client.url} (its --max-model-len)")
    assert found.complete(0, PROMPT, GREEDY, 0) == world.pool.complete(1, PROMPT, GREEDY, 0)
    assert world.pool.shortest() is None, "the run's own take what the model does"


def status_of(url: str, verb: str, key: str | None, body: bytes = b"{}") -> int:
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    request = urllib.request.Request(url, data=body if verb == "POST" else None, headers=headers, method=verb)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_nobody_gets_in_without_the_key(world):
    client, before = world.client(0), world.draws(0)
    routes = client._call("GET", "/openapi.json", None, 30.0)["paths"]
    needed = {"/update_weights", "/start_weight_update", "/finish_weight_update", "/init_weight_transfer_engine", "/collective_rpc"}
    needed |= {"/pause", "/resume", "/reset_prefix_cache", "/abort_requests", "/sleep", "/wake_up", GENERATE, "/server_info"}
    assert needed <= routes.keys()
    calls = [(route, verb.upper()) for route, verbs in routes.items() for verb in verbs if verb in ("get", "post")]
    calls += [("/docs", "GET"), ("/openapi.json", "GET"), ("/metrics", "GET"), ("/nowhere", "POST")]
    for key in (None, "", new_key(), world.key[:-1], world.key + "x"):
        assert {status_of(client.url + route, verb, key) for route, verb in calls} == {401}
    body = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": str(world.b)}}).encode()
    assert status_of(client.url + "/collective_rpc", "POST", new_key(), body) == 401
    assert world.draws(0) == before
    assert status_of(client.url + "/is_paused", "GET", world.key) == 200


def test_servers_listen_on_loopback_only_and_show_the_key_nowhere(world):
    for pid in world.pool.pids():
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        listening = [c for p in tree for c in p.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        assert listening and {c.laddr.ip for c in listening} <= {"127.0.0.1", "::1"}, listening
        assert not [p for p in tree if world.key in " ".join(p.cmdline())]
    logs = list((world.root / "logs").glob("*.log"))
    assert len(logs) >= 3 and not [f for f in logs if world.key in f.read_text(errors="replace")]
    assert not [f for f in logs if str(PROMPT[:8])[1:-1] in f.read_text(errors="replace")], "prompts are not logged"


def test_no_process_outlives_the_pool(world):
    trees = [p for pid in world.pool.pids() for p in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    assert len(trees) >= 4
    ports = [int(world.client(n).url.rpartition(":")[2]) for n in (0, 1)]
    world.pool.close()
    gone, alive = psutil.wait_procs(trees, timeout=20)
    assert not alive and len(gone) == len(trees)
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
