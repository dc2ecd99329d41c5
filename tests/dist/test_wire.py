"""What the actor sends is the checkpoint, byte for byte, from every layout; a version that fails does not move."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conversion.architecture import ModelArchitecture
from conversion.convert import Target, convert
from tests.dist.ipc_run import ALIVE, ASLEEP, BEFORE, push_in_place, push_stale, push_without_memory
from tests.dist.ipc_run import push as push_ipc
from tests.dist.nccl_run import push as push_nccl
from tests.dist.ranks import run_ranks
from tests.dist.wire_run import push, push_once, push_to_a_full_disk, stream_all
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


def table(directory: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return what the stream of a whole model must be: a converted directory's tensors."""
    found = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest())
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {}
    for family in ("qwen3", "llama", "qwen2"):
        changes = {"num_attention_heads": 8, "num_key_value_heads": 4} if family == "llama" else {}
        made[family] = write_tiny_model(root / family, family, num_hidden_layers=2, **changes)
        convert(made[family], root / f"{family}-fp8", Target(kind="hf", cast="fp32"))
    return made


CASES = {
    1: [
        ("qwen3", 1, 1, "k_complete", "jetrl", 2**28),
        ("qwen3", 1, 1, "k_complete", "jetrl", 200_000),
        ("qwen2", 1, 1, "k_complete", "bf16", 2**28),
    ],
    2: [
        ("qwen3", 2, 1, "k_complete", "jetrl", 200_000),
        ("qwen3", 2, 1, "k_split", "fp8_rollout", 2**28),
        ("llama", 2, 1, "k_complete", "jetrl", 2**28),  # head_dim 64: q, k and v are quantised apart; tied
        ("llama", 1, 2, "k_complete", "jetrl", 2**28),  # tied over two stages: the embedding is sent once
        ("qwen2", 2, 1, "k_complete", "bf16", 2**28),
    ],
}


@pytest.mark.parametrize("num_processes", CASES)
def test_the_stream_is_the_converted_checkpoint(models, num_processes):
    cases = CASES[num_processes]
    by_rank = run_ranks(stream_all, num_processes, [(str(models[family]), *rest) for family, *rest in cases])
    for number, (family, _, _, _, arm, _) in enumerate(cases):
        parts = [rank[number] for rank in by_rank]
        sent = [name for part in parts for name in part]
        assert len(sent) == len(set(sent))
        wanted = table(models[family] if arm == "bf16" else models[family].with_name(f"{family}-fp8"))
        assert {k: v for part in parts for k, v in part.items()} == wanted, cases[number]


def test_pushes_one_after_another(models, tmp_path):
    (one,) = run_ranks(push, 1, str(models["qwen3"]), str(tmp_path / "w"), 1, 1)
    first, second, stale, changed, failed, kept, backwards, left = one
    assert (first.step, second.step, changed.step) == (0, 1, 2)
    assert first.sha256 == second.sha256 != changed.sha256
    assert stale == "stale: True"
    assert failed.endswith("x differs") and kept == changed
    assert backwards == "version 1 would follow 2; versions only grow"
    assert left == ["v00000002", "v00000003"], "what the servers hold stays until its successor is verified"


@pytest.mark.parametrize(("tp", "pp", "full"), [(2, 1, 0), (1, 2, 0), (1, 2, 1)])
def test_a_full_disk_ends_the_push_on_every_rank_with_the_file(models, tmp_path, tp, pp, full):
    """No rank is left in the middle of a gather; and with room the next push is a whole one."""
    ends = run_ranks(push_to_a_full_disk, 2, str(models["qwen3"]), str(tmp_path / "w"), tp, pp, full)
    file = "model.safetensors" if pp == 1 else f"model-0000{full + 1}-of-00002.safetensors"
    cause = f"[Errno 28] No space left on device: '{file}'"
    told = f"a pipeline stage could not write its weights: {cause}" if full else cause
    assert ends[full][0] == [f"OSError: {cause}", "version 0"]
    assert ends[1 - full][0] == [f"RunFailure: {told}" if full else f"RunFailure: rank 0: {told}", "version 0"]
    assert ends[0][1] == ["v00000000"]


