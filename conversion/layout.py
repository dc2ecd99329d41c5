"""How a model is cut over ranks, and which cuts are legal: refused before anything is read, with the TP degrees that work.

A 128x128 scale block may not be cut by a rank boundary: each rank would then quantise another group of elements and every TP degree
would be another model. So for each FP8 linear W [N, K] whose parts are cut:

    column-parallel q, k, v, gate, up       N / TP multiple of 128 (at TP 1 too: merged layers need whole blocks a part)
    o, down as `k_split`    (W cut along K) K / TP multiple of 128
    o, down as `k_complete` (W cut along N) N / TP multiple of 128, and K / TP: each rank quantises its slice of the input

BF16 linears need only divisibility. Nothing is padded and the block size never changes. Left out: what the ranks store (`shards`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from conversion.architecture import ModelArchitecture

BLOCK = 128
MAX_TP = 64
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The linears of one layer that FP8 applies to, as Hugging Face module names inside `model.layers.{i}`."""
MERGED = (LINEARS[:3], LINEARS[4:6])
"""Linears that run as one GEMM and therefore share one precision."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Where the parts of a model live: TP x PP x VPP and the cut of the row-parallel linears."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Model chunks a pipeline rank."""
    first_stage_layers: int | None = None
    """Layers of pipeline rank 0 where the pipeline is uneven; None is an even share."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline rank; the ranks between share what is left evenly."""
    row_parallel: str = "k_complete"
    """`k_complete`: o and down cut by output rows. `k_split`: cut along K."""
    vocab_divisible_by: int = 128
    """The embedding and the head are padded with zero rows to a multiple of this times tp."""

    def __post_init__(self) -> None:
        """Check ranges that need no model."""
        row = self.row_parallel.value if isinstance(self.row_parallel, Enum) else self.row_parallel
        object.__setattr__(self, "row_parallel", row)
        for name in ("tp", "pp", "vpp", "vocab_divisible_by"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if row not in ("k_complete", "k_split"):
            raise ValueError(f"row_parallel is {row!r}; it must be k_complete or k_split")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp is {self.vpp} but pp is 1; interleaving needs pp of 2 or more, or vpp=1")
        for name in ("first_stage_layers", "last_stage_layers"):
            value = getattr(self, name)
            if value is not None and self.pp == 1:
                raise ValueError(f"{name} is {value} but pp is 1; uneven stages need pp of 2 or more")


def padded_vocab_size(arch: ModelArchitecture, tp: int, divisible_by: int = 128) -> int:
    """Return the rows of embedding and head over all TP ranks: vocab_size rounded up to a multiple of divisible_by * tp."""
    unit = divisible_by * tp
    return -(-arch.vocab_size // unit) * unit


def stage_layers(arch: ModelArchitecture, layout: ParallelLayout) -> dict[tuple[int, int], range]:
    """Return for each (pp rank, model chunk) the global numbers of its layers, in Megatron-core's order.

    Chunk v of pipeline rank p follows the chunks v of all ranks before p and all chunks below v.
    Raises ValueError where the layers cannot be dealt out so.
    """
    counts = _layers_per_rank(arch, layout)
    for rank, count in enumerate(counts):
        if count < 1 or count % layout.vpp:
            raise ValueError(
                f"pipeline rank {rank} gets {count} of {arch.num_layers} layers; with vpp={layout.vpp} it needs a positive multiple of "
                f"{layout.vpp}; change pp={layout.pp}, vpp or the first and last stage's layer counts"
            )
    chunk = [count // layout.vpp for count in counts]
    return {(p, v): range(start := v * sum(chunk) + sum(chunk[:p]), start + chunk[p]) for p in range(layout.pp) for v in range(layout.vpp)}


def _layers_per_rank(arch: ModelArchitecture, layout: ParallelLayout) -> list[int]:
    first, last = layout.first_stage_layers, layout.last_stage_layers
    left = arch.num_layers - (first or 0) - (last or 0)
    middle = layout.pp - (first is not None) - (last is not None)
    if left < 0 or (middle == 0 and left) or (middle and left % middle):
        raise ValueError(
            f"{arch.num_layers} layers cannot be dealt over pp={layout.pp} with first_stage_layers={first}, last_stage_layers={last}: "
            f"{left} layers are left for {middle} ranks; choose pp so that they divide, or give an uneven first or last stage"
        )
    counts = [left // middle if middle else 0] * layout.pp
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def fp8_modules(arch: ModelArchitecture, bf16_layers: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the Hugging Face module names whose linear is FP8: all linears of all layers but those matched by `bf16_layers`.

    bf16_layers: globs over names such as `model.layers.3.mlp.down_proj`. Raises ValueError for a glob that matches nothing and for
    one that would split a merged layer (q, k, v or gate, up) into two precisions.
    """
    modules = [f"model.layers.{i}.{name}" for i in range(arch.num_layers) for name in LINEARS]
    always = ("lm_head", "model.embed_tokens")
    for glob in bf16_layers:
        if not any(fnmatchcase(m, glob) for m in (*modules, *always)):
            raise ValueError(
                f"--bf16-layer (precision.bf16_layers of a recipe): {glob!r} matches no linear; names look like {modules[-1]}, a glob like "
                "*.mlp.down_proj"
            )
    kept = frozenset(m for m in modules if not any(fnmatchcase(m, glob) for glob in bf16_layers))
    check_merged_precision(arch, kept)
    return kept


def check_merged_precision(arch: ModelArchitecture, fp8: frozenset[str]) -> None:
    """Raise ValueError where q, k, v or gate, up of one layer are not all FP8 or all BF16."""
    for i in range(arch.num_layers):
        for merged in MERGED:
            names = [f"model.layers.{i}.{name}" for name in merged]
            inside = [n for n in names if n in fp8]
            if inside and len(inside) != len(names):
                outside = [n for n in names if n not in fp8]
                raise ValueError(f"{', '.join(inside)} are FP8 but {', '.join(outside)} BF16; they run as one GEMM and need one precision")


def check_layout(arch: ModelArchitecture, layout: ParallelLayout, fp8: bool = False, bf16_layers: tuple[str, ...] = ()) -> None:
    """Raise ValueError, naming the value, the limit and the TP degrees that work, where the layout is illegal for the model.

    fp8: the linears are block FP8 in training, rollout or checkpoint. bf16_layers: globs of linears that stay BF16 all the same.
    """
    modules = fp8_modules(arch, bf16_layers) if fp8 else frozenset()
    check_layout_of(arch, layout, modules)


def check_layout_of(arch: ModelArchitecture, layout: ParallelLayout, modules: frozenset[str]) -> None:
    """Like `check_layout`, with the FP8 linears given by Hugging Face module name (as an FP8 checkpoint lists them)."""
    check_merged_precision(arch, modules)
    kinds = frozenset(m.split(".", 3)[3] for m in modules)
    problem = next(_problems(arch, layout.tp, layout.row_parallel, kinds), None)
    if problem is not None:
        works = [tp for tp in range(1, MAX_TP + 1) if next(_problems(arch, tp, layout.row_parallel, kinds), None) is None]
        listed = ", ".join(map(str, works)) or "none"
        if not works and next(_problems(arch, 1, layout.row_parallel, frozenset()), None) is None:
            listed += " in FP8; keep such layers BF16 where they are quantised: --bf16-layer, or precision.bf16_layers of a recipe"
        raise ValueError(f"tp={layout.tp} is illegal for this model: {problem}; TP degrees that work: {listed}")
    stage_layers(arch, layout)


def working_tp_degrees(
    arch: ModelArchitecture, row_parallel: str, fp8: bool, bf16_layers: tuple[str, ...] = (), limit: int = MAX_TP
) -> tuple[int, ...]:
    """Return every TP degree from 1 to `limit` at which the model may be cut."""
    row = row_parallel.value if isinstance(row_parallel, Enum) else row_parallel
    kinds = frozenset(m.split(".", 3)[3] for m in fp8_modules(arch, bf16_layers)) if fp8 else frozenset()
    return tuple(tp for tp in range(1, limit + 1) if next(_problems(arch, tp, row, kinds), None) is None)


def _problems(arch: ModelArchitecture, tp: int, row_parallel: str, kinds: frozenset[str]) -> Iterator[str]:
    """Yield what is wrong with one TP degree; `kinds` are the linears (as in LINEARS) that are FP8 in at least one layer."""
    if arch.num_kv_heads < tp:
        yield f"{arch.num_kv_heads} kv heads are fewer than tp={tp} ranks; each rank needs at least one whole kv head"
    for name, heads in (("query heads", arch.num_heads), ("kv heads", arch.num_kv_heads)):
        if heads % tp:
            yield f"{heads} {name} are not a multiple of tp={tp}"
    widths = {"self_attn.q_proj": arch.q_width, "self_attn.k_proj": arch.kv_width, "self_attn.v_proj": arch.kv_width}
    widths |= {"mlp.gate_proj": arch.ffn_hidden_size, "mlp.up_proj": arch.ffn_hidden_size}
    for linear, rows in widths.items():
        yield from _part(f"{linear} rows", rows, tp, linear in kinds, merged=True)
    for linear, columns in (("self_attn.o_proj", arch.q_width), ("mlp.down_proj", arch.ffn_hidden_size)):
        yield from _part(f"{linear} columns (K)", columns, tp, linear in kinds)
        if row_parallel == "k_complete":
            yield from _part(f"{linear} rows (hidden_size)", arch.hidden_size, tp, linear in kinds)


def _part(what: str, size: int, tp: int, fp8: bool, merged: bool = False) -> Iterator[str]:
    if size % tp:
        yield f"{what} {size} are not a multiple of tp={tp}"
    elif fp8 and (tp > 1 or merged) and (size // tp) % BLOCK:
        yield f"{what} {size} / tp {tp} = {size // tp}, which is not a multiple of the FP8 block size {BLOCK}"
