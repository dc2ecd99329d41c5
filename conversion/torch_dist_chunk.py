"""One tensor inside a `*.distcp` file, found without loading it: where its bytes lie, its dtype and shape, and its checksum.

Enters: an open file and the span of one item. An item is what `torch.save` writes: a zip archive with stored (not compressed) members,
`data.pkl` that describes the tensor and `data/0` with its bytes. Leaves: a `Chunk`, of which rows and columns are read directly.
"""

import io
import math
import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from conversion.files import ITEM_BYTES, fill
from conversion.inert_pickle import Inert, read_pickle
from conversion.reading import reading, whole_numbers

TORCH_DTYPES = {
    "BFloat16": "BF16",
    "Float": "F32",
    "Half": "F16",
    "Double": "F64",
    "Float8_e4m3fn": "F8_E4M3",
    "Float8_e5m2": "F8_E5M2",
    "Float8_e8m0fnu": "F8_E8M0",
    "Long": "I64",
    "Int": "I32",
    "Byte": "U8",
    "Bool": "BOOL",
}
"""Storage class of a pickle -> dtype as safetensors names it."""
METADATA_DTYPES = {
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.float64": "F64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
"""The same by the name of the dtype."""
_CHECK_BYTES = 2**24


class ChecksumError(ValueError):
    """The bytes of a tensor are not those that were written."""


class _Span(io.RawIOBase):
    """A part of a file as a seekable file of its own."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self._length, self._at = fd, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = os.pread(self._fd, left if size < 0 else min(size, left), self._start + self._at)
        self._at += len(data)
        return data


class Chunk:
    """The bytes of one stored tensor, row-major."""

    def __init__(self, fd: int, path: Path, start: int, length: int, what: str) -> None:
        """Find the tensor in `length` bytes from `start`; what: its name for messages.

        Raises ValueError where the archive is damaged, compressed, or holds another layout of memory than row-major.
        """
        self._fd, self.path, self._what = fd, path, what
        try:
            with reading(path, what), zipfile.ZipFile(_Span(fd, start, length)) as archive:
                members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                if "data.pkl" not in members or "data/0" not in members:
                    raise zipfile.BadZipFile(f"members {', '.join(sorted(members))[:200]}; expected data.pkl and data/0")
                description, data = members["data.pkl"], members["data/0"]
                self.dtype, self.shape = self._describe(archive.read(description))
                header = os.pread(fd, 30, start + data.header_offset)
                self._offset = start + data.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{path}: {what} is not a tensor that torch.save wrote ({error!r}); the file is damaged") from error
        if data.compress_type != zipfile.ZIP_STORED or data.file_size != self.num_bytes:
            raise ValueError(f"{path}: {what} has {data.file_size} bytes for shape {self.shape}, expected {self.num_bytes}; damaged file")
        self._crc = data.CRC
        self._checked = data.CRC == 0  # torch was told not to compute checksums
        if self._offset + self.num_bytes > start + length:
            raise ValueError(f"{path}: {what} reaches beyond its item; the file is truncated or damaged")

    def _describe(self, pickled: bytes) -> tuple[str, tuple[int, ...]]:
        tensor = read_pickle(pickled, f"{self.path}: {self._what}")
        if isinstance(tensor, Inert) and tensor.path == "torch._utils._rebuild_parameter":
            tensor = tensor.args[0]
        if not isinstance(tensor, Inert) or tensor.path != "torch._utils._rebuild_tensor_v2":
            raise ValueError(f"{self.path}: {self._what} is not a plain tensor; save the model's parameters as dense tensors")
        storage, first = tensor.args[0][1], tensor.args[1]
        shape, stride = whole_numbers(tensor.args[2]), whole_numbers(tensor.args[3])
        if len(shape) != len(stride):
            raise TypeError(f"shape {shape} has another length than stride {stride}")
        storage_name = storage.path.removeprefix("torch.").removesuffix("Storage")
        wanted = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        cut = any(have != want for have, want, size in zip(stride, wanted, shape, strict=True) if size > 1)
        if storage_name not in TORCH_DTYPES or first != 0 or cut:
            raise ValueError(
                f"{self.path}: {self._what} is a {storage_name} tensor of stride {stride} from element {first}; expected row-major "
                "memory of a known dtype"
            )
        return TORCH_DTYPES[storage_name], shape

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def fill(self, flat: np.ndarray, at: int) -> None:
        """Read bytes from position `at` of the tensor into a contiguous uint8 array; the first call checks the checksum of all of it."""
        if not self._checked:
            self._check()
        fill(self._fd, self.path, flat, self._offset + at)

    def _check(self) -> None:
        crc, buffer = 0, np.empty(min(_CHECK_BYTES, self.num_bytes), np.uint8)
        for at in range(0, self.num_bytes, _CHECK_BYTES):
            part = buffer[: min(_CHECK_BYTES, self.num_bytes - at)]
            fill(self._fd, self.path, part, self._offset + at)
            crc = zlib.crc32(part, crc)
        if crc != self._crc:
            raise ChecksumError(f"{self.path}: {self._what} is not what was written (crc32 differs); the file is damaged, copy it again")
        self._checked = True