def test_two_stages_write_one_checkpoint(models, tmp_path):
    versions = run_ranks(push_once, 2, str(models["qwen3"]), str(tmp_path / "w"), 1, 2)
    assert versions[0] == versions[1]
    files = sorted(p.name for p in (tmp_path / "w" / "v00000000").glob("*.safetensors*"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    index = json.loads((tmp_path / "w" / "v00000000" / files[-1]).read_text())
    held = {name: (file, tensor) for file in files[:2] for name, tensor in load_file(tmp_path / "w" / "v00000000" / file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in held.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in held.values())
    (single,) = run_ranks(push_once, 1, str(models["qwen3"]), str(tmp_path / "x"), 1, 1)
    assert single == versions[0], "the digest of a version does not depend on the actor's layout"


@pytest.mark.parametrize(("tp", "dies_at"), [(1, ALIVE), (2, ALIVE), (1, 2), (1, ASLEEP), (1, BEFORE)])
def test_ipc_brings_every_server_the_buffer_of_the_rank_on_its_gpu(models, tmp_path, tp, dies_at):
    """Two replicas (tp=1) or two TP ranks, a server on each; the one on GPU 1 may die before or in the middle, and the other goes on."""
    (version, gone, servers, by_rank), other = run_ranks(push_ipc, 2, str(models["qwen3"]), str(tmp_path), tp, 300_000, dies_at)
    assert version == other and gone == ([] if dies_at == ALIVE else [1])
    wanted = {name: digest for name, (_, _, digest) in table(models["qwen3"].with_name("qwen3-fp8")).items()}
    assert {key.partition("[")[0]: text for key, text in by_rank[0].items()} == {name: f"sha256:{text}" for name, text in wanted.items()}
    for gpu, (calls, held) in enumerate(servers):
        number = len(servers[0][0])
        whole = [("jetrl_load", n == 0, n == number - 1) for n in range(number)]
        assert number > 3 and calls == (whole[: max(dies_at, 0)] if gpu in gone else whole)
        assert gpu in gone or held == wanted


def test_servers_that_write_in_place_are_told_the_model_with_the_first_bucket(models, tmp_path):
    told, _ = run_ranks(push_in_place, 2, str(models["qwen3"]), str(tmp_path))
    wanted = ModelArchitecture.from_hf_directory(models["qwen3"])
    assert [ModelArchitecture.from_hf_config(config) for config, *_ in told] == [wanted, wanted]
    assert [len(rest) > 2 and set(rest) == {None} for _, *rest in told] == [True, True]


def test_a_push_by_ipc_that_fails_while_it_sends_keeps_the_version(models, tmp_path):
    ((first, after, error, calls),) = run_ranks(push_stale, 1, str(models["qwen3"]), str(tmp_path))
    assert after == first and first.step == 0 and "was modified after the last refresh" in error
    assert calls[0] > 0


def test_a_push_by_ipc_without_memory_for_its_buffers_lets_the_servers_threads_go(models, tmp_path):
    """A thread that waits for a bucket keeps the process from its end."""
    ((error, left),) = run_ranks(push_without_memory, 1, str(models["qwen3"]), str(tmp_path))
    assert error.startswith("no memory for ") and left == []


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (1, 1)])
def test_nccl_sends_what_it_announced_in_one_pass_and_every_stage_says_what_it_sent(models, tmp_path, tp, pp):
    """One or two stages or TP ranks, or two replicas, to two servers; vLLM's sender is one of Python here."""
    in_place = (tp, pp) == (2, 1)
    (version, expected, update, sent, events), other = run_ranks(push_nccl, 2, str(models["llama"]), str(tmp_path), tp, pp, "", -1, in_place)
    assert version == other == expected.version
    wanted = table(models["llama"].with_name("llama-fp8"))
    assert {name: kept for name, kept in sent} == wanted and [name for name, _ in sent] == update["names"]
    described = list(zip(update["names"], update["dtype_names"], map(tuple, update["shapes"]), strict=True))
    assert described == [(name, kept[0].removeprefix("torch."), kept[1]) for name, kept in sent]
    texts = {key.partition("[")[0]: text for key, text in expected.by_rank[0].items()}
    assert texts == {name: f"sha256:{text}" for name, (_, _, text) in wanted.items()}
    routes = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert events == [routes, routes]
    assert ("config" in update) == in_place, "vllm's own engine takes no other words"
    wanted_arch = ModelArchitecture.from_hf_directory(models["llama"])
    assert not in_place or ModelArchitecture.from_hf_config(update["config"]) == wanted_arch


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_a_sender_that_breaks_off_fails_the_nccl_push_on_every_rank_and_leaves_none_waiting(models, tmp_path, tp, pp):
    first, other = run_ranks(push_nccl, 2, str(models["llama"]), str(tmp_path), tp, pp, "", 2)
    assert first.startswith("no memory for ") and other == f"rank 0: {first}"


def test_a_server_that_does_not_start_fails_the_nccl_push_on_every_rank(models, tmp_path):
    errors = run_ranks(push_nccl, 2, str(models["llama"]), str(tmp_path), 2, 1, "server 0 does not start")
    assert errors == ["server 0 does not start", "rank 0: server 0 does not start"]
