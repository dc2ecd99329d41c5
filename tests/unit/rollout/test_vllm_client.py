"""What the client asks for and what it accepts; what the door lets through; what a server's command line and environment hold."""

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.rollout import vllm_auth
from jetrl_megatron.rollout.vllm_auth import KEY_VARIABLE, RequireKey, key_of_environment
from jetrl_megatron.rollout.vllm_client import EngineClient, ServerGone, parse_completion
from jetrl_megatron.rollout.vllm_engine import request_seed
from jetrl_megatron.rollout.vllm_server import ServerSpec, new_key, server_command, server_environment

KEY = "k" * 40
SPEC = ServerSpec(
    tp=2,
    max_model_len=512,
    max_num_seqs=8,
    gpu_memory_utilization=0.5,
    cuda_graphs=True,
    prefix_caching=True,
    transport="disk",
    power_of_two_scales=False,
    on_cuda=True,
    log_dir=Path("logs"),
    start_timeout_s=1.0,
)


def answer(ids=(5, 6), logprobs=(-0.5, -0.25), reason="stop", named=None):
    content = [{"token": f"token_id:{i}", "logprob": value, "top_logprobs": []} for i, value in zip(named or ids, logprobs, strict=False)]
    return {"choices": [{"token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason}]}


def test_a_whole_completion_is_taken_as_it_is():
    drawn = parse_completion(answer())
    assert (drawn.token_ids, drawn.logprobs, drawn.finish_reason) == ((5, 6), (-0.5, -0.25), "stop")


@pytest.mark.parametrize(
    "broken",
    [
        answer(ids=(5, 6, 7)),
        answer(logprobs=(-0.5,)),
        answer(logprobs=(-0.5, -9999.0)),
        answer(named=(5, 7)),
        answer(named=(6, 5)),
        answer(ids=(), logprobs=()),
        answer(reason="abort"),
        answer(logprobs=(-0.5, None)),
        answer(logprobs=(-0.5, float("nan"))),
        answer(logprobs=(-0.5, float("inf"))),
        answer(logprobs=(-0.5, 0.25)),
        answer(logprobs=(-0.5, "-0.5")),
        answer(ids=(5, -6)),
        answer(ids=("5", "6")),
        {"choices": ["text"]},
        {"choices": 3},
        {"choices": [{"token_ids": [5], "logprobs": {"content": ["-0.5"]}, "finish_reason": "stop"}]},
        {"choices": [{"token_ids": [5], "logprobs": None, "finish_reason": "stop"}]},
        {"choices": []},
        {"error": "something else"},
    ],
)
def test_a_completion_whose_ids_and_logprobs_do_not_keep_step_is_no_result(broken):
    with pytest.raises(ServerGone):
        parse_completion(broken)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (answer(reason="length"), r"cut a completion off after 2 of 3 tokens, behind a prompt of 4.*--max-model-len"),
        (answer(reason="stop"), r"ended a completion with token 6, no stop token of \(7, 8\)"),
        (answer(ids=(1, 2, 3, 8), logprobs=(-1.0,) * 4), r"gave 4 tokens where 3 were asked for"),
    ],
)
def test_a_completion_that_ends_where_the_run_would_not_end_it_is_refused(monkeypatch, given, said):
    """The route for token ids lets a request pass whose limit is beyond the server's context, and cuts it there."""
    monkeypatch.setattr(EngineClient, "_call", lambda *_: given)
    client, params = EngineClient(url="http://h:1", key=KEY, fields={}), SamplingParams(max_new_toks=3, stop_token_ids=(7, 8))
    with pytest.raises(ValueError, match=said):
        client.complete([1, 2, 3, 4], params, 0, 1.0)
    for whole in (answer(ids=(5, 6, 9), logprobs=(-1.0,) * 3, reason="length"), answer(ids=(5, 8))):
        given.update(whole)
        assert client.complete([1], params, 0, 1.0) == parse_completion(whole)


def test_every_sampling_field_is_set_so_that_no_model_directory_can_fill_it_in():
    body = EngineClient(url="http://h:1", key=KEY, fields={"watermarking": False})._body(
        [1, 2], SamplingParams(max_new_toks=7, temperature=0.6, stop_token_ids=(3, 4)), 99
    )
    assert body.keys() == {"token_ids", "sampling_params"} and body["token_ids"] == [1, 2]
    sent = body["sampling_params"]
    assert sent["max_tokens"] == 7 and sent["seed"] == 99 and sent["stop_token_ids"] == [3, 4]
    neutral = {"temperature": 0.6, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "n": 1}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "watermarking": False}
    neutral |= {"logprobs": 0, "detokenize": False, "output_kind": 2}
    assert {k: sent[k] for k in neutral} == neutral


