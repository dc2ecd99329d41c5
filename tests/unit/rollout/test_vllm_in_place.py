"""Canonical tensors written into an engine rank's parameters: what the rank then reads back is what the actor hashed."""

import copy
from types import SimpleNamespace

import pytest
import torch

from conversion.architecture import ModelArchitecture
from conversion.layout import fp8_modules
from conversion.names import SCALE_SUFFIX
from jetrl_megatron.rollout import bucket, held_views, vllm_worker
from jetrl_megatron.rollout.bucket import fill_buckets
from jetrl_megatron.rollout.fingerprint import fingerprint
from jetrl_megatron.rollout.held_views import HeldViews, KeptViews, same_elements
from jetrl_megatron.rollout.published import EnginePlans, Fingerprints, engine_pieces, rectangle
from jetrl_megatron.rollout.vllm_in_place import InPlaceWriter
from jetrl_megatron.rollout.vllm_worker import WeightReader, _Reader
from tests.tiny_models import tiny_config

NAMES = ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]


def arch_of(**changes):
    return ModelArchitecture.from_hf_config(tiny_config("qwen3", num_hidden_layers=2, **changes).to_dict())


def random_tensors(arch, fp8, seed=0):
    """Whole canonical tensors with codes and scales of any value."""
    from conversion.shards import hf_tensors

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for stored in hf_tensors(arch, fp8):
        x = torch.randn(stored.shape, generator=generator)
        tensors[stored.name] = x.to(torch.float8_e4m3fn if stored.fp8 else torch.bfloat16)
        if stored.fp8:
            tensors[stored.scale_name] = torch.rand(stored.scale_shape, generator=generator)
    return tensors


class Engine(torch.nn.Module):
    """Modules with parameters by their names in vLLM, zeros."""

    def __init__(self, pieces):
        super().__init__()
        for stored in {stored.name: stored for stored, _ in pieces}.values():
            self._put(stored.name, torch.zeros(stored.shape).to(torch.float8_e4m3fn if stored.fp8 else torch.bfloat16))
            if stored.fp8:
                self._put(stored.name + SCALE_SUFFIX, torch.zeros(stored.scale_shape))

    def _put(self, name, value):
        *path, last = name.split(".")
        module = self
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(value, requires_grad=False))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_every_rank_holds_its_rectangles_at_the_old_addresses(precision, tp, tied):
    arch = arch_of(tie_word_embeddings=tied)
    fp8 = fp8_modules(arch) if precision == "fp8" else frozenset()
    tensors = random_tensors(arch, fp8)
    prints = Fingerprints(arch, tp, fp8, "sha256")
    for name, tensor in tensors.items():
        prints.add(name, tensor)
    expected, _ = prints.take()
    for rank, pieces in enumerate(engine_pieces(arch, tp, fp8)):
        engine = Engine(pieces)
        places = {name: parameter.data_ptr() for name, parameter in engine.named_parameters()}
        InPlaceWriter(HeldViews(engine, arch, tp, rank)).write(reversed(tensors.items()))
        assert _Reader(HeldViews(engine, arch, tp, rank), "sha256").texts(tied=False) == expected[rank]
        assert {name: parameter.data_ptr() for name, parameter in engine.named_parameters()} == places


@pytest.fixture
def pushed(monkeypatch):
    """A worker, rank 1 of 2, and a way to push to it by buckets that lie in two buffers."""
    config = tiny_config("qwen3", num_hidden_layers=2).to_dict()
    arch = ModelArchitecture.from_hf_config(config)
    fp8 = fp8_modules(arch)
    (_, pieces), worker = engine_pieces(arch, 2, fp8), WeightReader()
    worker.device, worker.parallel_config = torch.device("cpu"), SimpleNamespace(tensor_parallel_size=2)
    worker.engine, opened = Engine(pieces), []
    buffers = [torch.zeros(300_000, dtype=torch.uint8) for _ in range(2)]
    monkeypatch.setattr(vllm_worker, "worker_model", lambda worker: worker.engine)
    monkeypatch.setattr(vllm_worker, "worker_tp_rank", lambda: 1)
    monkeypatch.setattr(bucket, "gpu_name", lambda device: "gpu 7")
    monkeypatch.setattr(bucket, "open_buffer", lambda shown, device: opened.append(shown) or buffers[shown])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(vllm_worker, "begin_reload", lambda model: pytest.fail("vLLM's loader has no part in it"))

    def push(seed, only=lambda described: True):
        tensors = random_tensors(arch, fp8, seed)
        for described in fill_buckets(tensors.items(), buffers):
            if only(described):
                told = {"in_place": config} if described["first"] else {}
                worker.jetrl_load({**described, "handles": {"gpu 7": described["buffer"]}}, **told)
            buffers[described["buffer"]].fill_(255)  # it is filled again: nothing of it may be used behind the answer
        wanted = Engine(pieces)
        InPlaceWriter(HeldViews(wanted, arch, 2, 1)).write(tensors.items())
        return wanted

    return SimpleNamespace(worker=worker, push=push, opened=opened, config=config)


