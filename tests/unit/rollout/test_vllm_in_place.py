"""Canonical tensors written into an engine rank's parameters: what the rank then reads back is what the actor hashed."""

from types import SimpleNamespace

import pytest
import torch

from conversion.architecture import ModelArchitecture
from conversion.layout import fp8_modules
from conversion.names import SCALE_SUFFIX
from jetrl_megatron.rollout import vllm_worker
from jetrl_megatron.rollout.bucket import fill_buckets, read_bucket
from jetrl_megatron.rollout.published import Fingerprints, engine_pieces
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
        InPlaceWriter(engine, arch, tp, rank).write(reversed(tensors.items()))
        reader = _Reader(engine, "sha256")
        for stored, piece in pieces:
            reader.read(stored, piece)
        assert reader.held(tied=False) == expected[rank]
        assert {name: parameter.data_ptr() for name, parameter in engine.named_parameters()} == places


def test_a_worker_writes_buckets_in_place_where_it_is_told_the_model(monkeypatch):
    config = tiny_config("qwen3", num_hidden_layers=2).to_dict()
    arch = ModelArchitecture.from_hf_config(config)
    fp8 = fp8_modules(arch)
    tensors, (_, pieces) = random_tensors(arch, fp8), engine_pieces(arch, 2, fp8)
    worker, engine, buffer = WeightReader(), Engine(pieces), torch.zeros(300_000, dtype=torch.uint8)
    worker.device, worker.parallel_config = torch.device("cpu"), SimpleNamespace(tensor_parallel_size=2)
    monkeypatch.setattr(vllm_worker, "worker_model", lambda worker: engine)
    monkeypatch.setattr(vllm_worker, "worker_tp_rank", lambda: 1)
    monkeypatch.setattr(vllm_worker, "open_bucket", lambda bucket, device: read_bucket(bucket, buffer))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(vllm_worker, "begin_reload", lambda model: pytest.fail("vLLM's loader has no part in it"))
    number = 0
    for bucket in fill_buckets(tensors.items(), buffer):
        worker.jetrl_load(bucket, in_place=config)
        number += 1
    assert number > 3
    wanted = Engine(pieces)
    InPlaceWriter(wanted, arch, 2, 1).write(tensors.items())
    held = dict(engine.named_parameters())
    assert all(torch.equal(held[name].float(), parameter.float()) for name, parameter in wanted.named_parameters())


def test_what_does_not_belong_there_is_refused_and_what_was_not_sent_stays():
    arch = arch_of()
    fp8 = fp8_modules(arch)
    (pieces,) = engine_pieces(arch, 1, fp8)
    engine, tensors = Engine(pieces), random_tensors(arch, fp8)
    writer = InPlaceWriter(engine, arch, 1, 0)
    with pytest.raises(ValueError, match=r"model\.other\.weight has no place"):
        writer.write([("model.other.weight", tensors[NAMES[1]])])
    with pytest.raises(ValueError, match=r"k_proj\.weight is torch\.bfloat16 and the parameter torch\.float8_e4m3fn"):
        writer.write([(NAMES[0], tensors[NAMES[0]].bfloat16())])
    writer.write([(NAMES[1], tensors[NAMES[1]])])
    changed = {name for name, parameter in engine.named_parameters() if parameter.float().abs().sum() > 0}
    assert changed == {NAMES[1]}
    engine.get_submodule("lm_head").cpu_linear = object()
    with pytest.raises(ValueError, match=r"lm_head multiplies by a packed copy.*rollout\.vllm\.load=reload"):
        InPlaceWriter(engine, arch, 1, 0)
