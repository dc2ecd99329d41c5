"""Headers, indices, manifests, metadata and configs whose contents have other types than expected: a ValueError names the file."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata

from conversion.checkpoint import INDEX, MANIFEST, open_checkpoint
from conversion.convert import Target, convert
from conversion.files import SafetensorsFile
from conversion.inert_pickle import read_pickle
from conversion.layout import ParallelLayout
from conversion.reading import reading
from conversion.torch_dist_chunk import Chunk
from conversion.torch_dist_reader import TorchDistReader
from tests.unit.conversion.directories import FP8_CONFIG, load, write_bf16, write_config, write_fp8
from tests.unit.conversion.test_damage import CONFIG

X = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "3",
        '"x"',
        "{",
        DEEP,
        b"\xff\xfe{}",
        {"x": None},
        {"x": 3},
        {"x": {}},
        {"__metadata__": 3, "x": X},
        {"x": {**X, "dtype": ["U8"]}},
        {"x": {**X, "dtype": None}},
        {"x": {**X, "shape": 1}},
        {"x": {**X, "shape": ["1"]}},
        {"x": {**X, "shape": [-1]}},
        {"x": {**X, "shape": [1.0]}},
        {"x": {**X, "shape": [2**70]}},
        {"x": {**X, "shape": [2**32, 2**32]}},
        {"x": {**X, "data_offsets": None}},
        {"x": {**X, "data_offsets": []}},
        {"x": {**X, "data_offsets": [0, "1"]}},
        {"x": X, "y": {**X, "data_offsets": "01"}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_safetensors_header(tmp_path, header):
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    (tmp_path / "a.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0")
    with pytest.raises(ValueError, match=r"a\.safetensors: .*(damaged|known are)"):
        SafetensorsFile(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "text", ["[]", "3", "{", DEEP, "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["b"]}}']
)
def test_an_index(tmp_path, text):
    source = write_bf16(tmp_path / "source", CONFIG)
    (source / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: weight_map cannot be read .* damaged"):
        open_checkpoint(source)


def test_an_index_that_names_a_file_elsewhere(tmp_path):
    source = write_bf16(tmp_path / "source", CONFIG)
    (source / INDEX).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ValueError, match="which is not a file beside it"):
        open_checkpoint(source)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": None},
        {"layout": 3},
        {"layout": {"tp": "2"}},
        {"layout": {"tp": None}},
        {"layout": {"other": 2}},
        {"layout": {"row_parallel": 2}},
        {"fp8_modules": None},
        {"fp8_modules": [3]},
        {"files": []},
        {"files": {"a": 3}},
        {"files": {"a": {"b": 3}}},
        {"files": {"a": {"b": {}}}},
        {"files": {"a": {"b": {"sha256": 3}}}},
        {"kind": "other"},
        {"kind": ["megatron"]},
        None,
    ],
    ids=str,
)
def test_a_manifest(tmp_path, change):
    source = write_bf16(tmp_path / "source", CONFIG)
    convert(source, tmp_path / "m", Target(kind="megatron", layout=ParallelLayout()))
    file = tmp_path / "m" / MANIFEST
    file.write_text("[3]" if change is None else json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=rf"{MANIFEST}: .*(damaged or of another format|kind is)"):
        open_checkpoint(tmp_path / "m")


def write_dist(path, size=(2, 2), chunk=((0, 0), (2, 2)), key="decoder.final_layernorm.weight", place=None, change=None):
    """Write a directory of one tensor; change: edits the metadata."""
    path.mkdir()
    torch.save(torch.zeros(size, dtype=torch.bfloat16), path / "__0_0.distcp")
    convert_source = write_bf16(path / "source", CONFIG)
    convert(convert_source, path / "real", Target(kind="torch_dist"))
    metadata = FileSystemReader(path / "real").read_metadata()
    info = next(iter(metadata.storage_data.values()))
    info.relative_path, info.offset, info.length = "__0_0.distcp", 0, (path / "__0_0.distcp").stat().st_size
    for name, value in (place or {}).items():
        setattr(info, name, value)
    at = torch.Size(chunk[0])
    described = TensorStorageMetadata(
        TensorProperties(dtype=torch.bfloat16), torch.Size(size), [ChunkStorageMetadata(at, torch.Size(chunk[1]))]
    )
    metadata.state_dict_metadata, metadata.storage_data = {key: described}, {MetadataIndex(key, at): info}
    if change is not None:
        change(metadata, described, info)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def test_metadata_written_so_is_read(tmp_path):
    assert TorchDistReader(write_dist(tmp_path / "d")).entries["decoder.final_layernorm.weight"].shape == (2, 2)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"size": (), "chunk": ((), ())}, r"has shape \(\); a parameter of the model is a vector or a matrix"),
        ({"size": (2, 2, 2), "chunk": ((0, 0, 0), (2, 2, 2))}, "a parameter of the model is a vector or a matrix"),
        ({"chunk": ((4, 0), (2, 2))}, "lies outside"),
        ({"chunk": ((0,), (4,))}, "lies outside"),
        ({"place": {"offset": "0"}}, "damaged or of another format"),
        ({"place": {"offset": -1}}, "damaged or of another format"),
        ({"place": {"length": None}}, "damaged or of another format"),
        ({"place": {"relative_path": 3}}, "damaged or of another format"),
        ({"change": lambda m, d, i: setattr(m, "storage_data", None)}, "damaged or of another format"),
        ({"change": lambda m, d, i: setattr(m, "state_dict_metadata", [1])}, "damaged or of another format"),
        ({"change": lambda m, d, i: delattr(m, "storage_data")}, "damaged or of another format"),
        ({"change": lambda m, d, i: setattr(d, "size", 3)}, "damaged or of another format"),
        ({"change": lambda m, d, i: setattr(d, "chunks", 3)}, "damaged or of another format"),
        ({"key": 3}, "damaged or of another format"),
    ],
)
def test_the_metadata_of_torch_dist(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        TorchDistReader(write_dist(tmp_path / "d", **options))


@pytest.mark.parametrize(
    "data", [b"", b"]" * 10, b"(" * 100, b"K\x01K\x02\x86.", b"\x80\x05\x95" + b"\xff" * 8, b"N0.", b"cos\nsystem\n)R)R."]
)
def test_a_pickle_of_something_else(tmp_path, data):
    path = tmp_path / "d"
    path.mkdir()
    (path / ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match=r"\.metadata.*(damaged|not its metadata)"):
        TorchDistReader(path)


def test_every_damaged_byte_of_a_chunk_is_a_value_error_or_is_harmless(tmp_path):
    """Each byte of header, description and directory in turn, set to 0 and to 255."""
    file = tmp_path / "x"
    torch.save(torch.ones(2, 3, dtype=torch.bfloat16), file)
    whole = file.read_bytes()
    refused = 0
    for at in range(len(whole)):
        for value in (0, 255):
            file.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            fd = os.open(file, os.O_RDONLY)
            try:
                Chunk(fd, file, 0, len(whole), "t")
            except ValueError as error:
                assert str(file) in str(error)
                refused += 1
            finally:
                os.close(fd)
    assert refused > 100


@pytest.mark.parametrize(
    "quantization, words",
    [
        (3, "quantization_config is 3; it must be an object"),
        ([1], "quantization_config is .* must be an object"),
        ({**FP8_CONFIG, "weight_block_size": 128}, "weight_block_size is 128; it must be a list of whole numbers"),
        ({**FP8_CONFIG, "weight_block_size": ["128", 128]}, "weight_block_size is .* must be a list of whole numbers"),
        ({**FP8_CONFIG, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; it must be a list of module names"),
        ({**FP8_CONFIG, "ignored_layers": [3]}, r"ignored_layers is \[3\]; it must be a list of module names"),
        ({**FP8_CONFIG, "ignored_layers": 3}, "ignored_layers is 3; it must be"),
        ({**FP8_CONFIG, "fmt": ["e4m3"]}, r"fmt is \['e4m3'\]"),
    ],
    ids=str,
)
def test_a_quantization_config(tmp_path, quantization, words):
    source = write_fp8(tmp_path / "source", CONFIG)
    write_config(source, {**CONFIG, "quantization_config": quantization})
    with pytest.raises(ValueError, match=words):
        open_checkpoint(source)


@pytest.mark.parametrize("module", ["model.embed_tokens", "model.norm", "model.layers.1.input_layernorm", "lm_head"])
def test_scales_of_what_is_no_linear_of_a_layer(tmp_path, module):
    source = write_fp8(tmp_path / "source", CONFIG)
    tensors = load(source)
    tensors[f"{module}.weight"] = tensors[f"{module}.weight"].to(torch.float8_e4m3fn)
    tensors[f"{module}.weight_scale_inv"] = torch.ones(2, 2)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=f"{module} has FP8 scales, .*modules_to_not_convert"):
        open_checkpoint(source)


def test_a_tied_head_of_another_dtype(tmp_path):
    source = write_bf16(tmp_path / "source", {**CONFIG, "tie_word_embeddings": True})
    tensors = load(source)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].float()}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight is F32 and model\.embed_tokens\.weight BF16; remove the head"):
        open_checkpoint(source)


def test_only_errors_of_parsing_are_taken_for_damage(tmp_path):
    with pytest.raises(AssertionError), reading(tmp_path, "x"):
        raise AssertionError
    with pytest.raises(ValueError, match="inner"), reading(tmp_path, "x"):
        raise ValueError("inner")
    with pytest.raises(ValueError, match="not a readable pickle"):
        read_pickle(b"\x80", "here")
