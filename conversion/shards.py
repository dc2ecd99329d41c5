"""What each place stores, as rectangles of canonical (Hugging Face) tensors: HF directory, Megatron ranks, torch_dist, vLLM ranks.

Enters: architecture, layout, and the set of FP8 linears. Leaves: a list of `StoredTensor`. Rows count output features (or the elements
of a vector, which has one column), columns count input features. A block-FP8 stored tensor `X.weight` has its scales beside it in
`X.weight_scale_inv`, FP32 [ceil(rows / 128), ceil(columns / 128)].

A Megatron rank's fused QKV is group-major, [q..q k v] for each kv head. In FP8 with a head_dim that is no multiple of 128 pieces of it
would be smaller than a block: then its rows are [q | k | v], as the actor's weight cache and vLLM order them, so that q, k and v are
whole blocks of their own. On legal layouts this is bit-identical to quantising q, k and v as three matrices.
Left out: how a plan is made of two descriptions (`plan`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from conversion.architecture import ModelArchitecture
from conversion.layout import BLOCK, ParallelLayout, padded_vocab_size, stage_layers
from conversion.names import SCALE_SUFFIX, Cut, NameRule, canonical_shape, chunk_rules, hf_shapes

_Item = TypeVar("_Item")
Span = tuple[int, int]
"""Half-open."""
HF = "hf"
"""The one location of a Hugging Face directory."""
TORCH_DIST = "torch_dist"
"""The one location of a directory of Megatron's distributed checkpointing."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a canonical tensor and where its upper left corner lies in the stored tensor."""

    hf: str
    rows: tuple[int, int]
    """Half-open, in the canonical tensor."""
    cols: tuple[int, int]
    row_at: int = 0
    col_at: int = 0


