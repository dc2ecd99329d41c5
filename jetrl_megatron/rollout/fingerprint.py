"""A tensor's bytes as a short string, the same on the actor and inside an engine: how the two prove that they hold equal weights.

Enters: any contiguous or strided tensor on any device. Leaves: hex text that names its algorithm. `sha256` reads the bytes on the host;
`mix` runs where the tensor lies: two sums, modulo 2^64, of mixed 8-byte words, each word mixed with its place, so that moved, swapped or
changed words show. `mix` is no defence against somebody who wants to collide it; it is against faults. `fingerprint` is its definition, in
torch; `Hashing` does many tensors, on CUDA in one pass over all that have gathered (triton_fingerprint.py), and waits for the device once.
Left out: which rectangles are compared (published.py, vllm_worker.py).
"""

import hashlib
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from jetrl_megatron.rollout.tiles import Place, place_of

Algorithm = Literal["sha256", "mix"]
_CHUNK_WORDS = 1 << 25
_KEPT_BYTES, _WAITING_BYTES = 256 * 2**20, 2 * 2**30
"""A kernel is queued when so many bytes wait: the first bounds the memory that waiting costs, the second lets the device begin early."""
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
        return _mix_texts(torch.tensor([[_signed(_mixed_sum(raw, lane) % _WORD) for lane in LANES]]))[0]
    raise ValueError(f"fingerprint algorithm is {algorithm!r}; it must be sha256 or mix")


class Hashing:
    """Fingerprints under way: tensors go in one by one, and all of the text comes out at the end.

    On CUDA `add` notes where a tensor lies, and many are hashed by one kernel: in `texts`, in `flush`, and in an `add` that finds enough
    waiting. Until then a tensor is kept from being freed, and its bytes must stay what they are. Behind that the kernel is queued: the
    caller may write to the tensor or free it on the stream that `add`, `flush` and `texts` were called on, which must be one. Elsewhere,
    and for sha256, `add` does all the work.
    algorithm: of every tensor; None: what `algorithm_for` says of its device.
    """

    def __init__(self, algorithm: Algorithm | None = None) -> None:
        """Hold nothing yet."""
        self._algorithm = algorithm
        self._done: dict[str, str] = {}
        self._waiting = _Waiting()
        self._queued: list[tuple[_Waiting, Tensor]] = []
        """What a kernel was queued for, with its sums, [tensors, 2] int64 on the device."""

    def __contains__(self, key: str) -> bool:
        """Tell whether a tensor of that name went in."""
        return key in self._done

    def add(self, key: str, tensor: Tensor, *, resident: bool = False) -> None:
        """Hash a tensor under a name that is new. Raises ValueError for an unknown algorithm.

        resident: the tensor's memory is not freed before `texts` whatever happens here, as a parameter's is, so that it costs nothing to
        let it wait.
        """
        assert key not in self._done, key
        algorithm = self._algorithm or algorithm_for(tensor.device)
        if algorithm != "mix" or not _has_kernel(tensor):
            self._done[key] = fingerprint(tensor, algorithm)
            return
        self._done[key] = ""  # its place in the order
        place = place_of(tensor)
        if place is None:
            tensor, resident = flat_bytes(tensor), False
            place = tensor.data_ptr(), 1, tensor.nbytes, 0
        waiting = self._waiting
        assert not waiting.tensors or tensor.device == waiting.tensors[0].device, (tensor.device, waiting.tensors[0].device)
        waiting.keys.append(key)
        waiting.tensors.append(tensor)
        waiting.places.append(place)
        num_bytes = place[1] * place[2]
        waiting.num_bytes += num_bytes
        waiting.kept_bytes += 0 if resident else num_bytes
        if waiting.kept_bytes >= _KEPT_BYTES or waiting.num_bytes >= _WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Queue the kernel for all that waits, on the current stream, and let go of it."""
        waiting, self._waiting = self._waiting, _Waiting()
        if waiting.keys:
            from jetrl_megatron.rollout.triton_fingerprint import mixed_sums

            self._queued.append((waiting, mixed_sums(waiting.places, LANES, waiting.tensors[0].device)))
            waiting.tensors.clear()

    def texts(self) -> dict[str, str]:
        """Return key -> fingerprint in the order of `add`; waits for the device."""
        self.flush()
        if self._queued:
            keys = [key for waiting, _ in self._queued for key in waiting.keys]
            sizes = [place[1] * place[2] for waiting, _ in self._queued for place in waiting.places]
            sums = torch.cat([sums for _, sums in self._queued]).cpu() + torch.tensor(sizes)[:, None]
            self._done.update(zip(keys, _mix_texts(sums), strict=True))
            self._queued.clear()
        return dict(self._done)


@dataclass(kw_only=True, slots=True)
class _Waiting:
    """Tensors whose kernel is not queued yet, with what is needed of them behind that."""

    keys: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0
    kept_bytes: int = 0
    """Of tensors that may lie in memory for this alone."""


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in row-major order as [bytes] uint8; a copy only where it is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # cut out of a matrix it keeps the matrix's stride
    return flat.view(torch.uint8)


def unsigned_zero(tensor: Tensor) -> Tensor:
    """Return a BF16 tensor with every negative zero made positive: what a product with the identity can give back."""
    assert tensor.dtype is torch.bfloat16, tensor.dtype
    return torch.where(tensor == 0, torch.zeros_like(tensor), tensor)


def _mix_texts(sums: Tensor) -> list[str]:
    """Return the text of each pair of sums, [n, 2] int64 on the host."""
    digits = sums.numpy().astype(">i8").tobytes().hex()
    return ["mix:" + digits[at : at + 32] for at in range(0, len(digits), 32)]


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
