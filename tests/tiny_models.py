"""Tiny Hugging Face directories of the three families, with random weights that exercise what makes each family different."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

_SHARED: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_config(family: str, **changes: Any) -> Any:
    """Return a tiny model's HF config: llama (llama3 rope, tied, head_dim 64), qwen2 (qkv bias, untied), qwen3 (qk-norm, head_dim 128)."""
    if family == "llama":
        return LlamaConfig(**{**_SHARED, "head_dim": 64, "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True, **changes})
    if family == "qwen2":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        return Qwen2Config(**{**_SHARED, **heads, "tie_word_embeddings": False, **changes})
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
    return Qwen3Config(**{**_SHARED, **heads, "tie_word_embeddings": False, **changes})


def write_tiny_model(out: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Write a HF directory with random BF16 weights; norms, biases and weights are all far from their initial constants."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1.0 + 0.3 * torch.randn_like(p))
            elif name.endswith("bias"):
                p.copy_(0.5 * torch.randn_like(p))
            else:
                p.copy_(0.06 * torch.randn_like(p))
    model.to(torch.bfloat16).save_pretrained(out)
    return out