def same_parameters(a, b):
    held = dict(a.named_parameters())
    return all(torch.equal(held[name].float(), parameter.float()) for name, parameter in b.named_parameters())


def test_a_worker_writes_buckets_in_place_where_it_is_told_the_model(pushed):
    wanted = pushed.push(0)
    assert same_parameters(pushed.worker.engine, wanted) and pushed.worker._jetrl_loading is None
    assert pushed.opened == [0, 1], "a buffer is opened once a push"
    assert same_parameters(pushed.worker.engine, pushed.push(1)) and pushed.opened == [0, 1, 0, 1]


def test_what_is_kept_between_pushes_holds_no_parameter_that_was_replaced(pushed, monkeypatch):
    """A module and a parameter that are new at the second push are those that are written, and those that are read."""
    monkeypatch.setattr(held_views, "keeps_addresses", lambda model: True)
    pushed.push(0)
    kept = pushed.worker._jetrl_kept._held
    assert pushed.worker._jetrl_held(pushed.worker.engine, pushed.config) is kept
    engine = pushed.worker.engine
    attention = engine.get_submodule("model.layers.0.self_attn")
    attention.o_proj, old = copy.deepcopy(attention.o_proj), attention.o_proj
    engine.get_submodule("model").norm.weight = torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))
    stale = old.weight.detach().clone()
    wanted = pushed.push(1)
    assert same_parameters(engine, wanted) and torch.equal(old.weight.float(), stale.float())
    report = pushed.worker.jetrl_fingerprints(pushed.config, "sha256", False, False)
    key = "model.layers.0.self_attn.o_proj.weight[0:256,256:512]"
    assert report["fp8_linears"] == len(fp8_modules(ModelArchitecture.from_hf_config(pushed.config)))
    assert report["held"][key] == fingerprint(wanted.get_parameter("model.layers.0.self_attn.o_proj.weight"), "sha256")
    assert pushed.worker._jetrl_kept._held.plan is kept.plan, "planned once"
    attention.o_proj.weight.view(torch.uint8)[0, 0] ^= 1
    assert pushed.worker.jetrl_fingerprints(pushed.config, "sha256", False, False)["held"][key] != report["held"][key]


def replace_module(engine):
    engine.get_submodule("model.layers.1").mlp = copy.deepcopy(engine.get_submodule("model.layers.1.mlp"))


def replace_parameter(engine):
    engine.get_submodule("model").norm.weight = torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16))


def move_bytes(engine):
    parameter = engine.get_parameter("model.layers.0.mlp.down_proj.weight")
    parameter.data = parameter.data.clone()


def turn(engine):
    parameter = engine.get_parameter("lm_head.weight")
    parameter.data = parameter.data.reshape(parameter.shape[::-1]).t()


def read_as_another_type(engine):
    parameter = engine.get_parameter("lm_head.weight")
    parameter.data = parameter.data.view(torch.float16)


def replace_dictionaries(engine):
    """As `copy.copy` of a module's attributes does; what was there before holds the old modules and parameters."""
    layer = engine.get_submodule("model.layers.0")
    layer._modules = dict(layer._modules)
    layer.mlp = copy.deepcopy(layer.mlp)
    norm = engine.get_submodule("model.norm")
    norm._parameters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in norm._parameters.items()}


