"""A Hugging Face directory with random weights of a real family: the same path into the run as a published checkpoint has.

Enters: SyntheticModelConfig, a seed. Leaves: config.json, BF16 model.safetensors, generation_config.json and a character tokenizer, complete or
not there at all (written beside and renamed).
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.config import Family, SyntheticModelConfig
from jetrl_megatron.data.tokenizer import build_char_tokenizer

ALPHABET = "0123456789+-*/=().,:? abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_POSITIONS = 1024


def write_synthetic_model(out_dir: Path, config: SyntheticModelConfig, seed: int) -> Path:
    """Write the directory unless it is there already; returns it.

    Raises:
        ValueError: for dimensions that the family cannot have.
    """
    if out_dir.exists():
        return out_dir
    from transformers import AutoModelForCausalLM

    partial = out_dir.with_name(out_dir.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = build_char_tokenizer(partial, ALPHABET)
    hf_config = _hf_config(config, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(partial)
    os.replace(partial, out_dir)
    return out_dir


def _hf_config(config: SyntheticModelConfig, vocab_size: int, eos: int, pad: int) -> Any:
    """Return the transformers config of the family."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    family = {Family.llama: LlamaConfig, Family.qwen2: Qwen2Config, Family.qwen3: Qwen3Config}[config.family]
    if config.family is Family.qwen2 and config.head_dim * config.num_heads != config.hidden_size:
        raise ValueError(
            f"model.synthetic.head_dim is {config.head_dim}; qwen2 has no explicit head_dim, so it must be hidden_size / num_heads = "
            f"{config.hidden_size} / {config.num_heads}"
        )
    head_dim = {} if config.family is Family.qwen2 else {"head_dim": config.head_dim}
    return family(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=config.init_std,
        tie_word_embeddings=config.tie_embeddings,
        eos_token_id=eos,
        bos_token_id=None,
        pad_token_id=pad,
        **head_dim,
    )
