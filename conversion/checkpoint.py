"""A checkpoint on disk, opened and checked: which file holds which tensor, and what kind of checkpoint it is.

Enters: a Hugging Face directory, a directory of Megatron rank shards that this package wrote, or a `torch_dist` directory of
megatron.core.dist_checkpointing. Leaves: `Checkpoint`, from which rectangles are read. Before any weight is read: every expected tensor
stands in exactly one file with the right dtype and shape, the index names what the shards hold, `quantization_config` and the scales
agree, and the layout is legal.

Kinds: `hf` (BF16 or block FP8), `megatron` and `torch_dist` (BF16). A `megatron` directory holds `conversion_manifest.json`, one
`ppP-tpT-vpV.safetensors` for each model chunk of each rank, and in `hf/` the config, tokenizer and generation files of the source. A
`torch_dist` directory holds `.metadata` and `*.distcp`, and where this package wrote it also manifest and `hf/`; for one that
Megatron-core wrote, the model's config has to be named.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conversion.architecture import ModelArchitecture, read_config
from conversion.files import ITEM_BYTES, SafetensorsFile, TensorReader
from conversion.layout import ParallelLayout, check_layout_of
from conversion.names import FIRST_STAGE, LM_HEAD, SCALE_SUFFIX, check_names, is_non_weight
from conversion.quantization_config import fp8_modules_of
from conversion.reading import of_type, reading
from conversion.scales import SCALE_DTYPES, check_scales, scales_to_fp32
from conversion.shards import HF, TORCH_DIST, StoredTensor, hf_tensors, megatron_tensors, rank_keys, torch_dist_tensors
from conversion.torch_dist_reader import METADATA, TorchDistReader

INDEX = "model.safetensors.index.json"
MANIFEST = "conversion_manifest.json"
CARRIED = "hf"
FORMAT_VERSION = 1
"""Of the manifest."""
KINDS = ("hf", "megatron", "torch_dist")
_RANK_FILE = re.compile(r"pp\d+-tp\d+-vp\d+\.safetensors")


@dataclass(kw_only=True)
class Checkpoint:
    """An opened checkpoint; `tensors` describes what it stores, `read` fetches rectangles."""

    path: Path
    kind: str
    arch: ModelArchitecture
    layout: ParallelLayout | None
    """None for `hf` and `torch_dist`, which are the same for every layout."""
    fp8: frozenset[str]
    """Hugging Face module names of the block-FP8 linears."""
    tensors: list[StoredTensor]
    config_dir: Path
    """Where config.json and the tokenizer and generation files stand."""
    files: dict[tuple[str, str], TensorReader] = field(default_factory=dict)
    """(location, tensor name) -> file, scales included."""

    def read(self, stored: StoredTensor, rows: tuple[int, int], cols: tuple[int, int], out: np.ndarray) -> None:
        """Read BF16 elements or FP8 codes; out: [rows, columns * item bytes] uint8."""
        self.files[stored.location, stored.name].read(stored.name, rows, cols, out)

    def read_scales(self, stored: StoredTensor, rows: tuple[int, int], cols: tuple[int, int]) -> np.ndarray:
        """Return FP32 scales of a range of blocks, [rows, columns]; raises ValueError for NaN, infinite or non-positive ones."""
        source = self.files[stored.location, stored.scale_name]
        dtype = source.entries[stored.scale_name].dtype
        raw = np.empty((rows[1] - rows[0], (cols[1] - cols[0]) * ITEM_BYTES[dtype]), np.uint8)
        source.read(stored.scale_name, rows, cols, raw)
        scales = scales_to_fp32(raw, dtype)
        check_scales(f"{source.path}: {stored.scale_name}", scales, (rows[0], cols[0]))
        return scales

    def close(self) -> None:
        """Close all files."""
        for file in set(self.files.values()):
            file.close()


def open_checkpoint(path: str | Path, hf_config: str | Path | None = None) -> Checkpoint:
    """Open a directory of any kind; raises ValueError that names what is missing, spare, truncated or contradictory.

    hf_config: a directory with the config.json (and the tokenizer and generation files) of a `torch_dist` source that has none in `hf/`.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a directory; give a Hugging Face directory, one that `to-megatron` wrote, or a torch_dist checkpoint"
        )
    kind = kind_of(path)
    if kind == "torch_dist":
        return _open_torch_dist(path, hf_config)
    if hf_config is not None:
        raise ValueError(f"{path} is of kind {kind} and has its own config.json; leave the config directory {hf_config} out")
    return _open_megatron(path) if kind == "megatron" else _open_hf(path)