@dataclass(frozen=True)
class StoredTensor:
    """One tensor at one place; elements that no piece covers are zero padding."""

    location: str
    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    fp8: bool = False

    @property
    def rows_cols(self) -> tuple[int, int]:
        """Rows and columns; a vector has one column."""
        return (self.shape[0], 1) if len(self.shape) == 1 else (self.shape[0], self.shape[1])

    @property
    def scale_name(self) -> str:
        """Name of the block scales of an FP8 tensor."""
        return self.name + SCALE_SUFFIX

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the block scales, always two-dimensional."""
        rows, cols = self.rows_cols
        return (-(-rows // BLOCK), -(-cols // BLOCK))

    @property
    def num_bytes(self) -> int:
        """Bytes of the BF16 elements, or of FP8 codes with their FP32 scales."""
        rows, cols = self.rows_cols
        return rows * cols + 4 * self.scale_shape[0] * self.scale_shape[1] if self.fp8 else 2 * rows * cols


def rank_key(pp: int, tp: int, vp: int = 0) -> str:
    """Return the location of a model chunk on a Megatron rank; also the stem of its shard file."""
    return f"pp{pp:03d}-tp{tp:03d}-vp{vp:03d}"


def rank_keys(layout: ParallelLayout) -> tuple[str, ...]:
    """Return the locations of all model chunks of a layout, TP ranks of one chunk next to each other."""
    return tuple(rank_key(p, t, v) for p in range(layout.pp) for v in range(layout.vpp) for t in range(layout.tp))


def hf_tensors(arch: ModelArchitecture, fp8: frozenset[str] = frozenset()) -> list[StoredTensor]:
    """Describe a Hugging Face directory: each canonical tensor as itself, in file order.

    fp8: module names of the block-FP8 linears.
    """
    return [
        StoredTensor(HF, name, shape, (_whole(name, shape),), name.removesuffix(".weight") in fp8)
        for name, shape in hf_shapes(arch).items()
    ]


def megatron_tensors(arch: ModelArchitecture, layout: ParallelLayout, fp8: frozenset[str] = frozenset()) -> list[StoredTensor]:
    """Describe all Megatron ranks; TP ranks of one parameter stand next to each other. Raises ValueError for undealable layers."""
    tensors: list[StoredTensor] = []
    for (pp, vp), layers in sorted(stage_layers(arch, layout).items()):
        first, last = (pp, vp) == (0, 0), (pp, vp) == (layout.pp - 1, layout.vpp - 1)
        for rule in chunk_rules(arch, layers, first, last):
            tensors += [StoredTensor(rank_key(pp, tp, vp), *_cut(arch, layout, rule, tp, fp8)) for tp in range(layout.tp)]
    return tensors


def torch_dist_tensors(arch: ModelArchitecture, vocab_rows: int | None = None) -> list[StoredTensor]:
    """Describe a `torch_dist` directory: what a single rank would hold, whatever the ranks were that wrote it.

    vocab_rows: rows of embedding and head, padding included; by default the least that Megatron pads to.
    """
    layout = ParallelLayout() if vocab_rows is None else ParallelLayout(vocab_divisible_by=vocab_rows)
    return [replace(stored, location=TORCH_DIST) for stored in megatron_tensors(arch, layout)]


_Part = tuple[str, tuple[int, ...], tuple[Piece, ...], bool]


def _cut(arch: ModelArchitecture, layout: ParallelLayout, rule: NameRule, tp: int, fp8: frozenset[str]) -> _Part:
    """Return name, shape, pieces and precision of what TP rank `tp` stores for one rule."""
    shapes = [canonical_shape(arch, name) for name in rule.hf]
    is_fp8 = rule.hf[0].removesuffix(".weight") in fp8
    if rule.cut is Cut.whole:
        return rule.megatron, shapes[0], (_whole(rule.hf[0], shapes[0]),), is_fp8
    if rule.cut is Cut.vocab:
        return rule.megatron, *_vocab_rows(arch, layout, rule.hf[0], tp), False
    if rule.cut is Cut.row_parallel:
        axis = 1 if layout.row_parallel == "k_split" else 0
        return rule.megatron, *_slice(rule.hf[0], shapes[0], axis, tp, layout.tp), is_fp8
    if rule.cut is Cut.qkv and not (is_fp8 and arch.head_dim % BLOCK):
        return rule.megatron, *_group_major(arch, layout, rule, shapes[0], tp), is_fp8
    return rule.megatron, *_stack([_slice(n, s, 0, tp, layout.tp) for n, s in zip(rule.hf, shapes, strict=True)]), is_fp8


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name, (0, shape[0]), (0, shape[1] if len(shape) == 2 else 1))


def _slice(name: str, shape: tuple[int, ...], axis: int, part: int, parts: int) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Return shape and piece of slice `part` of `parts` along `axis`."""
    size, rest = divmod(shape[axis], parts)
    assert rest == 0, f"{name}: {shape} along axis {axis} is not a multiple of {parts}; check_layout was not called"
    bounds = [(0, shape[0]), (0, shape[1] if len(shape) == 2 else 1)]
    bounds[axis] = (part * size, (part + 1) * size)
    local = tuple(size if a == axis else n for a, n in enumerate(shape))
    return local, (Piece(name, bounds[0], bounds[1]),)


def _stack(slices: list[tuple[tuple[int, ...], tuple[Piece, ...]]]) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Put slices below each other."""
    pieces: list[Piece] = []
    rows = 0
    for shape, (piece,) in slices:
        pieces.append(Piece(piece.hf, piece.rows, piece.cols, row_at=rows))
        rows += shape[0]
    return (rows, *slices[0][0][1:]), tuple(pieces)


def _vocab_rows(arch: ModelArchitecture, layout: ParallelLayout, name: str, tp: int) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Return shape and pieces of the padded vocabulary rows of one rank; a rank may hold nothing but padding."""
    rows = padded_vocab_size(arch, layout.tp, layout.vocab_divisible_by) // layout.tp
    start, end = tp * rows, min((tp + 1) * rows, arch.vocab_size)
    shape = (rows, arch.hidden_size)
    return shape, (Piece(name, (start, end), (0, arch.hidden_size)),) if start < end else ()


