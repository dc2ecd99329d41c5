"""A `torch_dist` directory of megatron.core.dist_checkpointing, read by rectangles: no collective, no whole tensor in memory.

Enters: a directory with `.metadata`, `*.distcp` and `metadata.json`, as `dist_checkpointing.save` of a GPTModel leaves them. Leaves: the
model's tensors under the names they have at TP 1 and PP 1, `decoder.layers.{global layer}...`. Such a directory has no layout: every tensor
is global and cut into chunks that only say who wrote them. Read are all forms of layers: stacked along a leading axis
(`decoder.layers.mlp.linear_fc1.weight` [L, N, K], the default), one by one, and gate and up as two tensors `..._w`, `..._v`.

Checked on opening: chunks cover each tensor exactly once, and every chunk lies in its file with the dtype and shape that `.metadata` says.
A chunk's checksum is checked when it is first read. Left out: optimizer state and objects, which are passed over.
"""

import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conversion.files import ITEM_BYTES, TensorInfo
from conversion.inert_pickle import Inert, read_pickle
from conversion.reading import of_type, reading, whole_numbers
from conversion.shards import overlapping
from conversion.torch_dist_chunk import METADATA_DTYPES, Chunk

METADATA = ".metadata"
_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)")
_HALVES = (("_w", 0), ("_v", 1))
_NOT_MODEL = ("optimizer.", "rng_state", "rerun_state_machine_state")


@dataclass(frozen=True)
class _Tile:
    """A chunk and the rectangle that it fills in a stored tensor."""

    chunk: Chunk
    rows: tuple[int, int]
    cols: tuple[int, int]


@dataclass(frozen=True)
class _Place:
    """Where the metadata says that a chunk lies."""

    file: str
    offset: int
    length: int
    transforms: Any


_Places = dict[tuple[str, tuple[int, ...]], _Place]


@dataclass(frozen=True)
class _Described:
    """What the metadata says of one tensor; chunks: (first element, extent) of each."""

    key: str
    size: tuple[int, ...]
    dtype: str
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]]


