"""Megatron's own distributed checkpoints: what dist_checkpointing.save wrote is read, what is written dist_checkpointing.load reads."""

import json

import pytest
import torch
from megatron.core import dist_checkpointing

from conversion.actor_io import load_hf_into_rank
from conversion.checkpoint import open_checkpoint
from conversion.cli import main
from conversion.convert import Target, convert
from conversion.layout import ParallelLayout
from conversion.verify import check_manifest, first_difference
from jetrl_megatron.actor.device import megatron_scope
from jetrl_megatron.config import Arm, PrecisionConfig
from tests.tiny_models import write_tiny_model
from tests.unit.actor.single_rank import single_rank_actor
from tests.unit.conversion.directories import as_bytes, write_bf16, write_fp8
from tests.unit.conversion.shapes import published_config

TORCH_DIST = Target(kind="torch_dist")
FORMS = {"stacked": None, "one by one": {"singleton_local_shards": True}}
CONFIG = {**published_config("Qwen3-8B", layers=3, vocab=203), "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"intermediate_size": 256}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def family(request, tmp_path_factory):
    """A tiny model, and what Megatron-core saves of the actor that was built from it, in both forms of its format."""
    root = tmp_path_factory.mktemp(request.param)
    source = write_tiny_model(root / "hf", request.param, num_hidden_layers=3)
    with single_rank_actor(source, PrecisionConfig(arm=Arm.bf16)) as actor, megatron_scope(actor.device):
        for form, metadata in FORMS.items():
            (root / form).mkdir()
            dist_checkpointing.save(actor.chunks[0].sharded_state_dict(metadata=metadata), str(root / form))
    return root


@pytest.mark.parametrize("form", FORMS)
def test_what_megatron_saves_becomes_the_hugging_face_directory_bit_for_bit(family, tmp_path, form):
    convert(family / form, tmp_path / "hf", Target(kind="hf"), hf_config=family / "hf")
    assert as_bytes(tmp_path / "hf") == as_bytes(family / "hf")
    assert (tmp_path / "hf" / "config.json").read_bytes() == (family / "hf" / "config.json").read_bytes()


def test_what_is_written_megatron_loads_into_the_actor_bit_for_bit(family, tmp_path):
    convert(family / "hf", tmp_path / "ranks", Target(kind="megatron", layout=ParallelLayout(tp=2, pp=3)))
    convert(tmp_path / "ranks", tmp_path / "dist", TORCH_DIST)
    with single_rank_actor(family / "hf", PrecisionConfig(arm=Arm.bf16)) as actor, megatron_scope(actor.device):
        chunk = actor.chunks[0]
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
        chunk.load_state_dict(dist_checkpointing.load(chunk.sharded_state_dict(), str(tmp_path / "dist")))
        loaded = {name: p.detach().clone() for name, p in chunk.named_parameters()}
        layout = actor.layout
    expected = load_hf_into_rank(family / "hf", actor.arch, layout, pp_rank=0, tp_rank=0)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].view(torch.int16), tensor.view(torch.int16)), name


def test_every_route_through_a_torch_dist_directory_is_the_identity(tmp_path):
    source = write_bf16(tmp_path / "source", CONFIG)
    layout = ParallelLayout(tp=2, pp=2, first_stage_layers=2, row_parallel="k_split", vocab_divisible_by=16)
    convert(source, tmp_path / "a", Target(kind="torch_dist", max_shard_bytes=700_000))
    convert(tmp_path / "a", tmp_path / "ranks", Target(kind="megatron", layout=layout))
    convert(source, tmp_path / "direct", Target(kind="megatron", layout=layout))
    assert as_bytes_by_file(tmp_path / "ranks") == as_bytes_by_file(tmp_path / "direct")
    convert(tmp_path / "ranks", tmp_path / "b", TORCH_DIST)
    convert(tmp_path / "b", tmp_path / "back", Target(kind="hf"))
    assert as_bytes(tmp_path / "back") == as_bytes(source)
    assert len(list((tmp_path / "a").glob("*.distcp"))) > 3 > len(list((tmp_path / "b").glob("*.distcp")))
    for left, right in (("source", "a"), ("a", "ranks"), ("b", "a")):
        assert first_difference(open_checkpoint(tmp_path / left), open_checkpoint(tmp_path / right)) is None
    assert check_manifest(tmp_path / "a") == (len(open_checkpoint(tmp_path / "a").tensors), None)


def as_bytes_by_file(path):
    return {p.name: p.read_bytes() for p in path.glob("*.safetensors")}


def test_by_commands(family, tmp_path, capsys):
    hf, dist = str(family / "hf"), str(tmp_path / "dist")
    assert main(["to-megatron", hf, dist, "--format", "torch_dist", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "torch_dist"
    assert main(["verify", dist, str(family / "stacked"), "--hf-config", hf, "--json"]) == 0
    assert main(["verify", dist, "--json"]) == 0
    assert main(["to-hf", dist, str(tmp_path / "back"), "--json"]) == 0
    assert main(["reshard", str(family / "one by one"), str(tmp_path / "r"), "--tp", "2", "--hf-config", hf, "--json"]) == 0
    assert main(["verify", str(tmp_path / "r"), hf, "--json"]) == 0
    capsys.readouterr()
    assert main(["to-hf", str(family / "stacked"), str(tmp_path / "x")]) == 2
    assert "name its model's Hugging Face directory with --hf-config DIR" in capsys.readouterr().err


def test_fp8_goes_into_it_only_dequantised(tmp_path):
    source = write_fp8(tmp_path / "source", CONFIG)
    with pytest.raises(ValueError, match="21 linears would be FP8; dequantise them with --cast bf16"):
        convert(source, tmp_path / "dist", TORCH_DIST)
    assert not (tmp_path / "dist").exists()
    convert(source, tmp_path / "dist", Target(kind="torch_dist", cast="bf16"))
    convert(source, tmp_path / "plain", Target(kind="hf", cast="bf16"))
    convert(tmp_path / "dist", tmp_path / "back", Target(kind="hf"))
    assert as_bytes(tmp_path / "back") == as_bytes(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "dist" / "hf" / "config.json").read_text())
