"""Damaged sources, full disks and kills: a clear error or a right result, never a silently wrong directory."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion import output as output_module
from conversion.checkpoint import MANIFEST, open_checkpoint
from conversion.convert import Target, convert
from conversion.files import SafetensorsFile
from conversion.layout import ParallelLayout
from tests.unit.conversion.directories import as_bytes, load, write_bf16, write_fp8
from tests.unit.conversion.killed import check_kills_and_resumption
from tests.unit.conversion.shapes import published_config

CONFIG = {**published_config("Llama-3.1-8B", layers=2, vocab=203), "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"intermediate_size": 256}
TP2 = Target(kind="megatron", layout=ParallelLayout(tp=2))
NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path):
    return write_bf16(tmp_path / "source", CONFIG)


@pytest.fixture
def sharded(source, tmp_path):
    """The same model in several shards with an index."""
    convert(source, tmp_path / "m", TP2)
    convert(tmp_path / "m", tmp_path / "sharded", Target(kind="hf", max_shard_bytes=500_000))
    return tmp_path / "sharded"


def edit_index(path: Path, change) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("fp8", [False, True])
def test_index_describes_the_shards(tmp_path, fp8):
    source = (write_fp8 if fp8 else write_bf16)(tmp_path / "source", CONFIG)
    convert(source, tmp_path / "m", TP2)
    convert(tmp_path / "m", tmp_path / "out", Target(kind="hf", max_shard_bytes=300_000))
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    shards = {p.name: load_file(p) for p in (tmp_path / "out").glob("*.safetensors")}
    assert len(shards) > 3
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    for file, tensors in shards.items():
        for name in tensors:
            if name.endswith("_scale_inv"):
                assert index["weight_map"][name.removesuffix("_scale_inv")] == file
    assert as_bytes(tmp_path / "out") == as_bytes(source)


def test_exporting_again_leaves_no_shard_of_the_first_export(source, sharded, tmp_path):
    assert len(list(sharded.glob("*.safetensors"))) > 2
    with pytest.raises(ValueError, match=r"is not empty; .*overwrite"):
        convert(tmp_path / "m", sharded, Target(kind="hf"))
    convert(tmp_path / "m", sharded, Target(kind="hf", overwrite=True))
    assert sorted(p.name for p in sharded.iterdir()) == ["config.json", MANIFEST, "model.safetensors"]
    assert as_bytes(sharded) == as_bytes(source)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_only_a_checkpoint_is_ever_replaced(source, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="does not look like a checkpoint, so it is not replaced"):
        convert(source, tmp_path / "precious", Target(kind="megatron", layout=ParallelLayout(), overwrite=True))
    with pytest.raises(ValueError, match="contain each other"):
        convert(source, source / "inside", TP2)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "x"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda m: m.pop("model.norm.weight"), "1 tensors of the shards are not in the index: model.norm.weight"),
        (lambda m: m.update({"model.norm.weight": "model-00001-of-00099.safetensors"}), "model-00001-of-00099.safetensors does not exist"),
        (lambda m: m.update({"model.norm.weight": min(m.values())}), "model.norm.weight should be in .* but is in"),
        (lambda m: m.update({"model.extra.weight": min(m.values())}), "model.extra.weight should be in .* but is in no shard"),
    ],
    ids=["entry missing", "shard missing", "wrong shard", "tensor missing"],
)
def test_index_and_shards_that_disagree(sharded, change, words):
    edit_index(sharded, change)
    with pytest.raises(ValueError, match=words):
        open_checkpoint(sharded)


def test_several_files_without_an_index_are_not_guessed(sharded):
    (sharded / INDEX).unlink()
    with pytest.raises(ValueError, match=r"holds \d+ \*\.safetensors files and no model\.safetensors\.index\.json"):
        open_checkpoint(sharded)


def test_a_tensor_that_stands_in_two_shards(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    with pytest.raises(ValueError, match=f"{name} stands in {first.name} and in {second.name}"):
        open_checkpoint(sharded)


def test_a_name_that_stands_twice_in_one_header(tmp_path):
    entry = '"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = f"{{{entry},{entry}}}".encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(ValueError, match="x stands twice in the header"):
        SafetensorsFile(tmp_path / "a.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 60, -1000, -1])
def test_a_truncated_shard(source, keep):
    path = source / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(ValueError, match="truncated or damaged"):
        open_checkpoint(source)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "1 missing: model.layers.1.mlp.up_proj.weight"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}),
            "1 not used: model.layers.2.mlp.up_proj.weight",
        ),
        (
            lambda t: t.update({NORM: t[NORM].float()}),
            "model.norm.weight is F32; expected BF16; save .*bfloat16",
        ),
        (
            lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}),
            "is F8_E4M3; .*need their weight_scale_inv",
        ),
        (lambda t: t.update({NORM: t[NORM][:-1]}), r"has shape \(255,\); config.json says \(256,\)"),
    ],
    ids=["missing", "spare", "float32", "fp8 without scale", "shape"],
)
def test_tensors_that_do_not_match_the_config(source, change, words):
    tensors = load(source)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, source / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        open_checkpoint(source)


def test_rotary_buffers_of_old_exports_are_ignored(source, tmp_path):
    before = as_bytes(source)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(64)}
    save_file({**load(source), **buffer}, source / "model.safetensors")
    convert(source, tmp_path / "m", TP2)
    convert(tmp_path / "m", tmp_path / "out", Target(kind="hf"))
    assert as_bytes(tmp_path / "out") == before


@pytest.mark.parametrize("differs", [False, True])
def test_a_spare_head_of_a_tied_model_is_dropped_or_refused(tmp_path, differs):
    source = write_bf16(tmp_path / "source", {**CONFIG, "tie_word_embeddings": True})
    before = as_bytes(source)
    head = load(source)["model.embed_tokens.weight"].clone()
    head[202, 255] += 1.0 if differs else 0.0
    save_file({**load(source), "lm_head.weight": head}, source / "model.safetensors")
    if differs:
        with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
            open_checkpoint(source)
        return
    convert(source, tmp_path / "m", TP2)
    convert(tmp_path / "m", tmp_path / "out", Target(kind="hf"))
    assert as_bytes(tmp_path / "out") == before


def test_an_untied_model_without_a_head_is_refused(tmp_path):
    source = write_bf16(tmp_path / "source", {**CONFIG, "tie_word_embeddings": True})
    (source / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"1 missing: lm_head\.weight"):
        open_checkpoint(source)


def test_a_full_disk_leaves_nothing_at_the_target_and_the_next_run_finishes(source, tmp_path, monkeypatch):
    real, left = os.pwrite, [600_000]

    def pwrite(fd, data, offset):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left on device"):
        convert(source, tmp_path / "m", TP2)
    assert not (tmp_path / "m").exists()
    monkeypatch.setattr(os, "pwrite", real)
    convert(source, tmp_path / "m", TP2)
    convert(tmp_path / "m", tmp_path / "out", Target(kind="hf"))
    assert as_bytes(tmp_path / "out") == as_bytes(source)


def test_short_writes_are_continued(source, tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: max(1, len(data) // 2 + 1)], offset))
    convert(source, tmp_path / "m", TP2)
    monkeypatch.setattr(os, "pwrite", real)
    convert(tmp_path / "m", tmp_path / "out", Target(kind="hf"))
    assert as_bytes(tmp_path / "out") == as_bytes(source)


def test_killed_at_chosen_tensors_and_resumed(source, tmp_path):
    words = ["to-megatron", str(source), str(tmp_path / "m"), "--tp", "2", "--pp", "2"]
    target = Target(kind="megatron", layout=ParallelLayout(tp=2, pp=2))
    check_kills_and_resumption(source, tmp_path / "m", words, target, shares=(0.0, 0.05, 0.5, 0.6, 1.0))
    convert(tmp_path / "m", tmp_path / "out", Target(kind="hf"))
    assert as_bytes(tmp_path / "out") == as_bytes(source)


def test_a_partial_directory_of_other_sources_is_not_resumed(source, tmp_path, monkeypatch):
    def fail(self, manifest):
        raise OSError("cut here")

    with monkeypatch.context() as patch:
        patch.setattr(output_module.OutputDirectory, "publish", fail)
        with pytest.raises(OSError, match="cut here"):
            convert(source, tmp_path / "m", TP2)
    assert (tmp_path / ".m.partial" / "pp000-tp000-vp000.safetensors").is_file()
    tensors = {name: tensor * 2 for name, tensor in load(source).items()}
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "m", TP2)
    convert(tmp_path / "m", tmp_path / "out", Target(kind="hf"))
    assert as_bytes(tmp_path / "out") == as_bytes(source)


def test_a_replacement_cut_between_its_renames_is_undone(source, tmp_path):
    convert(source, tmp_path / "m", TP2)
    expected = {p.name: p.read_bytes() for p in (tmp_path / "m").glob("*.safetensors")}
    (tmp_path / "m").rename(tmp_path / ".m.old")
    with pytest.raises(ValueError, match="is not empty"):
        convert(source, tmp_path / "m", TP2)
    assert {p.name: p.read_bytes() for p in (tmp_path / "m").glob("*.safetensors")} == expected


def test_two_writers_of_one_target_do_not_mix(source, tmp_path):
    first = output_module.OutputDirectory(tmp_path / "m", {"a": 1})
    with pytest.raises(ValueError, match="is being written by another process"):
        output_module.OutputDirectory(tmp_path / "m", {"a": 1})
    first.close()
    output_module.OutputDirectory(tmp_path / "m", {"a": 1}).close()
