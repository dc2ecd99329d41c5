"""Dimensions of published models, with a few layers, for legality and planning tests."""

from conversion.architecture import ModelArchitecture

_QWEN3, _QWEN2, _LLAMA = "qwen3", "qwen2", "llama"
# family, hidden, heads, kv heads, head_dim, ffn, tied
PUBLISHED = {
    "Qwen3-0.6B": (_QWEN3, 1024, 16, 8, 128, 3072, True),
    "Qwen3-4B": (_QWEN3, 2560, 32, 8, 128, 9728, True),
    "Qwen3-8B": (_QWEN3, 4096, 32, 8, 128, 12288, False),
    "Qwen3-14B": (_QWEN3, 5120, 40, 8, 128, 17408, False),
    "Qwen3-32B": (_QWEN3, 5120, 64, 8, 128, 25600, False),
    "Qwen2.5-0.5B": (_QWEN2, 896, 14, 2, 64, 4864, True),
    "Qwen2.5-1.5B": (_QWEN2, 1536, 12, 2, 128, 8960, True),
    "Qwen2.5-7B": (_QWEN2, 3584, 28, 4, 128, 18944, False),
    "Qwen2.5-14B": (_QWEN2, 5120, 40, 8, 128, 13824, False),
    "Qwen2.5-32B": (_QWEN2, 5120, 40, 8, 128, 27648, False),
    "Qwen2.5-72B": (_QWEN2, 8192, 64, 8, 128, 29568, False),
    "Llama-3.2-1B": (_LLAMA, 2048, 32, 8, 64, 8192, True),
    "Llama-3.1-8B": (_LLAMA, 4096, 32, 8, 128, 14336, False),
    "Llama-3.1-70B": (_LLAMA, 8192, 64, 8, 128, 28672, False),
}


def published(name: str, layers: int = 4, vocab: int = 1003, **changes) -> ModelArchitecture:
    """Return the architecture of a published model, cut to `layers` layers and a small vocabulary."""
    return ModelArchitecture.from_hf_config({**published_config(name, layers, vocab), **changes})


def published_config(name: str, layers: int = 4, vocab: int = 1003) -> dict:
    """Return a config.json of a published model's dimensions."""
    family, hidden, heads, kv_heads, head_dim, ffn, tied = PUBLISHED[name]
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
