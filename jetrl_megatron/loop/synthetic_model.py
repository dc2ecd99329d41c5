"""A Hugging Face directory with random weights of a real family: the same path into the run as a published checkpoint has.

Enters: SyntheticModelConfig, a seed. Leaves: config.json, BF16 model.safetensors, generation_config.json and a character tokenizer,
complete or not there at all (written beside and renamed).
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from conversion.architecture import ModelArchitecture
from jetrl_megatron.config import SyntheticModelConfig
from jetrl_megatron.data.tokenizer import build_char_tokenizer
from jetrl_megatron.layout import synthetic_hf_config

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
    """Return the transformers config of the family; raises ValueError where the family cannot have these dimensions."""
    from transformers import AutoConfig

    dimensions = synthetic_hf_config(config, vocab_size)
    ModelArchitecture.from_hf_config(dimensions)
    family = str(dimensions.pop("model_type"))
    return AutoConfig.for_model(
        family, **dimensions, max_position_embeddings=MAX_POSITIONS, eos_token_id=eos, bos_token_id=None, pad_token_id=pad
    )
