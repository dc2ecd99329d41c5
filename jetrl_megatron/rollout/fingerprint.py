"""A tensor's bytes as a short string, the same on the actor and inside an engine: how the two prove that they hold equal weights.

Enters: any contiguous or strided tensor on any device. Leaves: hex text that names its algorithm. `sha256` reads the bytes on the host;
`mix` runs where the tensor lies, in whole passes over memory: two sums, modulo 2^64, of mixed 8-byte words, each word mixed with its
place, so that moved, swapped or changed words show. `mix` is no defence against somebody who wants to collide it; it is against faults.
Left out: which rectangles are compared (published.py, vllm_worker.py).
"""

import hashlib
from typing import Literal

import torch
from torch import Tensor

Algorithm = Literal["sha256", "mix"]
_CHUNK_WORDS = 1 << 25
_LANES = ((0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB))
"""Odd 64-bit constants: place, first and second multiplication."""


def algorithm_for(device: torch.device) -> Algorithm:
    """Return the algorithm of a device: `mix` where copying to the host would take longer than the push itself."""
    return "mix" if device.type == "cuda" else "sha256"


def fingerprint(tensor: Tensor, algorithm: Algorithm) -> str:
    """Return the fingerprint of a tensor's elements in row-major order; dtype and shape are not part of it.

    Raises ValueError for an unknown algorithm.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if algorithm == "sha256":
        return "sha256:" + hashlib.sha256(raw.cpu().numpy()).hexdigest()
    if algorithm == "mix":
        return "mix:" + "".join(f"{_mixed_sum(raw, lane):016x}" for lane in _LANES)
    raise ValueError(f"fingerprint algorithm is {algorithm!r}; it must be sha256 or mix")


def unsigned_zero(tensor: Tensor) -> Tensor:
    """Return a BF16 tensor with every negative zero made positive: what a product with the identity can give back."""
    assert tensor.dtype is torch.bfloat16, tensor.dtype
    return torch.where(tensor == 0, torch.zeros_like(tensor), tensor)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _mixed_sum(raw: Tensor, lane: tuple[int, int, int]) -> int:
    place, first, second = (_signed(c) for c in lane)
    tail = raw.numel() % 8
    whole = raw[: raw.numel() - tail]
    # A view at an odd offset cannot be read as words; a copy can.
    words = whole.view(torch.int64) if whole.data_ptr() % 8 == 0 else whole.clone().view(torch.int64)
    total = raw.numel()
    for start in range(0, words.numel(), _CHUNK_WORDS):
        total += _mix(words[start : start + _CHUNK_WORDS], start, place, first, second)
    if tail:
        last = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        last[:tail] = raw[raw.numel() - tail :]
        total += _mix(last.view(torch.int64), words.numel(), place, first, second)
    return total % (1 << 64)


def _mix(words: Tensor, start: int, place: int, first: int, second: int) -> int:
    """Sum mixed words as a Python integer; `>>` on int64 copies the sign, which is deterministic and mixes as well."""
    mixed = torch.arange(start + 1, start + 1 + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(place).bitwise_xor_(words)
    mixed.mul_(first)
    mixed.bitwise_xor_(mixed >> 31)
    mixed.mul_(second)
    mixed.bitwise_xor_(mixed >> 29)
    return int(mixed.sum().item())
