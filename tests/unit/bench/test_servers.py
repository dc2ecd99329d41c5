"""`bench rollout --servers-only`: weights that servers draw themselves, what a pool is held to then, and what is refused."""

import argparse
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from conversion.architecture import ModelArchitecture
from conversion.layout import fp8_modules
from conversion.names import SCALE_SUFFIX
from jetrl_megatron.bench import engine_arms, random_worker, rollout
from jetrl_megatron.bench.random_worker import NAME, RandomWeights, random_tensors
from jetrl_megatron.bench.servers import ServersAlone, drawn_weights, servers_alone
from jetrl_megatron.config import Transport, VllmConfig
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop import vllm_setup
from jetrl_megatron.rollout import vllm_worker
from jetrl_megatron.rollout.published import engine_pieces
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.rollout.vllm_server import server_command
from jetrl_megatron.rollout.vllm_verify import WeightMismatch
from tests.tiny_models import tiny_config
from tests.unit.rollout.fake_servers import LIMITS, FakeClient, FakeServer
from tests.unit.rollout.test_vllm_in_place import Engine

TINY = "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml"
CPU = torch.device("cpu")


def config_of(family="qwen3", **changes):
    return tiny_config(family, num_hidden_layers=2, **changes).to_dict()


def drawn(seed=0, family="qwen3"):
    arch = ModelArchitecture.from_hf_config(config_of(family))
    return dict(random_tensors(arch, fp8_modules(arch), CPU, seed)), arch


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_drawn_tensors_have_the_bits_of_trained_ones(family):
    tensors, arch = drawn(family=family)
    fp8 = {f"{module}.weight" for module in fp8_modules(arch)}
    assert fp8 == {name for name, tensor in tensors.items() if tensor.dtype is torch.float8_e4m3fn}
    for name, tensor in tensors.items():
        x = tensor.float()
        if name in fp8:
            scales = tensors[name + SCALE_SUFFIX]
            assert scales.shape == tuple(-(-n // 128) for n in tensor.shape) and scales.dtype is torch.float32
            assert 95 < float(x.std()) < 105 and bool(x.isfinite().all()) and float((x == 0).float().mean()) < 0.01
            assert 0.02 < float(x.std() * scales.unique()) < 0.03
        elif name.endswith(SCALE_SUFFIX):
            assert name.removesuffix(SCALE_SUFFIX) in fp8
        else:
            assert tensor.dtype is torch.bfloat16
            wanted = (0.0, 0.0244) if tensor.dim() == 2 else (0.0, 0.0) if name.endswith("bias") else (1.0, 0.0)
            assert (float(x.mean()), float(x.std())) == pytest.approx(wanted, abs=1e-3), name


def test_the_arms_hold_the_same_values_but_for_the_rounding_to_fp8():
    tensors, arch = drawn()
    plain = dict(random_tensors(arch, frozenset(), CPU, 0))
    codes = set()
    for name, wanted in plain.items():
        got = tensors[name].float()
        if tensors[name].dtype is torch.float8_e4m3fn:
            codes |= set(tensors[name].view(torch.uint8).flatten().tolist())
            scale = float(tensors[name + SCALE_SUFFIX].unique())
            error = (got * scale - wanted.float().clamp(-448 * scale, 448 * scale)).abs()
            assert bool((error <= wanted.float().abs() / 16 + 2.0**-10 * scale).all()), name
        else:
            assert torch.equal(tensors[name], wanted), name
    assert len(codes) > 240 and not codes & {0x7F, 0xFF}, "finite codes, nearly all of the 254"


def test_one_seed_gives_one_model_and_no_two_tensors_alike():
    (a, _), (b, _), (other, _) = drawn(), drawn(), drawn(1)
    key = "model.layers.0.self_attn.k_proj.weight"
    assert all(torch.equal(a[name].float(), b[name].float()) for name in a)
    assert not torch.equal(a[key].float(), other[key].float())
    assert not torch.equal(a[key].float(), a[key.replace(".0.", ".1.")].float())


@pytest.fixture
def worker(monkeypatch):
    """Rank 1 of 2 of an engine whose parameters are zeros, those of layer 0 in FP8, and the model's config."""
    config = config_of("qwen2")
    arch = ModelArchitecture.from_hf_config(config)
    fp8 = fp8_modules(arch, ("model.layers.1.*",))
    made = RandomWeights()
    made.device, made.parallel_config = CPU, SimpleNamespace(tensor_parallel_size=2)
    made.engine, made._jetrl_buffers = Engine(engine_pieces(arch, 2, fp8)[1]), {}
    for module in (vllm_worker, random_worker):
        monkeypatch.setattr(module, "worker_model", lambda worker: worker.engine)
        monkeypatch.setattr(module, "worker_tp_rank", lambda: 1)
    return SimpleNamespace(worker=made, config=config, fp8=fp8)


def test_a_worker_fills_every_parameter_and_says_what_it_has_drawn(worker):
    engine = worker.worker.engine
    before = {name: parameter.data_ptr() for name, parameter in engine.named_parameters()}
    report = json.loads(json.dumps(worker.worker.jetrl_random_weights(worker.config, "sha256", True, 0)))
    assert report["rank"] == 1 and report["unknown"] == [] and set(report["fp8_linears"]) == worker.fp8
    held = worker.worker.jetrl_fingerprints(worker.config, "sha256", False, False)
    assert held["held"] == report["expected"] and held["held"]
    for name, parameter in engine.named_parameters():
        assert parameter.data_ptr() == before[name] and bool(parameter.float().any()) != name.endswith("bias"), name


def test_without_in_place_the_tensors_go_through_vllms_loader(worker, monkeypatch):
    engine, steps = worker.worker.engine, []
    monkeypatch.setattr(random_worker, "begin_reload", lambda model: steps.append("begin"))
    monkeypatch.setattr(random_worker, "end_reload", lambda model, worker: steps.append("end"))
    engine.load_weights = lambda tensors: steps.append([name for name, _ in tensors])
    worker.worker.jetrl_random_weights(worker.config, "sha256", False, 0)
    arch = ModelArchitecture.from_hf_config(worker.config)
    assert steps == ["begin", [name for name, _ in random_tensors(arch, worker.fp8, CPU, 0)], "end"]


def test_a_parameter_that_nothing_fills_is_named_and_nothing_is_drawn(worker):
    engine = worker.worker.engine
    engine.get_submodule("model.layers.0.self_attn").register_parameter("sinks", torch.nn.Parameter(torch.zeros(4)))
    report = worker.worker.jetrl_random_weights(worker.config, "sha256", True, 0)
    assert not any(bool(parameter.float().any()) for parameter in engine.parameters())
    with pytest.raises(RunFailure, match=r"parameters that no tensor of a checkpoint fills: model\.layers\.0\.self_attn\.sinks$"):
        drawn_weights([report], worker.fp8)


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
        (["--nproc", "3", "rollout.engine=vllm_colocated", "rollout.vllm.tp=2"], r"3 processes \(--nproc\) do not divide into replicas"),
    ],
)
def test_what_servers_without_an_actor_cannot_do_is_refused_before_anything_starts(words, says, monkeypatch):
    monkeypatch.setattr(engine_arms, "launch", lambda *args: pytest.fail("it was started"))
    monkeypatch.setattr(rollout, "precompile", lambda *args: pytest.fail("it was compiled"))
    monkeypatch.setattr(rollout, "require_cuda", lambda *args: None)
    with pytest.raises(ValueError, match=says):
        rollout.main([TINY, *words, "--precompile", "--servers-only"])


@pytest.mark.parametrize(("option", "number"), [(["--servers-only"], 1), ([], 2)])
def test_servers_alone_are_the_business_of_one_process(option, number, monkeypatch):
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
    words = ["rollout.engine=vllm_pool", "rollout.vllm.transport=nccl"]
    with servers_alone(load_recipe(TINY, [*words, f"model.path={tmp_path}", f"run.dir={tmp_path / 'run'}"]), None) as found:
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
    said = {key: record[key] for key in ("actors", "servers", "transport", "weights", "fp8_linears", "device")}
    assert said == {"actors": 0, "servers": 1, "transport": "none", "weights": "random, no actor", "fp8_linears": 0, "device": "cpu"}
    assert (found.directory / "config.json").is_file(), "they were filled before they drew"
