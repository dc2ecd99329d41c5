"""safetensors files as bytes: rectangles read without loading a file, tensors written at their final offset in any order.

Enters: paths, names, row and column ranges. Leaves: raw bytes as NumPy arrays; no dtype is interpreted, so nothing can be rounded.
Format: 8 bytes little-endian header length, a JSON header of dtype, shape and offsets, then the data without holes. Checked on opening:
the header is whole, no name stands twice, offsets are contiguous and agree with dtype and shape, and the file ends where the data does.
Left out: which files make up a checkpoint (`checkpoint`), and what a dtype means (`scales`).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from conversion.reading import of_type, reading, whole_numbers

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
_MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 16 * 2**20
_SCATTER_BYTES = 2048
"""From this width on a cut through columns is read row by row; narrower ones read whole rows and cut in memory."""


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


@dataclass(frozen=True)
class TensorInfo:
    """What one stored tensor is: its dtype as safetensors names it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return _num_bytes(self.dtype, self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (all axes but the first)."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorEntry(TensorInfo):
    """One tensor of a safetensors file, with the absolute offset of its first byte."""

    offset: int


class TensorReader(Protocol):
    """Where tensors of a checkpoint are read from; safe to use from several threads at once."""

    path: Path

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files whose bytes decide what is read."""

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """Tensor name -> what it is."""

    def read(self, name: str, rows: tuple[int, int], cols: tuple[int, int], out: np.ndarray) -> None:
        """Read a rectangle of elements; out: [rows, columns * item bytes] uint8."""

    def close(self) -> None:
        """Close the files; reading afterwards is an error."""


def read_all(reader: TensorReader, name: str) -> np.ndarray:
    """Return a whole tensor as [rows, row bytes] uint8 (a vector: [elements, item bytes])."""
    entry = reader.entries[name]
    out = np.empty((entry.shape[0], entry.row_bytes), np.uint8)
    reader.read(name, (0, entry.shape[0]), (0, entry.row_bytes // ITEM_BYTES[entry.dtype]), out)
    return out


class SafetensorsFile:
    """A file opened for reading; safe to read from several threads at once."""

    def __init__(self, path: str | Path) -> None:
        """Open and check the header of `path`. Raises ValueError where the file is truncated or inconsistent."""
        self._fd = -1
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{self.path} does not exist; the checkpoint is incomplete, copy the file again")
        self._fd = os.open(self.path, os.O_RDONLY)
        self.entries, self.metadata = self._read_header()
        self.paths = (self.path,)

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        """Close the file of a reader that was dropped, as after a failed check."""
        self.close()

    def _read_header(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little") if size >= 8 else -1
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(
                f"{self.path}: {size} bytes are not a safetensors file (header length {length}); the file is truncated or damaged"
            )
        with reading(self.path, "the header"):
            header = json.loads(os.pread(self._fd, length, 8), object_pairs_hook=self._unique)
            metadata = dict(of_type(header.pop("__metadata__", {}), dict))
            described = sorted(
                (whole_numbers(info["data_offsets"]), name, of_type(info["dtype"], str), whole_numbers(info["shape"]))
                for name, info in header.items()
            )
        entries: dict[str, TensorEntry] = {}
        end = 0
        for offsets, name, dtype, shape in described:
            if dtype not in ITEM_BYTES:
                raise ValueError(f"{self.path}: {name} has dtype {dtype}; known are {', '.join(ITEM_BYTES)}")
            entry = TensorEntry(dtype, shape, 8 + length + end)
            if offsets != (end, end + entry.num_bytes):
                raise ValueError(f"{self.path}: {name} lies at {list(offsets)}, expected [{end}, {end + entry.num_bytes}]; damaged header")
            entries[name] = entry
            end += entry.num_bytes
        if size != 8 + length + end:
            raise ValueError(f"{self.path}: {size} bytes, but its header describes {8 + length + end}; the file is truncated or damaged")
        return entries, metadata

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) != len(names) else []
        if twice:
            raise ValueError(f"{self.path}: {', '.join(twice)} stands twice in the header; the file is damaged")
        return dict(pairs)

    def read(self, name: str, rows: tuple[int, int], cols: tuple[int, int], out: np.ndarray) -> None:
        """Read a rectangle of a tensor into `out`.

        rows, cols: half-open; a vector has one column. out: [rows, columns * item bytes] uint8, rows contiguous, any row stride.
        Raises ValueError where the file ends early (it was changed after opening).
        """
        entry = self.entries[name]
        item = ITEM_BYTES[entry.dtype]
        start, width = cols[0] * item, (cols[1] - cols[0]) * item
        row_bytes = entry.row_bytes
        assert out.shape == (rows[1] - rows[0], width), (name, out.shape, rows, cols)
        if out.size == 0:
            return
        if width == row_bytes and out.flags.c_contiguous:
            self._fill(out.reshape(-1), entry.offset + rows[0] * row_bytes)
            return
        if _SCATTER_BYTES <= width < row_bytes:
            for row in range(rows[0], rows[1]):
                self._fill(out[row - rows[0]], entry.offset + row * row_bytes + start)
            return
        step = max(1, _CHUNK_BYTES // row_bytes)
        scratch = np.empty((min(step, rows[1] - rows[0]), row_bytes), np.uint8)
        for first in range(rows[0], rows[1], step):
            count = min(step, rows[1] - first)
            self._fill(scratch[:count].reshape(-1), entry.offset + first * row_bytes)
            out[first - rows[0] : first - rows[0] + count] = scratch[:count, start : start + width]

    def _fill(self, flat: np.ndarray, offset: int) -> None:
        fill(self._fd, self.path, flat, offset)


def fill(fd: int, path: Path, flat: np.ndarray, offset: int) -> None:
    """Read bytes of an open file into a contiguous uint8 array; raises ValueError naming `path` where it ends early."""
    view = memoryview(flat)
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise ValueError(f"{path}: ends at byte {offset + done}; the file was truncated while it was read")
        done += got


@dataclass(frozen=True)
class TensorSpec:
    """Name, safetensors dtype and shape of a tensor that is going to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return _num_bytes(self.dtype, self.shape)


class TensorWriter(Protocol):
    """A file of tensors that is being written, in any order, from any thread."""

    @property
    def takes_parts(self) -> bool:
        """Whether `write_part` may be called: the file has a place for each tensor before its bytes are there."""

    def write(self, name: str, data: np.ndarray) -> dict[str, Any]:
        """Write one tensor; data: its bytes as a contiguous uint8 array. Returns what the manifest must know of its place."""

    def write_part(self, name: str, at: int, data: np.ndarray) -> None:
        """Write bytes of one tensor from position `at` on, where `takes_parts`; the caller writes each byte once."""

    def flush(self) -> None:
        """Push what is written so far to the disk."""

    def close(self, sync: bool = True) -> None:
        """Close the file; `sync` waits until its bytes are on the disk."""


class OutputFile:
    """A file being written: `_fd` is open until `close`."""

    _fd = -1

    def flush(self) -> None:
        """Push what is written so far to the disk, so that little is left to wait for at the end."""
        if self._fd >= 0:
            os.fdatasync(self._fd)

    def close(self, sync: bool = True) -> None:
        """Close the file; `sync` waits until its bytes are on the disk."""
        if self._fd < 0:
            return
        try:
            if sync:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1


class ShardWriter(OutputFile):
    """One safetensors file, its header written first; tensors follow in any order, from any thread."""

    takes_parts = True

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: dict[str, str]) -> None:
        """Create `path` at its final size. Wider dtypes lie first, so that each tensor is aligned to its own item size.

        Raises OSError where the file cannot be created or the disk is full.
        """
        ordered = sorted(specs, key=lambda s: -ITEM_BYTES[s.dtype])
        header: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        sizes: dict[str, tuple[int, int]] = {}
        for spec in ordered:
            assert spec.name not in sizes, f"{spec.name} twice in {path}"
            size = spec.num_bytes
            header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [end, end + size]}
            sizes[spec.name] = (end, size)
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        base = 8 + len(text)
        self.path = path
        self.data_bytes = end
        self._places = {name: (base + start, size) for name, (start, size) in sizes.items()}
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        write_at(self._fd, path, memoryview(len(text).to_bytes(8, "little") + text), 0)
        try:
            os.ftruncate(self._fd, base + end)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    def write(self, name: str, data: np.ndarray) -> dict[str, Any]:
        """Write one tensor; data: its bytes as a contiguous uint8 array of any shape. Raises OSError where the disk is full."""
        assert data.nbytes == self._places[name][1], (name, data.nbytes, self._places[name])
        self.write_part(name, 0, data)
        return {}

    def write_part(self, name: str, at: int, data: np.ndarray) -> None:
        """Write bytes of one tensor from position `at` on; the caller writes each byte once."""
        offset, size = self._places[name]
        assert at + data.nbytes <= size and data.dtype == np.uint8, (name, at, data.nbytes, size, data.dtype)
        write_at(self._fd, self.path, memoryview(data.reshape(-1)), offset + at)


def write_at(fd: int, path: Path, view: memoryview, offset: int) -> None:
    """Write all bytes at an offset of an open file; raises OSError naming `path` where the disk is full."""
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
