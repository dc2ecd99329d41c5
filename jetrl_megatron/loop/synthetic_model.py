"""A Hugging Face directory with random weights of a real family: the same path into the run as a published checkpoint has.

Enters: SyntheticModelConfig, a seed. Leaves: config.json, BF16 model.safetensors, generation_config.json and a character tokenizer,
complete or not there at all (written beside and renamed); or, for benches of large shapes, config.json and tokenizer alone.
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

    partial = _emptied(out_dir)
    hf_config = _described(partial, config, 0, MAX_POSITIONS)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(partial)
    os.replace(partial, out_dir)
    return out_dir


def write_synthetic_config(out_dir: Path, config: SyntheticModelConfig, vocab_size: int, max_positions: int) -> Path:
    """Write config.json and tokenizer of a model without weights; returns the directory.

    vocab_size: entries of the vocabulary; below the tokenizer's own number, that. max_positions: the longest sequence in tokens.
    Raises ValueError for dimensions that the family cannot have.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    partial = _emptied(out_dir)
    hf_config = _described(partial, config, vocab_size, max_positions)
    hf_config.dtype = "bfloat16"
    hf_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]]
    hf_config.save_pretrained(partial)
    os.replace(partial, out_dir)
    return out_dir


def _emptied(out_dir: Path) -> Path:
    """Return the place beside `out_dir` where it is written first, empty."""
    partial = out_dir.with_name(out_dir.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    return partial


def _described(out_dir: Path, config: SyntheticModelConfig, vocab_size: int, max_positions: int) -> Any:
    """Write the tokenizer and return the transformers config of the family that goes with it."""
    from transformers import AutoConfig

    tokenizer = build_char_tokenizer(out_dir, ALPHABET)
    dimensions = synthetic_hf_config(config, max(vocab_size, len(tokenizer)))
    ModelArchitecture.from_hf_config(dimensions)
    family = str(dimensions.pop("model_type"))
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    return AutoConfig.for_model(family, **dimensions, max_position_embeddings=max_positions, **ids)
