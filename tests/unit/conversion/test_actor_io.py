"""The actor's calls: its own shards in, its own shards out, and every way in which ranks can disagree."""

import json

import pytest
import torch

from conversion.actor_io import load_hf_into_rank, merge_to_hf, rank_tensor_shapes, write_rank_shards
from conversion.architecture import ModelArchitecture
from conversion.convert import Target
from conversion.layout import ParallelLayout
from tests.unit.conversion.directories import as_bytes, load, write_bf16, write_fp8
from tests.unit.conversion.shapes import published_config

CONFIG = {**published_config("Qwen3-0.6B", layers=4, vocab=203), "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"intermediate_size": 256}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = write_bf16(tmp_path_factory.mktemp("hf") / "source", CONFIG)
    return path, ModelArchitecture.from_hf_directory(path)


def load_rank(source, layout, pp, tp):
    path, arch = source
    return [load_hf_into_rank(path, arch, layout, pp_rank=pp, tp_rank=tp, vp_stage=v) for v in range(layout.vpp)]


def export(source, layout, directory, change=None, tag="step 1"):
    _, arch = source
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            chunks = load_rank(source, layout, pp, tp)
            if change is not None:
                change(pp, tp, chunks)
            write_rank_shards(directory, arch, layout, (pp, tp), chunks, tag=tag)


LAYOUTS = [{}, {"tp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2, "row_parallel": "k_split"}, {"pp": 3, "first_stage_layers": 2}]


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_rank_shards_merge_into_the_source_bit_for_bit(source, tmp_path, options):
    path, arch = source
    layout = ParallelLayout(**options)
    export(source, layout, tmp_path / "shards")
    merge_to_hf(tmp_path / "shards", tmp_path / "out", path, arch, layout, tag="step 1")
    assert as_bytes(tmp_path / "out") == as_bytes(path)
    assert (tmp_path / "out" / "config.json").read_bytes() == (path / "config.json").read_bytes()
    manifest = json.loads((tmp_path / "out" / "conversion_manifest.json").read_text())
    assert (manifest["source"], manifest["source_kind"]) == ("shards", "megatron")
    assert str(tmp_path) not in json.dumps(manifest), "two runs that end in the same weights leave the same manifest"


def test_loaded_tensors_have_the_announced_shapes_and_may_be_trained_in_place(source):
    layout = ParallelLayout(tp=2, pp=2)
    for pp in (0, 1):
        (params,) = load_rank(source, layout, pp, 1)
        assert {name: tuple(p.shape) for name, p in params.items()} == rank_tensor_shapes(source[1], layout, pp, 1)
        assert all(p.dtype is torch.bfloat16 and p.is_contiguous() for p in params.values())
        next(iter(params.values())).add_(1)
    assert list(params)[-2:] == ["decoder.final_layernorm.weight", "output_layer.weight"]


def test_trained_values_are_what_is_exported(source, tmp_path):
    path, arch = source
    layout = ParallelLayout(tp=2)

    def double(pp, tp, chunks):
        for params in chunks:
            for p in params.values():
                p.mul_(2)

    export(source, layout, tmp_path / "shards", double)
    merge_to_hf(tmp_path / "shards", tmp_path / "out", path, arch, layout, tag="step 1")
    before, after = load(path), load(tmp_path / "out")
    assert all(torch.equal(after[name], before[name] * 2) for name in before)


def test_a_shard_of_an_earlier_export_is_refused(source, tmp_path):
    path, arch = source
    layout = ParallelLayout(tp=2)
    export(source, layout, tmp_path / "shards", tag="step 1")
    write_rank_shards(tmp_path / "shards", arch, layout, (0, 0), load_rank(source, layout, 0, 0), tag="step 2")
    with pytest.raises(ValueError, match=r"pp000-tp001-vp000\.safetensors is of export 'step 1', not 'step 2'"):
        merge_to_hf(tmp_path / "shards", tmp_path / "out", path, arch, layout, tag="step 2")
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_is_named(source, tmp_path):
    path, arch = source
    write_rank_shards(tmp_path / "shards", arch, ParallelLayout(tp=2), (0, 0), load_rank(source, ParallelLayout(tp=2), 0, 0))
    with pytest.raises(ValueError, match=r"pp000-tp001-vp000\.safetensors does not exist"):
        merge_to_hf(tmp_path / "shards", tmp_path / "out", path, arch, ParallelLayout(tp=2))


@pytest.mark.parametrize("name", ["decoder.layers.0.self_attention.q_layernorm.weight", "decoder.layers.1.input_layernorm.weight"])
def test_norms_that_drifted_apart_between_tensor_ranks_stop_the_export(source, tmp_path, name):
    path, arch = source
    layout = ParallelLayout(tp=2)

    def drift(pp, tp, chunks):
        if tp == 1:
            chunks[0][name][3] += 1

    export(source, layout, tmp_path / "shards", drift)
    with pytest.raises(ValueError, match=f"pp000-tp001-vp000:{name} differs from its copy pp000-tp000-vp000:{name}"):
        merge_to_hf(tmp_path / "shards", tmp_path / "out", path, arch, layout, tag="step 1")


def test_a_tied_head_that_left_its_embedding_stops_the_export(source, tmp_path):
    path, arch = source
    layout = ParallelLayout(pp=2)

    def drift(pp, tp, chunks):
        if pp == 1:
            chunks[0]["output_layer.weight"][202, 255] += 1

    export(source, layout, tmp_path / "shards", drift)
    with pytest.raises(ValueError, match=r"output_layer\.weight differs from its copy pp000-tp000-vp000:embedding"):
        merge_to_hf(tmp_path / "shards", tmp_path / "out", path, arch, layout, tag="step 1")


def test_parameters_are_used_once_and_filled_once(source, tmp_path):
    _, arch = source
    (params,) = load_rank(source, ParallelLayout(), 0, 0)
    spare = {**params, "decoder.layers.0.self_attention.linear_qkv.bias": torch.zeros(8, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"1 not used: decoder\.layers\.0\.self_attention\.linear_qkv\.bias"):
        write_rank_shards(tmp_path, arch, ParallelLayout(), (0, 0), [spare])
    missing = {k: v for k, v in params.items() if "q_layernorm" not in k}
    with pytest.raises(ValueError, match="4 missing: "):
        write_rank_shards(tmp_path, arch, ParallelLayout(), (0, 0), [missing])
    name = "decoder.final_layernorm.weight"
    with pytest.raises(ValueError, match=rf"{name} is torch\.float32 \(256,\)"):
        write_rank_shards(tmp_path, arch, ParallelLayout(), (0, 0), [{**params, name: params[name].float()}])
    with pytest.raises(ValueError, match="1 model chunks were given, the layout has vpp=2"):
        write_rank_shards(tmp_path, arch, ParallelLayout(pp=2, vpp=2), (0, 0), [params])
    with pytest.raises(ValueError, match="pp=0 tp=3 chunk=0 is outside the layout"):
        write_rank_shards(tmp_path, arch, ParallelLayout(), (0, 3), [params])


def test_another_architecture_or_illegal_layout_is_refused_before_reading(source, tmp_path):
    path, arch = source
    other = ModelArchitecture.from_hf_config({**CONFIG, "num_hidden_layers": 2})
    with pytest.raises(ValueError, match="use one and the same config"):
        load_hf_into_rank(path, other, ParallelLayout(), pp_rank=0, tp_rank=0)
    with pytest.raises(ValueError, match="2 kv heads are fewer than tp=4"):
        load_hf_into_rank(tmp_path / "nowhere", arch, ParallelLayout(tp=4), pp_rank=0, tp_rank=0)


def test_an_fp8_directory_loads_dequantised_and_says_so(tmp_path, caplog):
    path = write_fp8(tmp_path / "fp8", CONFIG)
    arch = ModelArchitecture.from_hf_directory(path)
    raw = load(path)
    params = load_hf_into_rank(path, arch, ParallelLayout(tp=2, row_parallel="k_split"), pp_rank=0, tp_rank=1)
    assert "masters start from dequantised values" in caplog.text
    name = "model.layers.2.mlp.down_proj.weight"
    values = raw[name].float().view(2, 128, 2, 128) * raw[name + "_scale_inv"].view(2, 1, 2, 1)
    assert torch.equal(params["decoder.layers.2.mlp.linear_fc2.weight"], values.view(256, 256).bfloat16()[:, 128:])


def test_export_may_quantise_with_the_one_quantiser(source, tmp_path):
    path, arch = source
    layout = ParallelLayout(tp=2, pp=2)
    export(source, layout, tmp_path / "shards")
    merge_to_hf(tmp_path / "shards", tmp_path / "out", path, arch, layout, tag="step 1", target=Target(kind="hf", cast="fp32"))
    assert as_bytes(tmp_path / "out") == as_bytes(write_fp8(tmp_path / "expected", CONFIG))
