"""What the actor has published for engines: a version, where it lies, and the fingerprint of every rectangle that an engine rank must hold.

Enters: canonical (Hugging Face) tensors one by one, from the sync side. Leaves: `Published`, whose `Expected` is compared by `differences`
with what an engine reports. Tensors may be sent while they are hashed: `Expected` then comes behind the last of them.
A rectangle's name is `TENSOR[r0:r1,c0:c1]` in elements, and `TENSOR_scale_inv[...]` in 128x128 blocks.
Left out: how bytes get there (sync/), how an engine reads them back (vllm_worker.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from conversion.architecture import ModelArchitecture
from conversion.layout import BLOCK, ParallelLayout, check_layout_of
from conversion.names import SCALE_SUFFIX
from conversion.shards import Piece, StoredTensor, hf_tensors, vllm_tensors
from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.fingerprint import Algorithm, Hashing, unsigned_zero

Rectangles = dict[str, str]
"""Rectangle name -> fingerprint."""
MAX_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One version of the weights as engines must hold it."""

    version: WeightVersion
    by_rank: tuple[Rectangles, ...] = field(repr=False)
    """By engine rank."""
    unsigned: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Fingerprints with negative zeros made positive, of the rectangles that hold any; empty for `mix`, whose engines see every zero."""

    def at_hand(self) -> "Future[Expected]":
        """Return it as something that has come."""
        came: Future[Expected] = Future()
        came.set_result(self)
        return came


@dataclass(frozen=True, kw_only=True)
class Published:
    """One version of the weights on its way to the engines."""

    step: int
    """Of the version."""
    directory: Path
    """A Hugging Face directory with config and tokenizer; with the weights too, where `has_weights`."""
    has_weights: bool
    algorithm: Algorithm
    """How the bytes are hashed."""
    expected: "Future[Expected]" = field(default_factory=Future, repr=False)
    """Comes when every byte has been hashed, which may be behind the sending; at hand from the beginning where `has_weights`."""

    def settle(self, send: Callable[[], Expected]) -> None:
        """Run `send` and hand what it returns to all that wait for `expected`; where it raises, they raise RunFailure."""
        try:
            self.expected.set_result(send())
        finally:
            if not self.expected.done():
                self.expected.set_exception(RunFailure(f"the actor did not send version {self.step} to its end"))


def rectangle_name(name: str, rows: tuple[int, int], cols: tuple[int, int]) -> str:
    """Return the name of a rectangle of tensor `name`."""
    return f"{name}[{rows[0]}:{rows[1]},{cols[0]}:{cols[1]}]"


def in_blocks(span: tuple[int, int]) -> tuple[int, int]:
    """Return a range of elements as a range of 128-blocks."""
    return span[0] // BLOCK, -(-span[1] // BLOCK)


def engine_pieces(arch: ModelArchitecture, tp: int, fp8: frozenset[str]) -> list[list[tuple[StoredTensor, Piece]]]:
    """Return, by engine rank, every rectangle that it stores.

    Raises ValueError where an engine of that TP degree would cut heads or scale blocks.
    """
    check_layout_of(arch, ParallelLayout(tp=tp, row_parallel="k_split"), fp8)
    ranks: list[list[tuple[StoredTensor, Piece]]] = [[] for _ in range(tp)]
    tensors = vllm_tensors(arch, tp, fp8)
    for index, stored in enumerate(tensors):
        ranks[index % tp] += [(stored, piece) for piece in stored.pieces]
    return ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldRectangle:
    """A rectangle of one canonical tensor, scales apart from codes, and where an engine rank keeps it."""

    key: str
    """Name of the rectangle."""
    hf: str
    """Name of the tensor."""
    rows: tuple[int, int]
    """Elements of the tensor, or blocks."""
    cols: tuple[int, int]
    module: str
    """Of the engine's model."""
    parameter: str
    """Its name in the module."""
    rows_held: tuple[int, int]
    """Elements of the parameter, or blocks."""
    cols_held: tuple[int, int]
    scales: bool


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What one engine rank holds."""

    places: tuple[HeldRectangle, ...]
    """Scales behind their codes, parameter by parameter."""
    names: frozenset[str]
    """Of all canonical tensors of the model; a rank may hold nothing of one, as of a small vocabulary."""


class EnginePlans:
    """The plans of the model that was asked for last: between pushes it is the same.

    They are names and ranges alone, no tensors and no modules: a plan depends on what it is asked for and on nothing that may change.
    """

    def __init__(self) -> None:
        """Plan nothing yet."""
        self._asked: tuple[ModelArchitecture, int, frozenset[str]] | None = None
        self._plans: tuple[EnginePlan, ...] = ()

    def of(self, arch: ModelArchitecture, tp: int, fp8: frozenset[str]) -> tuple[EnginePlan, ...]:
        """Return the plans by engine rank; raises ValueError as `engine_pieces` does."""
        if self._asked != (arch, tp, fp8):
            names = {n for tensor in hf_tensors(arch, fp8) for n in ((tensor.name, tensor.scale_name) if tensor.fp8 else (tensor.name,))}
            places = [tuple(_places(pieces)) for pieces in engine_pieces(arch, tp, fp8)]
            self._plans = tuple(EnginePlan(places=held, names=frozenset(names)) for held in places)
            self._asked = arch, tp, fp8
        return self._plans


def _places(pieces: Iterable[tuple[StoredTensor, Piece]]) -> Iterator[HeldRectangle]:
    for stored, piece in pieces:
        module, _, parameter = stored.name.rpartition(".")
        held = shifted(piece.rows, piece.row_at), shifted(piece.cols, piece.col_at)
        for scales in (False, True) if stored.fp8 else (False,):
            suffix = SCALE_SUFFIX if scales else ""
            rows, cols, rows_held, cols_held = (in_blocks(span) if scales else span for span in (piece.rows, piece.cols, *held))
            yield HeldRectangle(
                key=rectangle_name(piece.hf + suffix, rows, cols),
                hf=piece.hf + suffix,
                rows=rows,
                cols=cols,
                module=module,
                parameter=parameter + suffix,
                rows_held=rows_held,
                cols_held=cols_held,
                scales=scales,
            )


def rectangle(x: Tensor, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
    """Return rows and columns of a matrix, or rows of a vector, as a view; the tensor itself where they are all of it."""
    if rows == (0, x.shape[0]) and (x.dim() == 1 or cols == (0, x.shape[1])):
        return x
    return x[slice(*rows)] if x.dim() == 1 else x[slice(*rows), slice(*cols)]


def shifted(span: tuple[int, int], at: int) -> tuple[int, int]:
    """Return a canonical range where it lies in the stored tensor, `at` its first row or column there."""
    return at, at + span[1] - span[0]


class Fingerprints:
    """Collects the fingerprints of canonical tensors while they stream by, on one stream of the device; see `fingerprint.Hashing`.

    arch, tp, fp8: the engines' model, TP degree and FP8 linears. algorithm: how bytes are hashed. plans: kept from one push to the next.
    """

    def __init__(
        self, arch: ModelArchitecture, tp: int, fp8: frozenset[str], algorithm: Algorithm, plans: EnginePlans | None = None
    ) -> None:
        """Plan which rectangles of which tensor are hashed for which rank."""
        self.algorithm = algorithm
        self._hashing, self._unsigned = Hashing(algorithm), Hashing(algorithm)
        self._keys: list[list[str]] = [[] for _ in range(tp)]
        self._wanted: dict[str, list[tuple[int, HeldRectangle]]] = {}
        for rank, plan in enumerate((plans or EnginePlans()).of(arch, tp, fp8)):
            for place in plan.places:
                self._wanted.setdefault(place.hf, []).append((rank, place))

    def add(self, name: str, tensor: Tensor, *, resident: bool = False) -> None:
        """Hash the rectangles of one canonical tensor; scales come under their own name, `X.weight_scale_inv`.

        It must stay what it is until `take`. resident: see `Hashing.add`.
        """
        for rank, place in self._wanted[name]:
            if place.key not in self._hashing:
                part = rectangle(tensor, place.rows, place.cols)
                self._hashing.add(place.key, part, resident=resident)
                self._note_negative_zeros(place.key, part)
            self._keys[rank].append(place.key)

    def _note_negative_zeros(self, key: str, part: Tensor) -> None:
        """Hash a rectangle without its negative zeros too, where it has any: only engines on a CPU, where sha256 is used, lose them."""
        if self.algorithm != "sha256" or part.dtype is not torch.bfloat16:
            return
        plain = unsigned_zero(part)
        if not torch.equal(plain.view(torch.int16), part.contiguous().view(torch.int16)):
            self._unsigned.add(key, plain)

    def take(self) -> tuple[list[Rectangles], Rectangles]:
        """Wait for the device and return `Expected.by_rank` and `Expected.unsigned` of all tensors so far."""
        texts = self._hashing.texts()
        return [{key: texts[key] for key in keys} for keys in self._keys], self._unsigned.texts()


def differences(wanted: Expected, rank: int, held: Mapping[str, str], unsigned_zeros: Iterable[str] = ()) -> list[str]:
    """Compare what an engine rank reports with what it must hold; returns one line a rectangle, empty where all are equal.

    held: the engine's rectangles. unsigned_zeros: those that it could only read back with negative zeros made positive.
    """
    expected = dict(wanted.by_rank[rank])
    for key in unsigned_zeros:
        if key in wanted.unsigned:
            expected[key] = wanted.unsigned[key]
    lines = [f"{key} is missing in the engine" for key in expected.keys() - held.keys()]
    lines += [f"{key} is unknown to the actor" for key in held.keys() - expected.keys()]
    lines += [f"{key} differs" for key in expected.keys() & held.keys() if expected[key] != held[key]]
    return sorted(lines)


def summary(lines: list[str]) -> str:
    """Return the first few of many differences, and how many there are."""
    more = f" and {len(lines) - MAX_NAMED} more" if len(lines) > MAX_NAMED else ""
    return "; ".join(lines[:MAX_NAMED]) + more
