"""`bench rollout --servers-only`: what a pool is held to whose servers have drawn their weights themselves, and what is refused."""

import argparse
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from conversion.architecture import ModelArchitecture
from conversion.layout import fp8_modules
from jetrl_megatron.bench import engine_arms, rollout
from jetrl_megatron.bench.random_worker import NAME, RandomWeights
from jetrl_megatron.bench.servers import ServersAlone, drawn_weights, servers_alone
from jetrl_megatron.config import Transport, VllmConfig
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop import vllm_setup
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.rollout.vllm_server import server_command
from jetrl_megatron.rollout.vllm_verify import WeightMismatch
from tests.tiny_models import tiny_config
from tests.unit.rollout.fake_servers import LIMITS, FakeClient, FakeServer

TINY = "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml"
CPU = torch.device("cpu")


def config_of(family="qwen3", **changes):
    return tiny_config(family, num_hidden_layers=2, **changes).to_dict()


def reported(rank, **changes):
    return {"rank": rank, "fp8_linears": ["a"], "unknown": [], "expected": {f"w{rank}": "x"}, "unsigned": {f"u{rank}": "y"}, **changes}


def test_a_servers_ranks_are_put_in_order_and_held_to_the_arms_linears():
    expected = drawn_weights([reported(1), reported(0)], frozenset({"a"}))
    assert expected.by_rank == ({"w0": "x"}, {"w1": "x"}) and expected.unsigned == {"u0": "y", "u1": "y"}
    with pytest.raises(RunFailure, match="1 linears are FP8 in rank 0 of a server; the recipe has 0"):
        drawn_weights([reported(0)], frozenset())
    with pytest.raises(RunFailure, match="0 linears are FP8 in rank 1 of a server; the recipe has 1"):
        drawn_weights([reported(0), reported(1, fp8_linears=[])], frozenset({"a"}))


class Drawing(FakeClient):
    """A server that draws when it is asked to; `holds` is what it then computes with."""

    says = "drawn"

    def rpc(self, method, kwargs, timeout_s):
        if method != "jetrl_random_weights":
            return super().rpc(method, kwargs, timeout_s)
        self._need_life(method)
        self.holds = "drawn"
        return [{"rank": 0, "fp8_linears": [], "unknown": [], "expected": {"w[0:1,0:1]": self.says}, "unsigned": {}}]


def alone(tmp_path, client_class=Drawing, number=2):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config_of()))
    made = [FakeServer() for _ in range(number)]
    for server in made:
        server.client_class = client_class
    recipe = load_recipe(TINY, [f"model.path={tmp_path / 'model'}", "precision.arm=bf16"])
    found = ServersAlone(
        recipe=recipe,
        cfg=VllmConfig(servers=number, max_restarts=0, transport=Transport.disk),
        arch=ModelArchitecture.from_hf_config(config_of()),
        pool=ServerPool(made, [], {}, LIMITS),
        fp8=frozenset(),
        directory=tmp_path / "engine",
        device=CPU,
    )
    return found, made


def test_servers_that_hold_what_they_have_drawn_serve(tmp_path):
    found, made = alone(tmp_path)
    found.fill()
    assert found.pool.ready() == [0, 1] and found.pool.version == 0
    assert [server.starts for server in made] == [["engine"], ["engine"]] and (tmp_path / "engine" / "config.json").is_file()
    found.pool._members[1].state = "lost"
    with pytest.raises(RunFailure, match="1 of 2 servers are left"):
        found.check_complete()


def test_a_server_that_holds_something_else_than_it_has_drawn_is_refused(tmp_path):
    class Lying(Drawing):
        says = "other"

    found, _ = alone(tmp_path, Lying, 1)
    with pytest.raises(WeightMismatch, match=r"w\[0:1,0:1\] differs"):
        found.fill()
    assert found.pool.ready() == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--pushes", "3"], "--pushes is 3 and --servers-only builds no actor, whose weights a push brings: leave one of them out"),
        (
            ["rollout.engine=vllm_pool", "rollout.vllm.urls=['http://a:1']"],
            r"rollout\.vllm\.urls is \['http://a:1'\] and --servers-only .*: remove rollout\.vllm\.urls",
        ),
        (
            ["--nproc", "3"],
            "--nproc is 3 and --servers-only builds no actor, whose processes it counts: leave it out and set rollout.vllm.s",
        ),
        (
            ["--prompt-toks", "2000", "--new-toks", "49"],
            r"--new-toks 49 make 2049 tokens and the model has \d+ positions",
        ),
        (
            ["rollout.vllm.transport=ipc", "rollout.vllm.load=in_place"],
            r"in_place, and on a CPU .*: use rollout\.vllm\.load=reload",
        ),
        (["rollout.engine=vllm_pool", "rollout.vllm.tp=3"], r"rollout\.vllm\.tp is 3: tp=3 is illegal for this model"),
        (["--nproc", "3", "rollout.engine=vllm_colocated", "rollout.vllm.tp=2"], r"3 processes \(--nproc\) do not divide into replicas"),
    ],
)
def test_what_servers_without_an_actor_cannot_do_is_refused_before_anything_starts(words, says, monkeypatch):
    monkeypatch.setattr(vllm_setup, "check_engine", lambda: "0.30")
    monkeypatch.setattr(engine_arms, "launch", lambda *args: pytest.fail("it was started"))
    monkeypatch.setattr(rollout, "precompile", lambda *args: pytest.fail("it was compiled"))
    monkeypatch.setattr(rollout, "require_cuda", lambda *args: None)
    with pytest.raises(ValueError, match=says):
        rollout.main([TINY, *words, "--precompile", "--servers-only"])


