"""Weights that a server draws itself: which bits they have, on every worker and in every arm, and parameters that nothing fills."""

import json
from types import SimpleNamespace

import pytest
import torch

from conversion.architecture import ModelArchitecture
from conversion.layout import fp8_modules
from conversion.names import SCALE_SUFFIX
from jetrl_megatron.bench import random_worker
from jetrl_megatron.bench.random_worker import RandomWeights, random_tensors
from jetrl_megatron.bench.servers import drawn_weights
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout import vllm_worker
from jetrl_megatron.rollout.published import engine_pieces
from tests.unit.bench.test_servers import CPU, config_of
from tests.unit.rollout.test_vllm_in_place import Engine


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
