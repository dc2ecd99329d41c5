"""A Hugging Face `config.json` as a frozen dataclass: the dimensions and switches that decide names, shapes and legality.

Enters: the parsed config of a dense Llama-3.x, Qwen2.5 or Qwen3 model. Leaves: `ModelArchitecture`. Whatever would change the
computation and is not supported (MoE, sliding windows, biases on other linears, other activations, other rope types) is an error
here, before a weight is read. Keys of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) are both read.
Left out: anything about parallel layouts (`layout.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class ModelArchitecture:
    """One dense decoder, as its config describes it."""

    family: str
    """`llama`, `qwen2` or `qwen3`; chooses the table in `names`."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """The explicit value of the config where there is one; not always hidden_size / num_heads."""
    ffn_hidden_size: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None, or `rope_type` (`linear`, `llama3`) with its numbers; the older key `type` is read as `rope_type`."""
    qkv_bias: bool
    qk_norm: bool
    tie_embeddings: bool

    @property
    def q_width(self) -> int:
        """Rows of q_proj, columns of o_proj."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of k_proj and of v_proj."""
        return self.num_kv_heads * self.head_dim

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    def __post_init__(self) -> None:
        """Check that dimensions are positive and heads fit into groups."""
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"config.json: {name} is {value!r}; it must be an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"config.json: {self.num_heads} query heads cannot share {self.num_kv_heads} kv heads evenly")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "ModelArchitecture":
        """Read a parsed `config.json`.

        config: the JSON object of a `LlamaForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`.
        Raises ValueError that names the key, its value and what is supported.
        """
        family = _family(config)
        _refuse_unsupported(config, family)
        heads = _required(config, "num_attention_heads")
        hidden = _required(config, "hidden_size")
        # Llama alone defines a missing num_key_value_heads (multi-head attention).
        kv_heads = config.get("num_key_value_heads")
        if kv_heads is None:
            kv_heads = heads if family == "llama" else _required(config, "num_key_value_heads")
        theta, scaling = _rope(config)
        return cls(
            family=family,
            num_layers=_required(config, "num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(config, family, hidden, heads),
            ffn_hidden_size=_required(config, "intermediate_size"),
            vocab_size=_required(config, "vocab_size"),
            max_positions=int(_number("max_position_embeddings", config.get("max_position_embeddings") or 2048)),
            rms_eps=_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    @classmethod
    def from_hf_directory(cls, directory: str | Path) -> "ModelArchitecture":
        """Read `config.json` in `directory`; raises ValueError where it is missing or not JSON."""
        return cls.from_hf_config(read_config(directory))


def read_config(directory: str | Path) -> dict[str, Any]:
    """Return the parsed `config.json` of a Hugging Face directory; raises ValueError where it is missing or not an object."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a Hugging Face directory holds config.json beside its *.safetensors files")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); copy the file again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}; it must hold a JSON object")
    return config


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json has no {key}; it is needed to know the shapes of the weights")
    return config[key]


def _number(key: str, value: Any) -> float:
    """Return a value as a number; raises ValueError naming key and value where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"config.json: {key} is {value!r}; it must be a number")
    return float(value)


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"config.json: model_type is {family!r}; supported are the dense families {', '.join(FAMILIES)}")
    return str(family)


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    """Raise for every switch that changes the computation and that the actor does not build."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key):
            raise ValueError(f"config.json: {key} is {config[key]}; mixture-of-experts models are not supported, dense ones are")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act is {activation!r}; only silu (SwiGLU) is supported")
    if config.get("mlp_bias"):
        raise ValueError("config.json: mlp_bias is true; biases of gate, up and down are not supported, it must be false")
    if family != "qwen2" and config.get("attention_bias"):
        raise ValueError(
            f"config.json: attention_bias is true for model_type {family}: o_proj would carry a bias, which the actor does not build; "
            "published Llama-3.x and Qwen3 weights have attention_bias false"
        )
    _refuse_sliding_window(config)


def _refuse_sliding_window(config: Mapping[str, Any]) -> None:
    """Raise where at least one layer attends through a window; a window that is declared but off is accepted."""
    types, layers = config.get("layer_types") or [], _required(config, "num_hidden_layers")
    if not isinstance(types, list | tuple):
        raise ValueError(f"config.json: layer_types is {types!r}; it must be a list with one word a layer")
    if types and len(types) != layers:
        raise ValueError(f"config.json: layer_types names {len(types)} layers, num_hidden_layers is {layers}; mend one of the two")
    other = sorted({str(t) for t in types if t != "full_attention"})
    if other:
        raise ValueError(f"config.json: layer_types holds {', '.join(other)}; only full_attention is supported")
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return
    first = config.get("max_window_layers", 0)
    if first < layers:
        raise ValueError(
            f"config.json: use_sliding_window is true and max_window_layers {first} is below num_hidden_layers {layers}: layers "
            f"from {first} on see a window of {config['sliding_window']} tokens; only full attention is supported"
        )


def _head_dim(config: Mapping[str, Any], family: str, hidden: int, heads: int) -> int:
    explicit = config.get("head_dim")
    if explicit is not None:
        return int(_number("head_dim", explicit))
    if family == "qwen3":
        return 128  # the default of the family's own config class, whatever hidden_size / num_heads is
    if hidden % heads:
        raise ValueError(f"config.json: no head_dim, and hidden_size {hidden} is not a multiple of {heads} heads; add head_dim")
    return hidden // heads


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return theta and the scaling dict from either generation of keys; raises ValueError for other rope types."""
    new, old = (_rope_keys(config, key) for key in ("rope_parameters", "rope_scaling"))
    if new and old and {"rope_theta": new.get("rope_theta"), **old} != {"rope_theta": None, **new}:  # the older dict has theta beside it
        raise ValueError(
            f"config.json: rope_parameters is {config['rope_parameters']} and rope_scaling is {config['rope_scaling']}; they contradict "
            "each other: keep the one that the model was trained with"
        )
    source = new or old
    theta = _number("rope_theta", source.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = source.pop("rope_type", "default")
    partial = source.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if _number("partial_rotary_factor", partial) != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor is {partial}; only rotary embeddings over the whole head (1.0) are supported")
    if kind not in ROPE_TYPES:
        raise ValueError(f"config.json: rope type is {kind!r}; supported are {', '.join(ROPE_TYPES)}; use a checkpoint without {kind}")
    if kind == "default":
        return theta, None
    missing = [k for k in (_LLAMA3_KEYS if kind == "llama3" else ("factor",)) if source.get(k) is None]
    if missing:
        raise ValueError(f"config.json: rope type {kind} lacks {', '.join(missing)}; copy them from the published config")
    return theta, {"rope_type": kind, **source}


def _rope_keys(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the rope numbers under one key without its nulls, the older `type` as `rope_type`; raises ValueError where it is no object."""
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f'config.json: {key} is {found!r}; it must be an object such as {{"rope_type": "linear", "factor": 2.0}}')
    numbers = {k: v for k, v in found.items() if v is not None}
    kind = numbers.pop("type", None)
    return {"rope_type": kind, **numbers} if kind is not None else numbers