@pytest.mark.parametrize(("option", "number"), [(["--servers-only"], 1), ([], 2)])
def test_servers_alone_are_the_business_of_one_process(option, number, monkeypatch):
    monkeypatch.setattr(vllm_setup, "check_engine", lambda: "0.30")
    started = []
    monkeypatch.setattr(
        engine_arms, "launch", lambda command, number, *rest, **options: started.append((number, "--servers-only" in command)) or 3
    )
    assert rollout.main([TINY, "parallel.tp=2", *option]) == 3
    assert started == [(number, bool(option))]


@pytest.mark.parametrize(
    ("words", "nproc", "gpus"),
    [
        (["rollout.engine=vllm_colocated", "parallel.tp=2", "rollout.vllm.tp=2"], None, ["2,3", "5,7"]),
        (["rollout.engine=vllm_colocated", "parallel.tp=1"], 1, ["2"]),
        (["rollout.engine=vllm_pool", "rollout.vllm.transport=nccl", "rollout.vllm.tp=2"], None, ["2,3"]),
        (["rollout.engine=vllm_pool", "rollout.vllm.gpus=['7']"], None, ["7"]),
    ],
)
def test_servers_alone_take_the_gpus_that_an_actor_would_have_or_the_first(words, nproc, gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(vllm_setup, "check_engine", lambda: "0.26")
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    recipe = load_recipe(TINY, [*words, f"model.path={tmp_path}", f"run.dir={tmp_path / 'run'}"])
    with servers_alone(recipe, nproc) as found:
        made = [member.server for member in found.pool._members]
        assert [server._gpus for server in made] == gpus and found.cfg.num_servers == len(gpus)
        assert found.fp8 == fp8_modules(found.arch), "the recipe's arm is jetrl"
        command = server_command(made[0]._spec, tmp_path, 1234, with_weights=False)
    assert command[command.index("--worker-extension-cls") + 1] == NAME == f"{RandomWeights.__module__}.{RandomWeights.__qualname__}"
    assert "--weight-transfer-config" not in command and "dummy" in command
    with pytest.raises(RunFailure, match="the engine servers were stopped"):
        found.pool.ready()


def test_servers_alone_need_no_way_for_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_setup, "check_engine", lambda: "0.30")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    words = ["rollout.engine=vllm_pool", "rollout.vllm.transport=nccl", f"model.path={tmp_path}", f"run.dir={tmp_path / 'run'}"]
    with servers_alone(load_recipe(TINY, words), None) as found:
        assert found.cfg.num_servers == 1


def test_a_server_that_is_lost_ends_the_bench_behind_the_round(tmp_path, monkeypatch):
    found, _ = alone(tmp_path)
    rounds = []

    class Losing:
        def generate(self, requests, params, seed):
            rounds.append(seed)
            if seed == 1:
                found.pool._members[1].state = "lost"
            return [SimpleNamespace(token_ids=[0] * params.max_new_toks) for _ in requests]

    monkeypatch.setattr(rollout, "servers_alone", lambda recipe, nproc: nullcontext(found))
    monkeypatch.setattr(found, "engine", Losing)
    args = argparse.Namespace(nproc=None, new_toks=2, prompts=3, prompt_toks=4, rounds=5, warm_up_rounds=3)
    with pytest.raises(RunFailure, match="1 of 2 servers are left"):
        rollout.measure_servers(found.recipe, args)
    assert rounds == [0, 1]


def test_the_record_says_that_there_was_no_actor(tmp_path, monkeypatch):
    found, _ = alone(tmp_path, number=1)
    monkeypatch.setattr(rollout, "servers_alone", lambda recipe, nproc: nullcontext(found))
    monkeypatch.setattr(rollout, "draw_rounds", lambda engine, arch, temperature, args, check: {"toks_a_s": 1.0})
    monkeypatch.setattr("jetrl_megatron.rollout.compat.vllm_version", lambda: "0.30")
    record = rollout.measure_servers(found.recipe, argparse.Namespace(nproc=None))
    want = {"actors": 0, "servers": 1, "transport": "none", "weights": "random, no actor", "fp8_linears": 0, "device": "cpu"}
    assert {key: record[key] for key in want} == want
    assert (found.directory / "config.json").is_file(), "they were filled before they drew"
