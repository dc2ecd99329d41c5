"""Damaged distributed checkpoints: every one is refused with the file and the tensor, none gives a directory."""

import errno
import json
import os
import pickle
import shutil
from itertools import permutations

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from conversion.convert import Target, convert
from conversion.verify import check_manifest
from tests.unit.conversion.directories import as_bytes, write_bf16
from tests.unit.conversion.killed import check_kills_and_resumption
from tests.unit.conversion.shapes import published_config

CONFIG = {**published_config("Qwen2.5-7B", layers=2, vocab=203), "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"head_dim": 32, "intermediate_size": 256}
QKV = "decoder.layers.self_attention.linear_qkv.weight"
NORM = "decoder.final_layernorm.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("dist")
    write_bf16(root / "source", CONFIG)
    convert(root / "source", root / "dist", Target(kind="torch_dist", max_shard_bytes=200_000))
    return root


@pytest.fixture
def dist(whole, tmp_path):
    return shutil.copytree(whole / "dist", tmp_path / "dist")


def edit(dist, change):
    """Change `.metadata` through PyTorch's own classes."""
    metadata = FileSystemReader(dist).read_metadata()
    change(metadata)
    (dist / ".metadata").write_bytes(pickle.dumps(metadata))


def place_of(dist, key, offset):
    return FileSystemReader(dist).read_metadata().storage_data[MetadataIndex(key, torch.Size(offset))]


def refused(dist, tmp_path, words):
    with pytest.raises(ValueError, match=words):
        convert(dist, tmp_path / "out", Target(kind="hf"))
    assert not (tmp_path / "out").exists()


def test_missing_files(dist, tmp_path):
    file = place_of(dist, QKV, (1, 0, 0)).relative_path
    (dist / file).rename(tmp_path / "elsewhere")
    refused(dist, tmp_path, f"{file} does not exist; the checkpoint is incomplete")
    (tmp_path / "elsewhere").rename(dist / file)
    (dist / ".metadata").unlink()
    refused(dist, tmp_path, r"\.metadata does not exist; without it the \*\.distcp files cannot be read")


@pytest.mark.parametrize("keep", [0, 10, 400, -30])
def test_truncated_metadata(dist, tmp_path, keep):
    data = (dist / ".metadata").read_bytes()
    (dist / ".metadata").write_bytes(data[:keep])
    refused(dist, tmp_path, r"\.metadata is not a readable pickle")


def test_metadata_of_something_else_and_code_in_it(dist, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (dist / ".metadata").write_bytes(pickle.dumps({"bomb": Bomb()}))
    refused(dist, tmp_path, "found dict where PyTorch's distributed checkpoint has Metadata")
    (dist / ".metadata").write_bytes(pickle.dumps(Bomb()))
    refused(dist, tmp_path, "found mkdir where PyTorch's distributed checkpoint has Metadata")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0.0, 0.5, -1])
def test_a_truncated_data_file(dist, tmp_path, keep):
    place = place_of(dist, QKV, (1, 0, 0))
    path = dist / place.relative_path
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 1 if keep < 0 else int(keep * len(data))])
    refused(dist, tmp_path, "behind the file's end; it is truncated")


