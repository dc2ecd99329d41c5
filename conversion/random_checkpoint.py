"""A Hugging Face directory of random bytes, to measure and to test conversions with.

Enters: a config.json, and which linears are block FP8. Leaves: the directory, with an index where it has several files. Elements and codes
are random bytes, so BF16 values may be NaN: what moves bytes must not care. Scales are positive random numbers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conversion.architecture import ModelArchitecture
from conversion.assemble import tensor_specs
from conversion.checkpoint import INDEX
from conversion.files import ShardWriter, TensorSpec
from conversion.quantization_config import quantization_config
from conversion.shards import StoredTensor, hf_tensors
from conversion.targets import MAX_SHARD_BYTES, hf_index, hf_shard_files

_PART_BYTES = 2**24


def write_random(
    path: Path, config: Mapping[str, Any], modules: frozenset[str], rng: np.random.Generator, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[StoredTensor]:
    """Write a directory and return what it stores.

    config: of the model, without quantization_config. modules: Hugging Face names of the block-FP8 linears. max_shard_bytes: a file has
    no more, but for a single larger tensor. At most 16 MB are in memory at once.
    """
    arch = ModelArchitecture.from_hf_config(config)
    tensors = hf_tensors(arch, modules)
    file_of = hf_shard_files(tensors, max_shard_bytes)
    path.mkdir(parents=True)
    quantization = {"quantization_config": quantization_config(arch, modules)} if modules else {}
    (path / "config.json").write_text(json.dumps({**config, **quantization}))
    files: dict[str, list[TensorSpec]] = {}
    for stored in tensors:
        files.setdefault(file_of[stored.location, stored.name], []).extend(tensor_specs(stored))
    for name, specs in files.items():
        writer = ShardWriter(path / name, specs, {"format": "pt"})
        for spec in specs:
            if spec.dtype == "F32":
                writer.write(spec.name, (rng.random(spec.shape, np.float32) + 1e-3).view(np.uint8))
                continue
            for at in range(0, spec.num_bytes, _PART_BYTES):
                writer.write_part(spec.name, at, np.frombuffer(rng.bytes(min(_PART_BYTES, spec.num_bytes - at)), np.uint8))
        writer.close()
    if len(files) > 1:
        (path / INDEX).write_text(hf_index(files))
    return tensors
