"""Speed and memory of a conversion against `cp` of the same files on the same disk, in one run.

Enters: an empty directory and a size. Leaves: seconds of cp, HF -> Megatron TP4 and Megatron -> HF; of both conversions bytes a second, the
ratio to cp, and the peak memory of their processes beside the bound 2 * largest tensor + 500 MB. What came back in the last round is
compared with the source, byte for byte. Each step is a process of its own, so that peaks do not mix. Every step reads the checkpoint's
bytes once and writes them once, from pages that are in memory, and is timed from its start until what it wrote is on the disk: a conversion
syncs its files itself, cp is followed by a sync of its copies.

    speed = checkpoint bytes / seconds until they are on the disk          ratio = speed of a conversion / speed of cp = cp_s / its_s

Rounds alternate cp and both conversions; the medians are compared. `cp_without_sync_s` is the same cp up to its return.
"""

import filecmp
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from conversion.architecture import ModelArchitecture
from conversion.checkpoint import MANIFEST
from conversion.random_checkpoint import write_random
from conversion.shards import hf_tensors

_SHARD_BYTES = 10**9
_CONVERSIONS = {
    "to_megatron_tp4": ["to-megatron", "{d}/hf", "{d}/tp4", "--tp", "4"],
    "to_hf": ["to-hf", "{d}/tp4", "{d}/back", "--max-shard-gb", "1"],
}


def bench(directory: Path, gb: float, rounds: int = 3) -> dict[str, Any]:
    """Measure in `directory`, which must be empty or missing; everything written there is removed. gb: size of the checkpoint in 1e9 bytes.

    Raises ValueError where the directory is not empty, there is no round or the size is too small, RuntimeError where a step fails or
    what comes back differs from the source.
    """
    config = _config(gb)
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1")
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory} is not empty; bench writes about {4 * gb:g} GB there and removes it, give an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return _measure(directory, config, rounds)
    finally:
        shutil.rmtree(directory)


def _measure(directory: Path, config: dict[str, Any], rounds: int) -> dict[str, Any]:
    source = directory / "hf"
    tensors = write_random(source, config, frozenset(), np.random.default_rng(0), _SHARD_BYTES)
    largest = max(t.num_bytes for t in tensors)
    size = sum(p.stat().st_size for p in source.iterdir())
    seconds: dict[str, list[float]] = {name: [] for name in ("cp", "cp_without_sync", *_CONVERSIONS)}
    peaks = dict.fromkeys(_CONVERSIONS, 0)
    for _ in range(rounds):
        for name in ("copy", "tp4", "back"):
            shutil.rmtree(directory / name, ignore_errors=True)
        _level(source, directory)
        copying = _timed(["cp", "-r", str(source), str(directory / "copy")])[0]
        seconds["cp_without_sync"].append(copying)
        seconds["cp"].append(copying + _timed(["sync", *map(str, (directory / "copy").iterdir())])[0])
        shutil.rmtree(directory / "copy")
        for (name, words), reads in zip(_CONVERSIONS.items(), (source, directory / "tp4"), strict=True):
            _level(reads, directory)
            command = [sys.executable, "-m", "conversion", *(word.format(d=directory) for word in words), "--json"]
            spent, peak = _timed(command)
            seconds[name].append(spent)
            peaks[name] = max(peaks[name], peak)
    _check_back(source, directory / "back")
    result: dict[str, Any] = {"checkpoint_bytes": size, "rounds": rounds, "largest_tensor_bytes": largest}
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        result[f"{name}_s"] = round(value, 2)
        result[f"{name}_rounds_s"] = [round(one, 2) for one in seconds[name]]
    for name, peak in peaks.items():
        result[f"{name}_bytes_per_s"] = int(size / medians[name])
        result[f"{name}_speed_over_cp"] = round(medians["cp"] / medians[name], 2)
        result[f"{name}_peak_bytes"] = peak
    result["peak_bound_bytes"] = 2 * largest + 500_000_000
    return result


def _level(reads: Path, directory: Path) -> None:
    """Bring every timed step to one start: what it reads is in memory, as much again is free and was in use a moment ago, all is synced."""
    _timed(["cp", "-r", str(reads), str(directory / "level")])
    os.sync()
    shutil.rmtree(directory / "level")


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


def _check_back(source: Path, back: Path) -> None:
    """Raise RuntimeError naming the first file of tensors, or index, in which HF -> Megatron -> HF changed a byte."""
    one, two = (sorted(p.name for p in path.iterdir() if p.name != MANIFEST) for path in (source, back))
    if one != two:
        raise RuntimeError(f"{source} holds {', '.join(one)}, but after HF -> Megatron -> HF there is {', '.join(two)}")
    for name in one:
        if not filecmp.cmp(source / name, back / name, shallow=False):
            raise RuntimeError(f"{source / name} differs after HF -> Megatron -> HF; the conversion is wrong, its speed means nothing")


def _config(gb: float) -> dict[str, Any]:
    """Return a Llama config of about `gb` * 1e9 bytes: as many layers as fit, and below one layer all widths halved until one fits.

    Raises ValueError for a size that is not a number or too small.
    """
    for divisor in (1, 2, 4, 8, 16):
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096 // divisor,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128 // divisor,
            "intermediate_size": 14336 // divisor,
            "num_hidden_layers": 1,
            "vocab_size": 32000 // divisor,
            "tie_word_embeddings": False,
        }
        one, two = (_num_bytes({**config, "num_hidden_layers": layers}) for layers in (1, 2))
        if one <= gb * 1e9 < float("inf"):
            return {**config, "num_hidden_layers": 1 + round((gb * 1e9 - one) / (two - one))}
    raise ValueError(f"gb is {gb:g}; it must be a number of at least {one / 1e9:.4f}, the smallest model that is measured")


def _num_bytes(config: dict[str, Any]) -> int:
    return sum(t.num_bytes for t in hf_tensors(ModelArchitecture.from_hf_config(config)))
