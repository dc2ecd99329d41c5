"""A `torch_dist` directory written so that megatron.core.dist_checkpointing.load fills the actor's GPTModel from it, at any TP x PP.

Enters: the model's BF16 tensors under their names at TP 1 and PP 1, one at a time. Leaves: `__0_N.distcp`, each a row of items that
`torch.save` writes; then `.metadata`, which says what lies where, `metadata.json` and an empty `common.pt`. Layers are stacked along a
leading axis, one layer a chunk, as `GPTModel.sharded_state_dict()` asks for by default. Megatron-core 0.16 also asks for an object
`_extra_state` of each parallel linear, which holds nothing.
"""

import io
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from conversion.files import OutputFile, TensorSpec, write_at
from conversion.torch_dist_reader import METADATA

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXTRA_STATE = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


def stacked_key(name: str) -> tuple[str, int | None]:
    """Return the key of a tensor in the directory, and its place along the leading axis; None where it has none."""
    found = _LAYER.fullmatch(name)
    return (f"decoder.layers.{found[2]}", int(found[1])) if found else (name, None)


class _Sink:
    """A file-like end of a file descriptor for torch.save."""

    def __init__(self, fd: int, path: Path, at: int) -> None:
        self._fd, self._path, self.at = fd, path, at
        self.error: OSError | None = None
        """What went wrong in a write; torch.save may raise something else of its own on top."""

    def write(self, data: memoryview) -> int:
        try:
            write_at(self._fd, self._path, memoryview(data).cast("B"), self.at)
        except OSError as error:
            self.error = error
            raise
        self.at += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


class TorchDistWriter(OutputFile):
    """One `.distcp` file; tensors are appended in any order, from any thread."""

    takes_parts = False

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        """Create `path`. Raises OSError where it cannot be created."""
        self._shapes = {spec.name: spec.shape for spec in specs}
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._end = 0
        self._lock = Lock()

    def write(self, name: str, data: np.ndarray) -> dict[str, Any]:
        """Append one BF16 tensor; data: its bytes, contiguous. Returns where it lies. Raises OSError where the disk is full."""
        shape = self._shapes[name]
        if stacked_key(name)[1] is not None:
            shape = (1, *shape)
        tensor = torch.from_numpy(data.reshape(-1)).view(torch.bfloat16).view(shape)
        with self._lock:
            sink = _Sink(self._fd, self._path, self._end)
            try:
                torch.save(tensor, sink)  # type: ignore[arg-type]
            except RuntimeError:
                if sink.error is not None:
                    raise sink.error from None
                raise
            place = {"offset": self._end, "length": sink.at - self._end}
            self._end = sink.at
        return place

    def write_part(self, name: str, at: int, data: np.ndarray) -> None:
        """Refuse: `torch.save` writes a whole tensor."""
        raise AssertionError(f"{self._path}: {name} would be written in parts; takes_parts was not asked")


def write_directory_files(
    written: Mapping[str, Mapping[str, Mapping[str, Any]]], num_layers: int, extra_file: str, write: Callable[[str, bytes], None]
) -> None:
    """Write what makes a directory of `.distcp` files a checkpoint.

    written: file -> tensor name -> shape, offset and length. num_layers: L. extra_file: name of the file for the empty objects.
    write: writes a small file by name.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file, entries in sorted(written.items()):
        for name, entry in sorted(entries.items()):
            key, layer = stacked_key(name)
            shape = tuple(entry["shape"])
            size, at = (shape, (0,) * len(shape)) if layer is None else ((num_layers, *shape), (layer, *(0,) * len(shape)))
            sizes = torch.Size(shape if layer is None else (1, *shape))
            properties = TensorProperties(dtype=torch.bfloat16)
            described = tensors.setdefault(key, TensorStorageMetadata(properties, torch.Size(size), []))
            described.chunks.append(ChunkStorageMetadata(torch.Size(at), sizes))
            storage[MetadataIndex(key, torch.Size(at))] = _StorageInfo(file, entry["offset"], entry["length"])
    buffer = io.BytesIO()
    torch.save([None], buffer)
    empty = buffer.getvalue()
    objects = [f"decoder.layers.{m}._extra_state/shard_{i}_{num_layers}" for m in _EXTRA_STATE for i in range(num_layers)]
    for number, key in enumerate(objects):
        storage[MetadataIndex(key)] = _StorageInfo(extra_file, number * len(empty), len(empty))
    write(extra_file, empty * len(objects))
    metadata = Metadata({**tensors, **{key: BytesStorageMetadata() for key in objects}}, None, storage)
    write(METADATA, pickle.dumps(metadata))
    common = io.BytesIO()
    torch.save({}, common)
    write("common.pt", common.getvalue())
    write("metadata.json", json.dumps(_BACKEND).encode())