CHANGES = [replace_module, replace_parameter, move_bytes, turn, read_as_another_type, replace_dictionaries, None]


@pytest.mark.parametrize("change", CHANGES)
def test_views_are_found_anew_where_the_model_changed(change, monkeypatch):
    arch = arch_of()
    fp8 = fp8_modules(arch)
    (pieces,) = engine_pieces(arch, 1, fp8)
    engine, kept = Engine(pieces), KeptViews()
    assert kept.of(engine, arch, 1, 0) is not kept.of(engine, arch, 1, 0), "parameters on a CPU may get other memory at a reload"
    monkeypatch.setattr(held_views, "keeps_addresses", lambda model: True)
    first = kept.of(engine, arch, 1, 0)
    assert all(first.view(place) is first.view(place) for place in first.plan.places), "a view is made once"
    if change is not None:
        change(engine)
    again = kept.of(engine, arch, 1, 0)
    assert (again is first) == (change is None) and kept.of(engine, arch, 1, 0) is again
    for place in again.plan.places:
        parameter = engine.get_parameter(f"{place.module}.{place.parameter}").detach()
        assert same_elements(again.view(place), rectangle(parameter, place.rows_held, place.cols_held)), place
    for rank in (0, 1):
        assert kept.of(engine, arch, 2, rank).plan == EnginePlans().of(arch, 2, fp8)[rank], "another rank, of another degree"
    assert kept.of(engine, arch, 1, 0).plan == again.plan
    assert kept.of(copy.deepcopy(engine), arch, 1, 0) is not again, "another model"
    other = arch_of(vocab_size=500)
    assert kept.of(Engine(engine_pieces(other, 1, fp8)[0]), other, 1, 0).plan.places != again.plan.places
    with pytest.raises(ValueError, match=r"their config\.json differ"):
        kept.of(torch.nn.Linear(2, 2), arch, 1, 0)
    assert kept._held is None, "a model that is gone stays in no memory"


def test_a_plan_of_another_model_or_degree_is_made_anew():
    plans, small, large = EnginePlans(), arch_of(), arch_of(vocab_size=500)
    fp8 = fp8_modules(small)
    asked = [(small, 1, fp8), (large, 1, fp8), (small, 2, fp8), (small, 2, frozenset()), (small, 1, fp8)]
    for arch, tp, linears in asked:
        assert plans.of(arch, tp, linears) == EnginePlans().of(arch, tp, linears)
    assert plans.of(small, 1, fp8) is plans.of(arch_of(), 1, fp8)


def test_a_bucket_of_a_push_that_has_not_begun_here_is_refused(pushed):
    with pytest.raises(RuntimeError, match="push has not begun"):
        pushed.push(0, only=lambda described: not described["first"])


def test_what_does_not_belong_there_is_refused_and_what_was_not_sent_stays():
    arch = arch_of()
    fp8 = fp8_modules(arch)
    (pieces,) = engine_pieces(arch, 1, fp8)
    engine, tensors = Engine(pieces), random_tensors(arch, fp8)
    writer = InPlaceWriter(HeldViews(engine, arch, 1, 0))
    with pytest.raises(ValueError, match=r"model\.other\.weight has no place"):
        writer.write([("model.other.weight", tensors[NAMES[1]])])
    with pytest.raises(ValueError, match=r"k_proj\.weight is torch\.bfloat16 and the parameter torch\.float8_e4m3fn"):
        writer.write([(NAMES[0], tensors[NAMES[0]].bfloat16())])
    writer.write([(NAMES[1], tensors[NAMES[1]])])
    changed = {name for name, parameter in engine.named_parameters() if parameter.float().abs().sum() > 0}
    assert changed == {NAMES[1]}
    with pytest.raises(ValueError, match=r"has no model\.\S+, and the actor's has"):
        HeldViews(torch.nn.Linear(2, 2), arch, 1, 0)
    engine.get_submodule("lm_head").cpu_linear = object()
    with pytest.raises(ValueError, match=r"lm_head multiplies by a packed copy.*rollout\.vllm\.load=reload"):
        InPlaceWriter(HeldViews(engine, arch, 1, 0))
