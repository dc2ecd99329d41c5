"""A tensor's bytes as a short string, the same on the actor and inside an engine: how the two prove that they hold equal weights.

Enters: any contiguous or strided tensor on any device. Leaves: hex text that names its algorithm. `sha256` reads the bytes on the host;
`mix` runs where the tensor lies: two sums, modulo 2^64, of mixed 8-byte words, each word mixed with its place, so that moved, swapped or
changed words show. `mix` is no defence against somebody who wants to collide it; it is against faults. `fingerprint` is its definition, in
torch; `Hashing` does many tensors, on CUDA with one pass each (triton_fingerprint.py), and waits for the device once.
Left out: which rectangles are compared (published.py, vllm_worker.py).
"""

import hashlib
from typing import Literal

import torch
from torch import Tensor

Algorithm = Literal["sha256", "mix"]
_CHUNK_WORDS = 1 << 25
_FETCHED_TOGETHER = 1024
_WORD = 1 << 64


def _signed(value: int) -> int:
    return value - _WORD if value >= _WORD // 2 else value


LANES = tuple(
    (_signed(place), _signed(first), _signed(second))
    for place, first, second in (
        (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
        (0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB),
    )
)
"""Odd 64-bit constants of each lane, as signed numbers: place, first and second multiplication."""


def algorithm_for(device: torch.device) -> Algorithm:
    """Return the algorithm of a device: `mix` where copying to the host would take longer than the push itself."""
    return "mix" if device.type == "cuda" else "sha256"


def fingerprint(tensor: Tensor, algorithm: Algorithm) -> str:
    """Return the fingerprint of a tensor's elements in row-major order; dtype and shape are not part of it.

    Raises ValueError for an unknown algorithm.
    """
    raw = flat_bytes(tensor)
    if algorithm == "sha256":
        return "sha256:" + hashlib.sha256(raw.cpu().numpy()).hexdigest()
    if algorithm == "mix":
        return _mix_text([_mixed_sum(raw, lane) for lane in LANES])
    raise ValueError(f"fingerprint algorithm is {algorithm!r}; it must be sha256 or mix")


class Hashing:
    """Fingerprints under way: tensors go in one by one, and all of the text comes out at the end.

    On CUDA `add` queues a kernel on the current stream and keeps the sums, not the tensor, which may be freed at once: its memory is used
    again behind the kernel. So `add` and `texts` belong to one stream. Elsewhere, and for sha256, `add` does all the work.
    algorithm: of every tensor; None: what `algorithm_for` says of its device.
    """

    def __init__(self, algorithm: Algorithm | None = None) -> None:
        """Hold nothing yet."""
        self._algorithm = algorithm
        self._done: dict[str, str] = {}
        self._queued: list[tuple[str, int]] = []
        """Key and number of bytes of each tensor whose sums lie on a device."""
        self._sums: list[Tensor] = []
        """[_FETCHED_TOGETHER, 2] int64 each, in the order of `_queued`."""
        self._rows: tuple[Tensor, ...] = ()
        """Of the last of them: cut at once, which costs the host less than one by one."""

    def __contains__(self, key: str) -> bool:
        """Tell whether a tensor of that name went in."""
        return key in self._done

    def add(self, key: str, tensor: Tensor) -> None:
        """Hash a tensor under a name that is new. Raises ValueError for an unknown algorithm."""
        assert key not in self._done, key
        algorithm = self._algorithm or algorithm_for(tensor.device)
        if algorithm != "mix" or not _has_kernel(tensor):
            self._done[key] = fingerprint(tensor, algorithm)
            return
        from jetrl_megatron.rollout.triton_fingerprint import add_mixed_sums

        row = len(self._queued) % _FETCHED_TOGETHER
        if row == 0:
            self._sums.append(torch.zeros((_FETCHED_TOGETHER, 2), dtype=torch.int64, device=tensor.device))
            self._rows = self._sums[-1].unbind(0)
        assert tensor.device == self._sums[-1].device, (tensor.device, self._sums[-1].device)
        add_mixed_sums(tensor, LANES, self._rows[row])
        self._queued.append((key, tensor.numel() * tensor.element_size()))
        self._done[key] = ""  # its place in the order

    def texts(self) -> dict[str, str]:
        """Return key -> fingerprint in the order of `add`; waits for the device."""
        sums = [pair for block in self._sums for pair in block.tolist()]
        for (key, num_bytes), pair in zip(self._queued, sums, strict=False):
            self._done[key] = _mix_text([part + num_bytes for part in pair])
        return dict(self._done)


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in row-major order as [bytes] uint8; a copy only where it is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element cut out of a matrix keeps the matrix's stride


def unsigned_zero(tensor: Tensor) -> Tensor:
    """Return a BF16 tensor with every negative zero made positive: what a product with the identity can give back."""
    assert tensor.dtype is torch.bfloat16, tensor.dtype
    return torch.where(tensor == 0, torch.zeros_like(tensor), tensor)


def _mix_text(sums: list[int]) -> str:
    return "mix:" + "".join(f"{part % _WORD:016x}" for part in sums)


def _mixed_sum(raw: Tensor, lane: tuple[int, int, int]) -> int:
    place, first, second = lane
    tail = raw.numel() % 8
    whole = raw[: raw.numel() - tail]
    # A view at an odd offset cannot be read as words; a copy can.
    words = whole.view(torch.int64) if whole.storage_offset() % 8 == 0 else whole.clone().view(torch.int64)
    total = raw.numel()
    for start in range(0, words.numel(), _CHUNK_WORDS):
        total += _mix(words[start : start + _CHUNK_WORDS], start, place, first, second)
    if tail:
        last = torch.zeros(8, dtype=torch.uint8, device=raw.device)
        last[:tail] = raw[raw.numel() - tail :]
        total += _mix(last.view(torch.int64), words.numel(), place, first, second)
    return total


def _mix(words: Tensor, start: int, place: int, first: int, second: int) -> int:
    """Sum mixed words as a Python integer; `>>` on int64 copies the sign, which is deterministic and mixes as well."""
    mixed = torch.arange(start + 1, start + 1 + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(place).bitwise_xor_(words)
    mixed.mul_(first)
    mixed.bitwise_xor_(mixed >> 31)
    mixed.mul_(second)
    mixed.bitwise_xor_(mixed >> 29)
    return int(mixed.sum().item())
