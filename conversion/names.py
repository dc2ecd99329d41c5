"""Names, shapes and cuts of every weight: one table a family, read in both directions.

Enters: a `ModelArchitecture`. Leaves: the canonical (Hugging Face) tensors in file order, and for each Megatron-core GPTModel
parameter (local layer spec) the canonical tensors it is made of and how they are cut over TP. `{i}` is a layer number: global in
Hugging Face names, counted from 0 inside each model chunk in Megatron names. Adding a family is adding a table here.

Invariant: each canonical tensor stands in exactly one rule, except the tied embedding, which also fills the head of a last pipeline
stage that does not hold the first.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from conversion.architecture import ModelArchitecture

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_LAYER = "output_layer.weight"
SCALE_SUFFIX = "_scale_inv"
"""`X.weight` has its block scales in `X.weight_scale_inv`."""
_NON_WEIGHTS = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")


class Cut(Enum):
    """How a Megatron parameter is made of canonical tensors and divided over TP ranks."""

    vocab = "vocab"
    """Rows, after padding with zero rows."""
    whole = "whole"
    """A full copy on each rank."""
    qkv = "qkv"
    """Rows of q, k, v, grouped by kv head: [q..q k v] for each group of the rank."""
    gate_up = "gate_up"
    """Rows of gate and of up: [gate_r; up_r]."""
    row_parallel = "row_parallel"
    """Columns in `k_split`, rows in `k_complete`."""


@dataclass(frozen=True)
class NameRule:
    """One Megatron parameter and the canonical tensors that make it up."""

    megatron: str
    hf: tuple[str, ...]
    cut: Cut


_ATTN, _MLP, _LAYER = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp.", "decoder.layers.{i}."
_QKV = ("q_proj", "k_proj", "v_proj")
_COMMON_LAYER = (
    NameRule(_LAYER + "input_layernorm.weight", ("model.layers.{i}.input_layernorm.weight",), Cut.whole),
    NameRule(_LAYER + "self_attention.linear_qkv.weight", tuple(f"{_ATTN}{p}.weight" for p in _QKV), Cut.qkv),
    NameRule(_LAYER + "self_attention.linear_proj.weight", (_ATTN + "o_proj.weight",), Cut.row_parallel),
    NameRule(_LAYER + "pre_mlp_layernorm.weight", ("model.layers.{i}.post_attention_layernorm.weight",), Cut.whole),
    NameRule(_LAYER + "mlp.linear_fc1.weight", (_MLP + "gate_proj.weight", _MLP + "up_proj.weight"), Cut.gate_up),
    NameRule(_LAYER + "mlp.linear_fc2.weight", (_MLP + "down_proj.weight",), Cut.row_parallel),
)
_QKV_BIAS = (NameRule(_LAYER + "self_attention.linear_qkv.bias", tuple(f"{_ATTN}{p}.bias" for p in _QKV), Cut.qkv),)
_QK_NORM = (
    NameRule(_LAYER + "self_attention.q_layernorm.weight", (_ATTN + "q_norm.weight",), Cut.whole),
    NameRule(_LAYER + "self_attention.k_layernorm.weight", (_ATTN + "k_norm.weight",), Cut.whole),
)
LAYER_TABLES: dict[str, tuple[NameRule, ...]] = {
    "llama": _COMMON_LAYER,
    "qwen2": _COMMON_LAYER + _QKV_BIAS,
    "qwen3": _COMMON_LAYER + _QK_NORM,
}
"""What one layer of each family holds."""
FIRST_STAGE = (NameRule("embedding.word_embeddings.weight", (EMBEDDING,), Cut.vocab),)
LAST_STAGE = (NameRule("decoder.final_layernorm.weight", (FINAL_NORM,), Cut.whole), NameRule(OUTPUT_LAYER, (LM_HEAD,), Cut.vocab))


def chunk_rules(arch: ModelArchitecture, layers: range, first: bool, last: bool) -> Iterator[NameRule]:
    """Yield the filled-in rules of one model chunk, in the order of the forward pass.

    layers: global layer numbers of the chunk. first: it holds the embedding. last: it holds the final norm and the head. A tied head
    has no parameter of its own where the chunk holds the embedding too, and is filled from the embedding where it does not.
    """
    if first:
        yield from FIRST_STAGE
    for local, number in enumerate(layers):
        for rule in LAYER_TABLES[arch.family]:
            yield NameRule(rule.megatron.format(i=local), tuple(name.format(i=number) for name in rule.hf), rule.cut)
    if last:
        for rule in LAST_STAGE:
            if rule.megatron != OUTPUT_LAYER or not arch.tie_embeddings:
                yield rule
            elif not first:
                yield NameRule(OUTPUT_LAYER, (EMBEDDING,), Cut.vocab)


def hf_shapes(arch: ModelArchitecture) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every weight of the Hugging Face checkpoint, in file order; a tied head is not among them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for rule in chunk_rules(arch, range(arch.num_layers), first=True, last=True):
        for name in rule.hf:
            assert name not in shapes, f"{name} stands in two rules of the {arch.family} table"
            shapes[name] = canonical_shape(arch, name)
    return shapes


def canonical_shape(arch: ModelArchitecture, name: str) -> tuple[int, ...]:
    """Return the shape of one canonical tensor from its name."""
    hidden, ffn = arch.hidden_size, arch.ffn_hidden_size
    module, kind = name.split(".")[-2:]
    rows = {"q_proj": arch.q_width, "k_proj": arch.kv_width, "v_proj": arch.kv_width}
    if kind == "bias":
        return (rows[module],)
    shapes = {m: (n, hidden) for m, n in rows.items()}
    shapes |= {"o_proj": (hidden, arch.q_width), "gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    shapes |= {"embed_tokens": (arch.vocab_size, hidden), "lm_head": (arch.vocab_size, hidden)}
    norms = {"q_norm": (arch.head_dim,), "k_norm": (arch.head_dim,)}
    return shapes.get(module) or norms.get(module) or (hidden,)


def is_non_weight(name: str) -> bool:
    """Tell whether `name` is a buffer that old exports carry and that the config determines (rotary frequencies, masks)."""
    return name.endswith(_NON_WEIGHTS)


def check_names(what: str, expected: Iterable[str], found: Iterable[str]) -> None:
    """Raise ValueError listing the names that are missing and those that nothing consumes.

    what: where the names come from, for the message. Buffers of `is_non_weight` are ignored.
    """
    want, have = set(expected), {n for n in found if not is_non_weight(n)}
    missing, unknown = sorted(want - have), sorted(have - want)
    if missing or unknown:
        listed = "; ".join(
            f"{len(names)} {label}: {_some(names)}" for label, names in (("missing", missing), ("not used", unknown)) if names
        )
        raise ValueError(f"{what}: the tensors do not match config.json; {listed}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