def test_a_flipped_bit_in_a_weight_is_found_by_its_checksum(dist, tmp_path):
    place = place_of(dist, QKV, (1, 0, 0))
    path = dist / place.relative_path
    data = bytearray(path.read_bytes())
    data[place.offset + place.length // 2] ^= 1
    path.write_bytes(data)
    refused(dist, tmp_path, r"linear_qkv\.weight at \(1, 0, 0\) is not what was written \(crc32 differs\)")
    checked, difference = check_manifest(dist)
    assert checked >= 0 and difference is not None and "crc32 differs" in difference.values[1]
    assert difference.tensor == f"{place.relative_path}: decoder.layers.1.self_attention.linear_qkv.weight"


def test_a_damaged_archive(dist, tmp_path):
    place = place_of(dist, QKV, (1, 0, 0))
    path = dist / place.relative_path
    data = bytearray(path.read_bytes())
    data[place.offset + place.length - 22 : place.offset + place.length] = bytes(22)  # the end of its central directory
    path.write_bytes(data)
    refused(dist, tmp_path, "is not a tensor that torch.save wrote")


def without_chunk(metadata):
    del metadata.state_dict_metadata[QKV].chunks[1]


def chunk_twice(metadata):
    chunks = metadata.state_dict_metadata[QKV].chunks
    chunks[1] = chunks[0]


def without_place(metadata):
    del metadata.storage_data[MetadataIndex(QKV, torch.Size((1, 0, 0)))]


def swapped_places(metadata):
    storage = metadata.storage_data
    fc2 = MetadataIndex("decoder.layers.mlp.linear_fc2.weight", torch.Size((0, 0, 0)))
    storage[MetadataIndex(QKV, torch.Size((1, 0, 0)))] = storage[fc2]


def outside(metadata):
    metadata.storage_data[MetadataIndex(NORM, torch.Size((0,)))].relative_path = "../source/model.safetensors"


def missing(metadata):
    del metadata.state_dict_metadata[NORM]


def spare(metadata):
    metadata.state_dict_metadata["decoder.extra.weight"] = metadata.state_dict_metadata[NORM]
    metadata.storage_data[MetadataIndex("decoder.extra.weight", torch.Size((0,)))] = metadata.storage_data[
        MetadataIndex(NORM, torch.Size((0,)))
    ]


def stale_copy(metadata):
    metadata.state_dict_metadata["decoder.layers.1.input_layernorm.weight"] = metadata.state_dict_metadata[NORM]
    metadata.storage_data[MetadataIndex("decoder.layers.1.input_layernorm.weight", torch.Size((0,)))] = metadata.storage_data[
        MetadataIndex(NORM, torch.Size((0,)))
    ]


def one_half(metadata):
    del metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    metadata.state_dict_metadata["decoder.layers.0.mlp.linear_fc1.weight_w"] = metadata.state_dict_metadata[NORM]
    metadata.storage_data[MetadataIndex("decoder.layers.0.mlp.linear_fc1.weight_w", torch.Size((0,)))] = metadata.storage_data[
        MetadataIndex(NORM, torch.Size((0,)))
    ]


def other_dtype(metadata):
    metadata.state_dict_metadata[NORM].properties.dtype = torch.float32


def unknown_dtype(metadata):
    metadata.state_dict_metadata[NORM].properties.dtype = torch.complex64


@pytest.mark.parametrize(
    "change, words",
    [
        (without_chunk, f"the chunks of {QKV} do not cover its .* exactly once"),
        (chunk_twice, f"the chunks of {QKV} do not cover its .* exactly once"),
        (without_place, r"linear_qkv\.weight at \(1, 0, 0\) is in no file"),
        (swapped_places, r"has shape \(1, 128, 256\), \.metadata says \(1, 256, 128\)"),
        (outside, "outside the directory"),
        (missing, f"1 missing: {NORM}"),
        (spare, r"1 not used: decoder\.extra\.weight"),
        (stale_copy, r"input_layernorm\.weight is stored twice"),
        (other_dtype, rf"{NORM} at \(0,\) is BF16, \.metadata says F32"),
        (unknown_dtype, rf"{NORM} has dtype torch\.complex64; expected one of torch\.bfloat16"),
        (one_half, "has one of its halves"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_metadata_that_contradicts_the_data(dist, tmp_path, change, words):
    edit(dist, change)
    refused(dist, tmp_path, words)


def as_halves(dist, w_rows=256, w_dtype=torch.bfloat16):
    """Add layer 0's fc1 [512, 128] once more, as two tensors `_w` and `_v` in a file of their own."""
    kind = type(place_of(dist, NORM, (0,)))
    described = {}
    for end, rows, dtype in (("_w", w_rows, w_dtype), ("_v", 256, torch.bfloat16)):
        name = f"halves{end}.distcp"
        with (dist / name).open("wb") as file:
            torch.save(torch.zeros(rows, 128, dtype=dtype), file)
        described[f"{FC1}{end}"] = (name, (dist / name).stat().st_size, rows, dtype)

    def change(metadata):
        for key, (name, size, rows, dtype) in described.items():
            sizes, at = torch.Size((rows, 128)), torch.Size((0, 0))
            chunks = [ChunkStorageMetadata(at, sizes)]
            metadata.state_dict_metadata[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), sizes, chunks)
            metadata.storage_data[MetadataIndex(key, at)] = kind(name, 0, size)

    return change


def test_a_whole_tensor_beside_its_halves_is_found_in_every_order(dist, tmp_path):
    edit(dist, as_halves(dist))
    described = FileSystemReader(dist).read_metadata().state_dict_metadata
    keys = ["decoder.layers.mlp.linear_fc1.weight", f"{FC1}_w", f"{FC1}_v"]
    for order in permutations(keys):

        def reorder(metadata, order=order):
            metadata.state_dict_metadata = {key: described[key] for key in (*order, *(k for k in described if k not in order))}

        edit(dist, reorder)
        assert [k for k in FileSystemReader(dist).read_metadata().state_dict_metadata if k in keys] == list(order)
        refused(dist, tmp_path, r"layers\.0\.mlp\.linear_fc1\.weight is stored twice")


@pytest.mark.parametrize("options", [{"w_rows": 128}, {"w_dtype": torch.float32}], ids=["rows", "dtype"])
def test_halves_that_differ(dist, tmp_path, options):
    def without_the_whole(metadata):
        as_halves(dist, **options)(metadata)
        del metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]

    edit(dist, without_the_whole)
    refused(dist, tmp_path, r"the halves _w and _v of decoder\.layers\.0\.mlp\.linear_fc1\.weight differ")


def test_optimizer_state_and_objects_beside_the_model_are_passed_over(whole, dist, tmp_path):
    def beside(metadata):
        for key in ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "rng_state"):
            metadata.state_dict_metadata[key] = metadata.state_dict_metadata[NORM]

    edit(dist, beside)
    convert(dist, tmp_path / "out", Target(kind="hf"))
    assert as_bytes(tmp_path / "out") == as_bytes(whole / "source")


def test_another_dtype_and_another_config(dist, tmp_path):
    config = json.loads((dist / "hf" / "config.json").read_text())
    (dist / "hf" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(dist, tmp_path, "missing: decoder.layers.2.")
    (dist / "hf" / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    refused(dist, tmp_path, r"has shape \(256, 128\); config\.json says \(300, 128\)")
    (dist / "hf" / "config.json").write_text(json.dumps(config))
    place = place_of(dist, NORM, (0,))
    with (dist / "wide.distcp").open("wb") as file:
        torch.save(torch.ones(128), file)
    size = (dist / "wide.distcp").stat().st_size

    def wide(metadata):
        metadata.storage_data[MetadataIndex(NORM, torch.Size((0,)))] = type(place)("wide.distcp", 0, size)
        metadata.state_dict_metadata[NORM].properties.dtype = torch.float32

    edit(dist, wide)
    refused(dist, tmp_path, rf"{NORM} is F32; expected BF16")


def test_a_full_disk_leaves_nothing_and_the_next_run_finishes(whole, tmp_path, monkeypatch):
    real, left = os.pwrite, [300_000]

    def pwrite(fd, data, offset):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    target = Target(kind="torch_dist", max_shard_bytes=100_000)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left on device"):
        convert(whole / "source", tmp_path / "d", target)
    assert not (tmp_path / "d").exists()
    monkeypatch.setattr(os, "pwrite", real)
    convert(whole / "source", tmp_path / "d", target)
    convert(tmp_path / "d", tmp_path / "out", Target(kind="hf"))
    assert as_bytes(tmp_path / "out") == as_bytes(whole / "source")


def test_killed_at_chosen_tensors_and_resumed(whole, tmp_path):
    source, final = whole / "source", tmp_path / "d"
    words = ["to-megatron", str(source), str(final), "--format", "torch_dist", "--max-shard-gb", "0.0001"]
    check_kills_and_resumption(source, final, words, Target(kind="torch_dist", max_shard_bytes=100_000), shares=(0.4, 1.0))
    convert(final, tmp_path / "out", Target(kind="hf"))
    assert as_bytes(tmp_path / "out") == as_bytes(source)