def kind_of(path: Path) -> str:
    """Tell `hf`, `megatron` and `torch_dist` apart by what the directory holds."""
    if (path / MANIFEST).is_file():
        return str(read_manifest(path)["kind"])
    ranks = sorted(p.name for p in path.glob("*.safetensors") if _RANK_FILE.fullmatch(p.name))
    if ranks:
        raise ValueError(
            f"{path} holds {ranks[0]}, a shard of Megatron ranks, but no {MANIFEST}, which names their layout; copy it, or convert again"
        )
    backend = path / "metadata.json"
    if (path / METADATA).is_file() or any(path.glob("*.distcp")):
        return "torch_dist"
    if backend.is_file() and not (path / "config.json").is_file():
        raise ValueError(f"{path} has metadata.json but neither {METADATA} nor *.distcp; torch_dist is the format that is read")
    return "hf"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a directory that this package wrote; raises ValueError where it is damaged or of another version."""
    file = path / MANIFEST
    with reading(file, "the manifest"):
        manifest: dict[str, Any] = of_type(json.loads(file.read_text(encoding="utf-8")), dict)
        if manifest.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{file}: format_version is {manifest.get('format_version')!r}; this version reads {FORMAT_VERSION}: convert again, or "
                "use the version that wrote it"
            )
        if manifest.get("kind") not in KINDS:
            raise ValueError(f"{file}: kind is {manifest.get('kind')!r}; it must be one of {', '.join(KINDS)}, convert again")
        for module in of_type(manifest["fp8_modules"], list):
            of_type(module, str)
        for tensors in of_type(manifest["files"], dict).values():
            for described in of_type(tensors, dict).values():
                of_type(described["sha256"], str)
        layout = of_type(manifest["layout"], *((dict,) if manifest["kind"] == "megatron" else (type(None),))) or {}
        for key, value in layout.items():
            of_type(value, *((str,) if key == "row_parallel" else (int, type(None)) if key.endswith("_stage_layers") else (int,)))
    return manifest


def _open_hf(path: Path) -> Checkpoint:
    config = read_config(path)
    arch = ModelArchitecture.from_hf_config(config)
    by_name = _hf_files(path)
    fp8 = fp8_modules_of(config, arch, by_name)
    tensors = hf_tensors(arch, fp8)
    checkpoint = Checkpoint(path=path, kind="hf", arch=arch, layout=None, fp8=fp8, tensors=tensors, config_dir=path)
    found = dict(by_name)
    if arch.tie_embeddings and LM_HEAD in found:
        _check_tied_head(found.pop(LM_HEAD), by_name)
    _bind(checkpoint, HF, tensors, found)
    return checkpoint


def _check_tied_head(head: SafetensorsFile, by_name: dict[str, SafetensorsFile]) -> None:
    """Accept a spare copy of a tied head that equals the embedding; raise ValueError where it differs."""
    embedding = "model.embed_tokens.weight"
    if embedding not in by_name or head.entries[LM_HEAD].shape != by_name[embedding].entries[embedding].shape:
        raise ValueError(f"{head.path}: tie_word_embeddings is true, but {LM_HEAD} has another shape than {embedding}")
    entry, dtype = head.entries[LM_HEAD], by_name[embedding].entries[embedding].dtype
    if entry.dtype != dtype:
        raise ValueError(
            f"{head.path}: tie_word_embeddings is true, but {LM_HEAD} is {entry.dtype} and {embedding} {dtype}; remove the head, or save "
            "the model in bfloat16"
        )
    step = max(1, 2**24 // entry.row_bytes)
    for first in range(0, entry.shape[0], step):
        rows = (first, min(first + step, entry.shape[0]))
        one, two = (np.empty((rows[1] - rows[0], entry.row_bytes), np.uint8) for _ in range(2))
        head.read(LM_HEAD, rows, (0, entry.shape[1]), one)
        by_name[embedding].read(embedding, rows, (0, entry.shape[1]), two)
        if not np.array_equal(one, two):
            raise ValueError(
                f"{head.path}: tie_word_embeddings is true, but {LM_HEAD} differs from {embedding} in rows {rows[0]}..{rows[1]}; "
                "set tie_word_embeddings to false in config.json or remove the head"
            )


def _hf_files(path: Path) -> dict[str, SafetensorsFile]:
    """Return tensor name -> file, after checking that index and shards agree."""
    index_path = path / INDEX
    if index_path.is_file():
        with reading(index_path, "weight_map"):
            weight_map = of_type(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"], dict)
            names = sorted({of_type(name, str) for name in weight_map.values()})
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{index_path} names {outside[0]!r}, which is not a file beside it; copy the index again")
    else:
        names = sorted(p.name for p in path.glob("*.safetensors"))
        if len(names) != 1:
            raise ValueError(f"{path} holds {len(names)} *.safetensors files and no {INDEX}; one file, or an index, is needed")
        weight_map = None
    by_name: dict[str, SafetensorsFile] = {}
    for name in names:
        file = SafetensorsFile(path / name)
        for tensor in file.entries:
            if tensor in by_name:
                raise ValueError(f"{tensor} stands in {by_name[tensor].path.name} and in {name}; one of them is stale, remove it")
            by_name[tensor] = file
    for tensor, name in (weight_map or {}).items():
        if tensor not in by_name or by_name[tensor].path.name != name:
            where = by_name[tensor].path.name if tensor in by_name else "no shard"
            raise ValueError(f"{index_path}: {tensor} should be in {name} but is in {where}; index and shards are of different exports")
    spare = sorted(n for n in by_name if n not in weight_map and not is_non_weight(n)) if weight_map is not None else []
    if spare:
        raise ValueError(f"{index_path}: {len(spare)} tensors of the shards are not in the index: {', '.join(spare[:8])}")
    return by_name


def _open_megatron(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    with reading(path / MANIFEST, "layout"):
        layout = ParallelLayout(**manifest["layout"])
    fp8 = frozenset(manifest["fp8_modules"])
    return open_rank_shards(path, ModelArchitecture.from_hf_directory(path / CARRIED), layout, fp8, path / CARRIED)


def _open_torch_dist(path: Path, hf_config: str | Path | None) -> Checkpoint:
    own = path / CARRIED
    config_dir = own if hf_config is None else Path(hf_config)
    if hf_config is None and not (own / "config.json").is_file():
        raise ValueError(
            f"{path} is a torch_dist checkpoint without {CARRIED}/config.json: name its model's Hugging Face directory with "
            "--hf-config DIR (hf_config=DIR), or copy its config, tokenizer and generation files there"
        )
    arch = ModelArchitecture.from_hf_directory(config_dir)
    reader = TorchDistReader(path)
    embedding = reader.entries.get(FIRST_STAGE[0].megatron)
    rows = max(arch.vocab_size, embedding.shape[0] if embedding is not None else 0)
    tensors = torch_dist_tensors(arch, rows)
    checkpoint = Checkpoint(path=path, kind="torch_dist", arch=arch, layout=None, fp8=frozenset(), tensors=tensors, config_dir=config_dir)
    _bind(checkpoint, TORCH_DIST, tensors, dict.fromkeys(reader.entries, reader))
    return checkpoint


def open_rank_shards(
    path: Path, arch: ModelArchitecture, layout: ParallelLayout, fp8: frozenset[str], config_dir: Path, tag: str | None = None
) -> Checkpoint:
    """Open one shard file for each model chunk of each rank, without a manifest.

    config_dir: where config.json and the carried files stand. tag: what every shard's metadata must carry as `tag`, so that shards of
    two exports never mix. Raises ValueError naming the shard that is missing, stale or of another layout.
    """
    check_layout_of(arch, layout, fp8)
    tensors = megatron_tensors(arch, layout, fp8)
    checkpoint = Checkpoint(path=path, kind="megatron", arch=arch, layout=layout, fp8=fp8, tensors=tensors, config_dir=config_dir)
    for location in rank_keys(layout):
        file = SafetensorsFile(path / f"{location}.safetensors")
        if tag is not None and file.metadata.get("tag") != tag:
            raise ValueError(
                f"{file.path} is of export {file.metadata.get('tag')!r}, not {tag!r}; the rank did not write its shard this time"
            )
        _bind(checkpoint, location, [t for t in tensors if t.location == location], dict.fromkeys(file.entries, file))
    return checkpoint


def _bind(checkpoint: Checkpoint, location: str, tensors: Iterable[StoredTensor], found: Mapping[str, TensorReader]) -> None:
    """Check names, dtypes and shapes of one location and remember the files."""
    expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
    for stored in tensors:
        expected[stored.name] = (("F8_E4M3",) if stored.fp8 else ("BF16",), stored.shape)
        if stored.fp8:
            expected[stored.scale_name] = (SCALE_DTYPES, stored.scale_shape)
    check_names(f"{checkpoint.path} ({location})", expected, found)
    for name, (dtypes, shape) in expected.items():
        entry = found[name].entries[name]
        if entry.dtype not in dtypes:
            raise ValueError(f"{found[name].path}: {name} is {entry.dtype}; expected {' or '.join(dtypes)}{_way_out(name, entry.dtype)}")
        if entry.shape != shape:
            raise ValueError(f"{found[name].path}: {name} has shape {entry.shape}; config.json says {shape}")
        checkpoint.files[location, name] = found[name]


def _way_out(name: str, dtype: str) -> str:
    if dtype.startswith("F8") and not name.endswith(SCALE_SUFFIX):
        return "; FP8 codes need their weight_scale_inv and a quantization_config"
    return "; save the model in bfloat16 first (model.to(torch.bfloat16).save_pretrained)" if dtype in ("F32", "F16", "F64") else ""