def _group_major(
    arch: ModelArchitecture, layout: ParallelLayout, rule: NameRule, q_shape: tuple[int, ...], tp: int
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Return shape and pieces of fused q, k, v (weight or bias): [q..q k v] for each kv head of the rank."""
    assert arch.num_kv_heads % layout.tp == 0, f"{arch.num_kv_heads} kv heads at tp={layout.tp}; check_layout was not called"
    groups = arch.num_kv_heads // layout.tp
    cols = (0, q_shape[1] if len(q_shape) == 2 else 1)
    heights = (arch.heads_per_group * arch.head_dim, arch.head_dim, arch.head_dim)
    pieces: list[Piece] = []
    at = 0
    for group in range(tp * groups, (tp + 1) * groups):
        for name, height in zip(rule.hf, heights, strict=True):
            pieces.append(Piece(name, (group * height, (group + 1) * height), cols, row_at=at))
            at += height
    return (at, *q_shape[1:]), tuple(pieces)


def vllm_tensors(arch: ModelArchitecture, tp: int, fp8: frozenset[str] = frozenset()) -> list[StoredTensor]:
    """Describe the parameters of a vLLM engine at its own TP degree: qkv_proj and gate_up_proj stacked, o and down cut along K.

    The location is `rank_key(0, tp)`. Where the engine has more ranks than kv heads each kv head stands on tp / num_kv_heads ranks,
    as vLLM keeps it. Raises ValueError where heads do not divide. The vocabulary is padded to a multiple of 64 and split over ranks.
    """
    if arch.num_heads % tp or (arch.num_kv_heads % tp and tp % arch.num_kv_heads):
        raise ValueError(
            f"vLLM at tp={tp} needs a divisor of {arch.num_heads} query heads that divides {arch.num_kv_heads} kv heads or is a multiple"
        )
    tensors: list[StoredTensor] = []
    for rule in chunk_rules(arch, range(arch.num_layers), first=True, last=True):
        for rank in range(tp):
            shape, pieces = _vllm_part(arch, tp, rule, rank)
            name = rule.hf[0].replace(".q_proj.", ".qkv_proj.").replace(".gate_proj.", ".gate_up_proj.")
            tensors.append(StoredTensor(rank_key(0, rank), name, shape, pieces, rule.hf[0].removesuffix(".weight") in fp8))
    return tensors


def _vllm_part(arch: ModelArchitecture, tp: int, rule: NameRule, rank: int) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    shapes = [canonical_shape(arch, name) for name in rule.hf]
    if rule.cut is Cut.whole:
        return shapes[0], (_whole(rule.hf[0], shapes[0]),)
    if rule.cut is Cut.vocab:
        rows = -(-arch.vocab_size // 64) * 64
        if rows % tp:
            raise ValueError(f"vLLM at tp={tp}: the padded vocabulary of {rows} rows is not a multiple of tp")
        start, end = rank * (rows // tp), min((rank + 1) * (rows // tp), arch.vocab_size)
        return (rows // tp, arch.hidden_size), (Piece(rule.hf[0], (start, end), (0, arch.hidden_size)),) if start < end else ()
    if rule.cut is Cut.row_parallel:
        return _slice(rule.hf[0], shapes[0], 1, rank, tp)
    kv_parts, kv_rank = (tp, rank) if arch.num_kv_heads >= tp else (arch.num_kv_heads, rank * arch.num_kv_heads // tp)
    parts = [(tp, rank), (kv_parts, kv_rank), (kv_parts, kv_rank)] if rule.cut is Cut.qkv else [(tp, rank), (tp, rank)]
    return _stack([_slice(n, s, 0, r, p) for n, s, (p, r) in zip(rule.hf, shapes, parts, strict=True)])


def overlapping(items: Iterable[_Item], rectangle: Callable[[_Item], tuple[Span, Span]]) -> Iterator[tuple[_Item, _Item]]:
    """Yield pairs whose rectangles (rows, columns) share an element; sorted by row, so that distant rows are never compared."""
    ordered = sorted(((rectangle(item), item) for item in items), key=lambda pair: pair[0][0])
    for i, ((rows, cols), one) in enumerate(ordered):
        for (other_rows, other_cols), other in ordered[i + 1 :]:
            if other_rows[0] >= rows[1]:
                break
            if max(cols[0], other_cols[0]) < min(cols[1], other_cols[1]):
                yield one, other
