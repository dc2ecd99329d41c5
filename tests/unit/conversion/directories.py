"""Hugging Face directories with random bits, written without a model class; and all tensors of a directory as bytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from conversion.architecture import ModelArchitecture
from conversion.names import hf_shapes
from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.quantize import quantize

FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def write_config(path: Path, config: dict[str, Any]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))


def write_bf16(path: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Write finite random BF16 weights."""
    generator = torch.Generator().manual_seed(seed)
    shapes = hf_shapes(ModelArchitecture.from_hf_config(config))
    tensors = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    write_config(path, config)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_fp8(
    path: Path, config: dict[str, Any], scale_format: str = "fp32", scale_dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Write the same weights with every linear of the layers in block FP8, as published checkpoints store them."""
    write_bf16(path, config, seed)
    tensors = {}
    for name, tensor in load(path).items():
        if name.startswith("model.layers.") and tensor.dim() == 2:
            blocks = quantize(tensor, (128, 128), scale_format=ScaleFormat(scale_format))
            tensors[name] = blocks.data
            tensors[name + "_scale_inv"] = blocks.scale.to(scale_dtype)
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_config(path, {**config, "quantization_config": FP8_CONFIG})
    return path


def load(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a directory with the safetensors library."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert name not in tensors
                tensors[name] = opened.get_tensor(name)
    return tensors


def as_bytes(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    """Read all tensors as (dtype, shape, bytes), for exact comparison."""
    return {n: (t.dtype, tuple(t.shape), np.asarray(t.contiguous().view(torch.uint8)).tobytes()) for n, t in load(path).items()}
