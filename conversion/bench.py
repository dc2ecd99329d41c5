"""Speed and memory of a conversion against `cp` of the same files on the same disk, in one run.

Enters: an empty directory and a size. Leaves: bytes a second of cp, HF -> Megatron TP4 and Megatron -> HF, and the peak memory of the
converting processes beside the bound 2 * largest tensor + 500 MB. Each step is a process of its own, so that peaks do not mix.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from conversion.architecture import ModelArchitecture
from conversion.assemble import tensor_specs
from conversion.files import ShardWriter
from conversion.names import hf_shapes
from conversion.shards import hf_tensors
from conversion.targets import hf_shard_files

_SHARD_BYTES = 10**9


def bench(directory: Path, gb: float) -> dict[str, Any]:
    """Measure in `directory`, which must be empty or missing; everything written there is removed. gb: size of the checkpoint in 1e9 bytes.

    Raises ValueError where the directory is not empty or gb is below the smallest model.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; bench writes about {4 * gb:.0f} GB there and removes it, give an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return _measure(directory, gb)
    finally:
        shutil.rmtree(directory)


def _measure(directory: Path, gb: float) -> dict[str, Any]:
    source, largest = write_random_checkpoint(directory / "hf", gb)
    files = sorted(p for p in source.iterdir())
    size = sum(p.stat().st_size for p in files)
    _timed(["cp", "-r", str(source), str(directory / "warm")])  # the source's pages are in memory for every timed step
    shutil.rmtree(directory / "warm")
    python = [sys.executable, "-m", "conversion"]
    steps = {
        "cp": ["cp", "-r", str(source), str(directory / "copy")],
        "to_megatron_tp4": [*python, "to-megatron", str(source), str(directory / "tp4"), "--tp", "4", "--json"],
        "to_hf": [*python, "to-hf", str(directory / "tp4"), str(directory / "back"), "--json"],
    }
    result: dict[str, Any] = {"checkpoint_bytes": size, "largest_tensor_bytes": largest}
    for name, command in steps.items():
        os.sync()  # no step pays for what the one before left unwritten
        seconds, peak = _timed(command)
        result[f"{name}_s"] = round(seconds, 2)
        result[f"{name}_bytes_per_s"] = int(size / seconds)
        if name != "cp":
            result[f"{name}_speed_over_cp"] = round(result[f"{name}_bytes_per_s"] / result["cp_bytes_per_s"], 2)
            result[f"{name}_peak_bytes"] = peak
    result["peak_bound_bytes"] = 2 * largest + 500_000_000
    return result


def _timed(command: list[str]) -> tuple[float, int]:
    """Run a command; return its seconds and peak resident bytes. Raises RuntimeError with its output where it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {process.returncode}: {output}")
    return seconds, _peak_bytes(usage)


def _peak_bytes(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * 1024


def write_random_checkpoint(path: Path, gb: float, seed: int = 0) -> tuple[Path, int]:
    """Write a Llama-shaped BF16 Hugging Face directory of about `gb` * 1e9 random bytes; return it and its largest tensor in bytes."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "num_hidden_layers": 1,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    one = sum(t.num_bytes for t in hf_tensors(ModelArchitecture.from_hf_config(config)))
    two = sum(t.num_bytes for t in hf_tensors(ModelArchitecture.from_hf_config({**config, "num_hidden_layers": 2})))
    config["num_hidden_layers"] = max(1, 1 + round((gb * 1e9 - one) / (two - one)))
    arch = ModelArchitecture.from_hf_config(config)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = hf_tensors(arch)
    file_of = hf_shard_files(tensors, _SHARD_BYTES)
    rng = np.random.default_rng(seed)
    for name in dict.fromkeys(file_of.values()):
        members = [t for t in tensors if file_of[t.location, t.name] == name]
        writer = ShardWriter(path / name, [s for t in members for s in tensor_specs(t)], {"format": "pt"})
        for tensor in members:
            writer.write(tensor.name, np.frombuffer(rng.bytes(tensor.num_bytes), np.uint8))
        writer.close()
    weight_map = {t.name: file_of[t.location, t.name] for t in tensors}
    total = sum(t.num_bytes for t in tensors)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    assert set(weight_map) == set(hf_shapes(arch))
    return path, max(t.num_bytes for t in tensors)