class TorchDistReader:
    """The tensors of one directory; safe to read from several threads at once."""

    def __init__(self, path: str | Path) -> None:
        """Open and check all chunks. Raises ValueError that names what is missing, truncated or contradictory."""
        self.path = Path(path)
        self._fds: dict[str, int] = {}
        self.entries: dict[str, TensorInfo] = {}
        self._tiles: dict[str, list[_Tile]] = defaultdict(list)
        self.ends: dict[str, int] = {}
        """File -> behind its last byte that the metadata names, tensors that are passed over and objects included."""
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, ...]:
        """The metadata and every data file."""
        return (self.path / METADATA, *(self.path / name for name in sorted(self._fds)))

    def _open(self) -> None:
        file = self.path / METADATA
        if not file.is_file():
            raise ValueError(f"{file} does not exist; without it the *.distcp files cannot be read, copy the directory again")
        pickled = read_pickle(file.read_bytes(), str(file))
        with reading(file, "the metadata"):
            state = _state_of(pickled, "Metadata", file)
            places = _places(state, self.ends, file)
            described = _described(state, file)
        halves: dict[str, int] = {}
        for tensor in described:
            self._add(tensor, places, halves)
        odd = sorted(name for name, count in halves.items() if count != 2)
        if odd:
            raise ValueError(f"{file}: {odd[0]} has one of its halves _w and _v; the checkpoint is incomplete")

    def _add(self, tensor: "_Described", places: "_Places", halves: dict[str, int]) -> None:
        """Take one tensor of the metadata in: find its chunks, check them, and name the tensors they make up."""
        key, size, promised = tensor.key, tensor.size, tensor.dtype
        stacked = _STACKED.match(key) is not None and len(size) > 1
        layers = size[0] if stacked else 1
        shape = size[1:] if stacked else size
        name, half = next(((key[: -len(end)], at) for end, at in _HALVES if key.endswith(f".weight{end}")), (key, None))
        if half is not None:
            halves[name] = halves.get(name, 0) + 1
        if len(shape) not in (1, 2):
            raise ValueError(f"{self.path}: {key} has shape {size}; a parameter of the model is a vector or a matrix, save without it")
        covered = 0
        tiles: dict[str, list[_Tile]] = defaultdict(list)
        for first, extent in tensor.chunks:
            chunk = self._chunk(key, first, extent, places)
            if chunk.dtype != promised:
                raise ValueError(
                    f"{chunk.path}: {key} at {first} is {chunk.dtype}, {METADATA} says {promised}; they are of different checkpoints"
                )
            covered += math.prod(extent)
            if stacked and extent[0] != 1:
                raise ValueError(f"{self.path}: {key} holds {extent[0]} layers in one chunk; Megatron-core writes one layer a chunk")
            here = name if not stacked else name.replace("decoder.layers.", f"decoder.layers.{first[0]}.", 1)
            where, span = (first[1:], extent[1:]) if stacked else (first, extent)
            down = half * shape[0] if half else 0
            rows = (where[0] + down, where[0] + down + span[0])
            tiles[here].append(_Tile(chunk, rows, (where[1], where[1] + span[1]) if len(shape) > 1 else (0, 1)))
        if covered != math.prod(size) or len(tiles) != layers or any(map(_overlap, tiles.values())):
            raise ValueError(f"{self.path}: the chunks of {key} do not cover its {size} elements exactly once; {METADATA} is damaged")
        for here, mine in tiles.items():
            entry = TensorInfo(promised, _whole_shape(shape, half))
            if here in self.entries and (half is None or halves[name] == 1):
                raise ValueError(f"{self.path}: {here} is stored twice, under two keys of {METADATA}; one of them is stale")
            if self.entries.setdefault(here, entry) != entry:
                raise ValueError(f"{self.path}: the halves _w and _v of {here} differ: {self.entries[here]} and {entry}; save them again")
            self._tiles[here] += mine

    def _chunk(self, key: str, first: tuple[int, ...], extent: tuple[int, ...], places: "_Places") -> Chunk:
        what = f"{key} at {first}"
        place = places.get((key, first))
        if place is None:
            raise ValueError(f"{self.path}: {what} is in no file according to {METADATA}; the checkpoint is incomplete")
        if place.transforms:
            raise ValueError(f"{self.path}: {what} is stored as {place.transforms}; save without such extensions")
        name = place.file
        if Path(name).name != name:
            raise ValueError(f"{self.path}: {what} is said to lie in {name!r}, outside the directory; {METADATA} is damaged")
        file = self.path / name
        if name not in self._fds:
            if not file.is_file():
                raise ValueError(f"{file} does not exist; the checkpoint is incomplete, copy the file again")
            self._fds[name] = os.open(file, os.O_RDONLY)
        fd = self._fds[name]
        if place.offset + place.length > os.fstat(fd).st_size:
            raise ValueError(f"{file}: {what} ends at byte {place.offset + place.length}, behind the file's end; it is truncated")
        chunk = Chunk(fd, file, place.offset, place.length, what)
        if tuple(n for n in chunk.shape if n != 1) != tuple(n for n in extent if n != 1):
            raise ValueError(f"{file}: {what} has shape {chunk.shape}, {METADATA} says {extent}; they are of different checkpoints")
        return chunk

    def read(self, name: str, rows: tuple[int, int], cols: tuple[int, int], out: np.ndarray) -> None:
        """Read a rectangle of elements, over all chunks that it touches; out: [rows, columns * item bytes] uint8."""
        item = ITEM_BYTES[self.entries[name].dtype]
        assert out.shape == (rows[1] - rows[0], (cols[1] - cols[0]) * item), (name, out.shape, rows, cols)
        for tile in self._tiles[name]:
            top, bottom = max(rows[0], tile.rows[0]), min(rows[1], tile.rows[1])
            left, right = max(cols[0], tile.cols[0]), min(cols[1], tile.cols[1])
            if top >= bottom or left >= right:
                continue
            width = (tile.cols[1] - tile.cols[0]) * item
            part = out[top - rows[0] : bottom - rows[0], (left - cols[0]) * item : (right - cols[0]) * item]
            start, step = (left - tile.cols[0]) * item, max(1, 2**24 // width)
            if part.flags.c_contiguous and part.shape[1] == width:
                tile.chunk.fill(part.reshape(-1), (top - tile.rows[0]) * width)
                continue
            scratch = np.empty((min(step, bottom - top), width), np.uint8)
            for first in range(top, bottom, step):
                count = min(step, bottom - first)
                tile.chunk.fill(scratch[:count].reshape(-1), (first - tile.rows[0]) * width)
                part[first - top : first - top + count] = scratch[:count, start : start + part.shape[1]]

    def close(self) -> None:
        """Close all files; reading afterwards is an error."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def __del__(self) -> None:
        """Close the files of a reader that was dropped."""
        self.close()


def _whole_shape(shape: tuple[int, ...], half: int | None) -> tuple[int, ...]:
    return shape if half is None else (2 * shape[0], *shape[1:])


def _name_of(value: Any) -> str:
    return value.path.rpartition(".")[2] if isinstance(value, Inert) else type(value).__name__


def _state_of(value: Any, kind: str, file: Path) -> dict[str, Any]:
    """Return the fields of a recorded dataclass; raises ValueError where it is of another kind."""
    if _name_of(value) != kind or not isinstance(value.state, dict):
        raise ValueError(f"{file}: found {_name_of(value)} where PyTorch's distributed checkpoint has {kind}; this is not its metadata")
    return value.state


def _dtype_of(properties: Any, key: str, file: Path) -> str:
    """Return the dtype that the metadata gives a tensor, as safetensors names it; raises ValueError for one that is not known."""
    state = properties.state if _name_of(properties) == "TensorProperties" else None
    recorded = state[0] if isinstance(state, tuple) and state else None
    name = recorded.path if isinstance(recorded, type) and issubclass(recorded, Inert) else repr(recorded)
    if name not in METADATA_DTYPES:
        raise ValueError(f"{file}: {key} has dtype {name}; expected one of {', '.join(METADATA_DTYPES)}")
    return METADATA_DTYPES[name]


def _ints(size: Any) -> tuple[int, ...]:
    """Read a recorded torch.Size."""
    if not isinstance(size, Inert):
        raise TypeError(f"{size!r} is not a torch.Size")
    return whole_numbers(size.args[0] if size.args else ())


def _places(state: dict[str, Any], ends: dict[str, int], file: Path) -> _Places:
    """Read where every chunk lies, and into `ends` how far each file reaches."""
    places: _Places = {}
    for index, info in state["storage_data"].items():
        key, said = _state_of(index, "MetadataIndex", file), _state_of(info, "_StorageInfo", file)
        name = of_type(said["relative_path"], str)
        offset, length = whole_numbers((said["offset"], said["length"]))
        ends[name] = max(ends.get(name, 0), offset + length)
        if key.get("offset") is not None:
            places[of_type(key["fqn"], str), _ints(key["offset"])] = _Place(name, offset, length, said.get("transform_descriptors"))
    return places


def _described(state: dict[str, Any], file: Path) -> list[_Described]:
    """Read the shapes, dtypes and chunks of the model's tensors."""
    tensors: list[_Described] = []
    for key, described in state["state_dict_metadata"].items():
        if _name_of(described) != "TensorStorageMetadata" or key.startswith(_NOT_MODEL):
            continue
        said = _state_of(described, "TensorStorageMetadata", file)
        size, dtype = _ints(said["size"]), _dtype_of(said["properties"], key, file)
        chunks = []
        for part in said["chunks"]:
            inside = _state_of(part, "ChunkStorageMetadata", file)
            first, extent = _ints(inside["offsets"]), _ints(inside["sizes"])
            if not len(first) == len(extent) == len(size) or any(f + e > s for f, e, s in zip(first, extent, size, strict=True)):
                raise ValueError(f"{file}: a chunk of {key} at {first} with {extent} elements lies outside {size}; it is damaged")
            chunks.append((first, extent))
        tensors.append(_Described(key, size, dtype, chunks))
    return tensors


def _overlap(tiles: list[_Tile]) -> bool:
    """Tell whether two chunks of one tensor hold a common element."""
    return any(True for _ in overlapping(tiles, lambda tile: (tile.rows, tile.cols)))
