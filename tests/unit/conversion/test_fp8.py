"""Block FP8: codes and scales move untouched, scales of every dtype are read, blocks of zeros, config and tensors agree."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.checkpoint import open_checkpoint
from conversion.convert import Target, convert
from conversion.layout import ParallelLayout
from conversion.scales import check_scales, scales_to_fp32
from tests.unit.conversion.directories import FP8_CONFIG, as_bytes, load, write_bf16, write_config, write_fp8
from tests.unit.conversion.shapes import published_config

DIM128 = {**published_config("Qwen3-8B", layers=2, vocab=203), "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
DIM128 |= {"intermediate_size": 512}
DIM64 = {**DIM128, "model_type": "llama", "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
LAYOUTS = [{}, {"tp": 2}, {"tp": 2, "row_parallel": "k_split"}, {"tp": 2, "pp": 2}]


def megatron(**options):
    return Target(kind="megatron", layout=ParallelLayout(**options))


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", [DIM128, DIM64], ids=["head_dim128", "head_dim64"])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_fp8_round_trips_move_codes_and_scales_untouched(tmp_path, config, options, scale_format):
    source = write_fp8(tmp_path / "source", config, scale_format)
    convert(source, tmp_path / "a", megatron(**options))
    convert(tmp_path / "a", tmp_path / "b", megatron(pp=2, row_parallel="k_split"))
    convert(tmp_path / "b", tmp_path / "hf", Target(kind="hf"))
    assert as_bytes(tmp_path / "hf") == as_bytes(source)
    assert (tmp_path / "hf" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("config", [DIM128, DIM64], ids=["head_dim128", "head_dim64"])
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_quantising_before_and_after_the_cut_gives_the_same_bytes(tmp_path, config, options):
    source = write_bf16(tmp_path / "bf16", config)
    convert(source, tmp_path / "megatron", megatron(**options))
    convert(tmp_path / "megatron", tmp_path / "after", Target(kind="hf", cast="fp32"))
    assert as_bytes(tmp_path / "after") == as_bytes(write_fp8(tmp_path / "before", config))
    # ... and quantised into shards, then moved.
    layout = ParallelLayout(**options)
    convert(source, tmp_path / "fp8", Target(kind="megatron", layout=layout, cast="fp32"))
    convert(tmp_path / "fp8", tmp_path / "moved", Target(kind="hf"))
    assert as_bytes(tmp_path / "moved") == as_bytes(tmp_path / "before")


@pytest.mark.parametrize("cast, codes, scales", [("fp32", 0, 0), ("ue8m0", 16384, 1)])
def test_requantising_dequantised_values_changes_bytes_which_moving_does_not(tmp_path, cast, codes, scales):
    source = write_bf16(tmp_path / "bf16", {**DIM128, "num_hidden_layers": 1, "hidden_size": 1024, "num_attention_heads": 8})
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load(source)
    tensors[name] = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "once", Target(kind="hf", cast=cast))
    convert(tmp_path / "once", tmp_path / "values", Target(kind="hf", cast="bf16"))
    convert(tmp_path / "values", tmp_path / "twice", Target(kind="hf", cast=cast))
    once, twice = load(tmp_path / "once"), load(tmp_path / "twice")
    assert int((once[name].view(torch.uint8) != twice[name].view(torch.uint8)).sum()) == codes
    changed = once[name + "_scale_inv"] != twice[name + "_scale_inv"]
    assert (changed.numel(), int(changed.sum())) == (64, scales)
    convert(tmp_path / "once", tmp_path / "moved", megatron(tp=2, row_parallel="k_split"))
    convert(tmp_path / "moved", tmp_path / "back", Target(kind="hf"))
    assert as_bytes(tmp_path / "back") == as_bytes(tmp_path / "once")


def test_wire_format_is_the_checkpoint_format_and_receivers_slice_on_both_axes(tmp_path):
    config = {**DIM128, "hidden_size": 512, "num_hidden_layers": 1}
    source = write_fp8(tmp_path / "source", config)
    raw = load(source)
    convert(source, tmp_path / "split", megatron(tp=2, row_parallel="k_split"))
    attn, mlp = "decoder.layers.0.self_attention.", "decoder.layers.0.mlp."
    for rank in (0, 1):
        shard = shard_of(tmp_path / "split", rank)
        down = raw["model.layers.0.mlp.down_proj.weight_scale_inv"]
        assert down.shape == (4, 4) and torch.equal(shard[mlp + "linear_fc2.weight_scale_inv"], down[:, 2 * rank : 2 * rank + 2])
        gate, up = (raw[f"model.layers.0.mlp.{n}_proj.weight_scale_inv"][2 * rank : 2 * rank + 2] for n in ("gate", "up"))
        assert torch.equal(shard[mlp + "linear_fc1.weight_scale_inv"], torch.cat([gate, up]))
        q, k, v = (raw[f"model.layers.0.self_attn.{n}_proj.weight_scale_inv"] for n in "qkv")
        expected = torch.cat([q[2 * rank : 2 * rank + 2], k[rank : rank + 1], v[rank : rank + 1]])
        assert torch.equal(shard[attn + "linear_qkv.weight_scale_inv"], expected)
        assert shard[attn + "linear_qkv.weight_scale_inv"].dtype is torch.float32


def shard_of(path, rank):
    return load_file(path / f"pp000-tp{rank:03d}-vp000.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_any_scale_dtype_is_read_and_fp32_is_written(tmp_path, dtype):
    config = {**DIM128, "hidden_size": 128, "num_hidden_layers": 1}
    source = write_fp8(tmp_path / "source", config, "ue8m0", dtype)
    convert(source, tmp_path / "megatron", megatron(tp=1))
    convert(tmp_path / "megatron", tmp_path / "hf", Target(kind="hf"))
    before, after = load(source), load(tmp_path / "hf")
    one_by_one = write_fp8(tmp_path / "fp32", config, "ue8m0")
    assert as_bytes(tmp_path / "hf") == as_bytes(one_by_one)
    for name, scale in before.items():
        if name.endswith("_scale_inv"):
            assert scale.dtype is dtype and after[name].dtype is torch.float32
            assert after[name].shape == scale.shape and after[name].dim() == 2
            assert torch.equal(after[name], scale.float())


def test_a_one_by_one_scale_grid_stays_two_dimensional(tmp_path):
    config = {**DIM128, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    source = write_fp8(tmp_path / "source", config)
    convert(source, tmp_path / "megatron", megatron())
    convert(tmp_path / "megatron", tmp_path / "hf", Target(kind="hf"))
    scale = load(tmp_path / "hf")["model.layers.0.self_attn.k_proj.weight_scale_inv"]
    assert tuple(scale.shape) == (1, 1)
    assert as_bytes(tmp_path / "hf") == as_bytes(source)


def test_scale_widening_is_exact_for_every_code():
    codes = np.arange(256, dtype=np.uint8).reshape(1, -1)
    e8m0 = scales_to_fp32(codes, "F8_E8M0")
    expected = torch.from_numpy(codes.copy()).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(e8m0[0, :255], expected[0, :255])
    assert np.isnan(e8m0[0, 255])
    bf16 = torch.randn(3, 5).bfloat16()
    np.testing.assert_array_equal(scales_to_fp32(bf16.view(torch.uint8).numpy(), "BF16"), bf16.float().numpy())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_scale_that_is_not_positive_and_finite_is_named(tmp_path, bad):
    source = write_fp8(tmp_path / "source", DIM128)
    tensors = load(source)
    tensors["model.layers.1.mlp.down_proj.weight_scale_inv"][1, 2] = bad
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.weight_scale_inv: the scale of block \(1, 2\)"):
        convert(source, tmp_path / "megatron", megatron(tp=2))
    assert not (tmp_path / "megatron").exists()
    with pytest.raises(ValueError, match=r"block \(3, 4\)"):
        check_scales("x", np.array([[bad]], np.float32), (3, 4))


def test_zero_blocks_give_zero_codes_and_a_positive_scale(tmp_path):
    source = write_bf16(tmp_path / "bf16", DIM128)
    tensors = load(source)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].zero_()[0, 0] = 1.0
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "fp8", Target(kind="hf", cast="fp32"))
    out = load(tmp_path / "fp8")
    assert int(out[name].view(torch.uint8).count_nonzero()) == 1
    scales = out[name + "_scale_inv"]
    assert bool((scales > 0).all()) and bool(torch.isfinite(scales).all())
    convert(tmp_path / "fp8", tmp_path / "back", Target(kind="hf", cast="bf16"))
    assert torch.equal(load(tmp_path / "back")[name], tensors[name])


def test_casts_change_config_and_weights_together(tmp_path):
    source = write_bf16(tmp_path / "bf16", {**DIM128, "num_hidden_layers": 1})
    convert(source, tmp_path / "fp8", Target(kind="hf", cast="fp32", bf16_layers=("*.mlp.down_proj",)))
    quantization = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert quantization == {**FP8_CONFIG, "modules_to_not_convert": ["model.layers.0.mlp.down_proj", "lm_head"]}
    tensors = load(tmp_path / "fp8")
    scaled = {n.removesuffix(".weight_scale_inv") for n in tensors if n.endswith("_scale_inv")}
    linears = {n.removesuffix(".weight") for n, t in tensors.items() if n.endswith("_proj.weight") and t.dim() == 2} | {"lm_head"}
    assert scaled | set(quantization["modules_to_not_convert"]) == linears
    assert not scaled & set(quantization["modules_to_not_convert"])
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype is torch.bfloat16
    convert(tmp_path / "fp8", tmp_path / "back", Target(kind="hf", cast="bf16"))
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert {t.dtype for t in load(tmp_path / "back").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "change, words",
    [
        (None, "has no quantization_config, but 14 linears have scales"),
        ({"modules_to_not_convert": ["model.layers.0.mlp.gate_proj"]}, "1 linears have scales but are in the ignore list"),
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
    ],
)
def test_config_that_contradicts_the_tensors_is_refused(tmp_path, change, words):
    source = write_fp8(tmp_path / "source", DIM128)
    config = {**DIM128, "quantization_config": {**FP8_CONFIG, **change}} if change is not None else DIM128
    write_config(source, config)
    with pytest.raises(ValueError, match=words):
        open_checkpoint(source)


def test_a_linear_without_scale_must_be_in_the_ignore_list(tmp_path):
    source = write_fp8(tmp_path / "source", DIM128)
    tensors, plain = load(source), load(write_bf16(tmp_path / "bf16", DIM128))
    name = "model.layers.1.self_attn.o_proj"
    del tensors[name + ".weight_scale_inv"]
    tensors[name + ".weight"] = plain[name + ".weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=rf"1 have none but are not in it \({name}\)"):
        open_checkpoint(source)
    write_config(source, {**DIM128, "quantization_config": {**FP8_CONFIG, "modules_to_not_convert": [name, "lm_head"]}})
    assert name not in open_checkpoint(source).fp8
    convert(source, tmp_path / "megatron", megatron(tp=2, pp=2))
    convert(tmp_path / "megatron", tmp_path / "hf", Target(kind="hf"))
    assert as_bytes(tmp_path / "hf") == as_bytes(source)


def test_precision_never_changes_unasked_and_illegal_fp8_layouts_are_refused(tmp_path):
    source = write_fp8(tmp_path / "source", DIM64)
    with pytest.raises(ValueError, match="is FP8 already; quantising dequantised values would change its bytes"):
        convert(source, tmp_path / "x", Target(kind="hf", cast="fp32"))
    with pytest.raises(ValueError, match="is BF16 already"):
        convert(write_bf16(tmp_path / "bf16", DIM64), tmp_path / "x", Target(kind="hf", cast="bf16"))
    with pytest.raises(ValueError, match=r"k_proj rows 256 / tp 4 = 64.*TP degrees that work: 1, 2"):
        convert(source, tmp_path / "x", megatron(tp=4))
    unaligned = write_bf16(tmp_path / "unaligned", {**DIM64, "num_key_value_heads": 1})
    with pytest.raises(ValueError, match=r"k_proj rows 64 / tp 1 = 64.*TP degrees that work: none"):
        convert(unaligned, tmp_path / "x", Target(kind="hf", cast="fp32"))
    assert not (tmp_path / "x").exists() and not (tmp_path / ".x.partial").exists()


def test_bf16_shards_of_any_layout_may_be_quantised_into_a_hugging_face_directory(tmp_path):
    source = write_bf16(tmp_path / "bf16", DIM64)
    convert(source, tmp_path / "m", megatron(tp=4))  # 64 rows of k a rank: no FP8 layout, but HF tensors are whole
    convert(tmp_path / "m", tmp_path / "hf", Target(kind="hf", cast="fp32"))
    assert as_bytes(tmp_path / "hf") == as_bytes(write_fp8(tmp_path / "fp8", DIM64))