@pytest.mark.parametrize("given", [{"success": False}, {}, {"success": "true"}])
def test_a_prefix_cache_that_was_not_reset_is_no_success(monkeypatch, given):
    client, asked_for = EngineClient(url="http://h:1", key=KEY, fields={}), []

    def call(self, verb, path, body, timeout_s):
        asked_for.append((verb, path))
        return given

    monkeypatch.setattr(EngineClient, "_call", call)
    with pytest.raises(ServerGone, match="prefix cache was not reset"):
        client.reset_prefix_cache()
    given["success"] = True
    client.reset_prefix_cache()
    assert asked_for == [("POST", "/reset_prefix_cache?reset_external=true")] * 2, "a KV connector's cache is of the old weights too"


@contextmanager
def answering(status, body):
    """A client of a server that answers everything so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield EngineClient(url=f"http://127.0.0.1:{server.server_port}", key=KEY, fields={})
        server.shutdown()


def test_a_server_that_somebody_else_started_is_told_what_it_lacks():
    with answering(404, b'{"detail":"Not Found"}') as client:
        with pytest.raises(ValueError, match=r"generate answered 404: .*Not Found.*without this route: start it with --tokens-only$"):
            client.complete([1], SamplingParams(max_new_toks=1, temperature=1.0), 1, 5.0)
        with pytest.raises(ValueError, match=r"collective_rpc answered 404: .*start it with VLLM_SERVER_DEV_MODE=1 in its environment$"):
            client.rpc("jetrl_prepare", {}, 5.0)
    with answering(401, b'{"error": "a key is needed"}') as client:
        with pytest.raises(ValueError, match=rf"answered 401: .*another key than {KEY_VARIABLE} holds here: start both with one$"):
            client.rpc("jetrl_prepare", {}, 5.0)
        assert not client.healthy(), "whoever has the port is no server of the run"
    for strange in (b"[1]", b'"ok"', b"<html>"):
        with answering(200, strange) as client, pytest.raises(ServerGone, match=r"answered something that is (no JSON object|not JSON)"):
            client.complete([1], SamplingParams(max_new_toks=1, temperature=1.0), 1, 5.0)
    with answering(200, b"{}") as client, pytest.raises(ServerGone, match=r"jetrl_prepare was answered without results: \{\}"):
        client.rpc("jetrl_prepare", {}, 5.0)
    with answering(400, b"too long") as client, pytest.raises(ValueError, match=r"answered 400: b'too long'$"):
        client.complete([1], SamplingParams(max_new_toks=1, temperature=1.0), 1, 5.0)


def test_request_seeds_depend_on_seed_prompt_and_sample_only():
    seeds = {request_seed(s, p, j) for s in (0, 1) for p in ("a", "b") for j in (0, 1)}
    assert len(seeds) == 8 and all(0 <= s < 2**63 for s in seeds)
    assert request_seed(1, "a", 0) == request_seed(1, "a", 0)


def test_a_kv_cache_of_a_given_size_is_asked_for_in_bytes():
    words = {gib: server_command(replace(SPEC, kv_cache_gib=gib), Path("model"), 1234, with_weights=True) for gib in (None, 0.5)}
    assert words[0.5][words[0.5].index("--kv-cache-memory-bytes") + 1] == str(2**29)
    assert "--kv-cache-memory-bytes" not in words[None]
    spec, name = replace(SPEC, on_cuda=False), "VLLM_CPU_KVCACHE_SPACE"
    for base, size in (({}, "1"), ({name: "7"}, "7")):
        assert server_environment(spec, KEY, "", base)[name] == size
        assert name not in server_environment(replace(spec, kv_cache_gib=2.0), KEY, "", base), "vLLM would take it before the given size"


def test_the_key_is_in_the_environment_and_nowhere_else():
    command = server_command(SPEC, Path("model"), 1234, with_weights=True)
    environment = server_environment(SPEC, KEY, "4,5", {"PATH": "p"})
    assert KEY not in " ".join(command)
    assert [k for k, v in environment.items() if v == KEY] == [KEY_VARIABLE]
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5" and environment["PATH"] == "p"
    assert KEY not in repr(EngineClient(url="http://h:1", key=KEY, fields={}))
    assert len({new_key() for _ in range(5)}) == 5 and len(new_key()) >= 40


def test_nothing_of_the_runs_launcher_reaches_a_server():
    """A server that finds a rank, an address to meet at or a batch job's variables takes itself for a part of the run."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JETRL_LAUNCHER_PID")
    launchers += ("TORCHELASTIC_X", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_CPU_BIND", "SLURM_PROCID", "SBATCH_EXPORT")
    others = {"PATH": "p", "NCCL_DEBUG": "INFO", "SLURMISH": "kept"}
    bare = server_environment(SPEC, KEY, "", others)
    assert others.items() <= bare.items()
    assert server_environment(SPEC, KEY, "", others | dict.fromkeys(launchers, "1")) == bare


def test_a_user_decides_when_an_engine_compiles_its_kernels_and_nothing_that_changes_numbers():
    others = {"VLLM_DEEP_GEMM_WARMUP": "relax", "VLLM_USE_DEEP_GEMM_E8M0": "1", "JETRL_OPERATORS": "0"}
    environment = server_environment(SPEC, KEY, "", others)
    assert {k: environment[k] for k in others} == others | {"VLLM_USE_DEEP_GEMM_E8M0": "0", "JETRL_OPERATORS": "1"}
    assert server_environment(SPEC, KEY, "", {})["VLLM_DEEP_GEMM_WARMUP"] == "skip"


def test_a_server_binds_to_loopback_behind_the_door_with_the_log_probs_of_its_own_distribution():
    words = server_command(SPEC, Path("model"), 1234, with_weights=False)
    pairs = dict(pairwise(words))
    assert pairs["--host"] == "127.0.0.1" and pairs["--middleware"] == "jetrl_megatron.rollout.vllm_auth.RequireKey"
    assert pairs["--logprobs-mode"] == "processed_logprobs" and pairs["--generation-config"] == "vllm"
    assert pairs["--load-format"] == "dummy" and pairs["--tensor-parallel-size"] == "2"
    assert server_environment(SPEC, KEY, "", {})["VLLM_USE_DEEP_GEMM_E8M0"] == "0"


def test_a_servers_workers_are_the_runs_unless_another_class_is_named():
    named = {"jetrl_megatron.rollout.vllm_worker.WeightReader": SPEC, "a.B": replace(SPEC, worker="a.B")}
    for name, spec in named.items():
        words = server_command(spec, Path("model"), 1234, with_weights=False)
        assert dict(pairwise(words))["--worker-extension-cls"] == name


@pytest.mark.parametrize(("sleeps", "on_cuda", "there"), [(True, True, True), (True, False, False), (False, True, False)])
def test_sleep_mode_is_asked_for_where_it_can_release_something_and_prompts_stay_whole_on_a_cpu(sleeps, on_cuda, there):
    words = server_command(replace(SPEC, sleeps=sleeps, on_cuda=on_cuda), Path("model"), 1234, with_weights=True)
    assert ("--enable-sleep-mode" in words) == there
    assert ("--no-enable-chunked-prefill" in words) == (not on_cuda)


@pytest.mark.parametrize(
    ("transport", "in_place", "backend"),
    [("disk", False, None), ("ipc", False, None), ("nccl", False, '{"backend": "nccl"}'), ("nccl", True, '{"backend": "jetrl_nccl"}')],
)
def test_only_nccl_needs_an_engine_of_vllm_for_its_weights(transport, in_place, backend):
    """Its IPC engine takes the package ray and unpickles what it is sent."""
    spec = replace(SPEC, transport=transport, in_place=in_place)
    words = server_command(spec, Path("model"), 1234, with_weights=False)
    assert (words[words.index("--weight-transfer-config") + 1] if "--weight-transfer-config" in words else None) == backend
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in server_environment(spec, KEY, "", {})


def asked(headers, kind="http", path="/update_weights"):
    """Return what the door answers: None where the request went through."""
    passed, sent = [], []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        sent.append(message)

    asyncio.run(RequireKey(app)({"type": kind, "path": path, "headers": headers}, None, send))
    assert bool(passed) != bool(sent)
    return None if passed else sent[0]


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@pytest.mark.usefixtures("key")
def test_the_door_opens_for_the_key_alone():
    right = (b"authorization", b"Bearer " + KEY.encode())
    assert asked([right]) is None
    for headers in ([], [(b"authorization", b"Bearer x")], [(b"authorization", KEY.encode())], [(b"x-key", right[1])], [right, right]):
        assert asked(headers)["status"] == 401
    assert asked([], kind="websocket")["type"] == "websocket.close"


def test_without_a_key_there_is_no_server(monkeypatch):
    for value in ("", "short"):
        monkeypatch.setenv(KEY_VARIABLE, value)
        with pytest.raises(ValueError, match="at least 32"):
            RequireKey(lambda *a: None)


@pytest.mark.parametrize("strange", ["\n", "\r", " ", "\0", "é"])
def test_a_key_that_no_header_takes_is_refused_and_not_shown(monkeypatch, strange):
    """http.client would name the header's value, which is the key, in its error."""
    monkeypatch.setattr(vllm_auth.os, "environ", {KEY_VARIABLE: KEY + strange})
    with pytest.raises(ValueError, match=rf"{KEY_VARIABLE} holds a space, a line break or .* ASCII") as refused:
        key_of_environment()
    assert KEY not in str(refused.value)
