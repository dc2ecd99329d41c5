"""Record what every operator of a vLLM engine gives: one prompt after the other, prefill and decoding.

Enters: a Hugging Face directory, prompts, the engine arguments that a server of the run would get. Leaves: one file for `actor_taps`: the
tokens of every sequence and, by operator, outputs [tokens, width] in the order in which the tokens entered. Runs eagerly, so that hooks are
called; compiled with the same custom operators, the engine calls the same kernels. Needs vLLM, in a process without another process group.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.flow.operators import FINAL_NORM, LOGITS, key
from jetrl_megatron.rollout.compat import engine_numerics

Recorded = dict[str, list[Tensor]]


def record(model_dir: Path, prompts: list[list[int]], new_toks: int, max_model_len: int, memory_share: float) -> list[dict[str, Any]]:
    """Return for each prompt `tokens` (prompt and drawn), `num_prompt`, `logprobs` of the drawn and `outputs` (key -> [n, width])."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model_dir),
        enforce_eager=True,
        max_model_len=max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=max_model_len,
        seed=0,
        enable_prefix_caching=False,
        gpu_memory_utilization=memory_share,
        **engine_numerics(torch.cuda.is_available(), cuda_graphs=False),
    )
    store: Recorded = {}
    llm.apply_model(lambda model: _tap_model(model, store))
    params = SamplingParams(temperature=1.0, seed=1234, max_tokens=new_toks, ignore_eos=True, logprobs=0)  # min_tokens masks logits
    sequences = []
    for prompt in prompts:
        store.clear()
        drawn = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
        assert drawn.logprobs is not None
        logprobs = [step[token].logprob for token, step in zip(drawn.token_ids, drawn.logprobs, strict=True)]
        outputs = {name: torch.cat(parts).cpu() for name, parts in store.items()}
        tokens = [*prompt, *drawn.token_ids]
        sequences.append({"tokens": tokens, "num_prompt": len(prompt), "logprobs": logprobs, "outputs": outputs})
    return sequences


def _tap_model(model: Any, store: Recorded) -> None:
    """Hook every operator; what a hook gets is copied at once, because the engine works in place."""

    def keep(name: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            store.setdefault(name, []).append(tensor.detach().reshape(-1, tensor.shape[-1]).clone())

    def heads_flat(tensor: Tensor, width: int) -> Tensor:
        return tensor.reshape(-1, width)

    def tap(module: Any, name: str) -> None:
        module.register_forward_hook(lambda _m, _i, out: keep(name, out[0] if isinstance(out, tuple) else out))

    def tap_rope(attention: Any) -> None:
        """All layers share one rope: its n-th call in a forward is that of layer n."""
        assert all(layer.self_attn.rotary_emb is attention.rotary_emb for layer in layers), "layers with ropes of their own"
        calls = itertools.cycle(range(len(layers)))

        def hook(_m: Any, _i: Any, out: Any) -> None:
            number = next(calls)
            for name, tensor, width in zip(("q_rope", "k_rope"), out, (attention.q_size, attention.kv_size), strict=True):
                keep(key(number, name), heads_flat(tensor, width))

        attention.rotary_emb.register_forward_hook(hook)

    layers = model.model.layers
    for number, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        q_width, kv_width = attention.q_size, attention.kv_size

        def tap_heads(module: Any, name: str, width: int) -> None:
            module.register_forward_hook(lambda _m, _i, out: keep(name, heads_flat(out, width)))

        def tap_mlp_norm(_m: Any, _i: Any, out: Any, number: int = number) -> None:
            keep(key(number, "mlp_norm"), out[0])
            keep(key(number, "residual"), out[1])

        tap(layer.input_layernorm, key(number, "attn_norm"))
        tap(attention.qkv_proj, key(number, "qkv"))
        if hasattr(attention, "q_norm"):
            tap_heads(attention.q_norm, key(number, "q_norm"), q_width)
            tap_heads(attention.k_norm, key(number, "k_norm"), kv_width)
        tap_heads(attention.attn, key(number, "attention"), q_width)
        tap(attention.o_proj, key(number, "o"))
        layer.post_attention_layernorm.register_forward_hook(tap_mlp_norm)
        tap(mlp.gate_up_proj, key(number, "gate_up"))
        tap(mlp.act_fn, key(number, "swiglu"))
        tap(mlp.down_proj, key(number, "down"))
    tap_rope(layers[0].self_attn)
    tap(model.model.norm, FINAL_NORM)
    tap(model.logits_processor, LOGITS)


def main(argv: list[str]) -> int:
    """Record as a child process of `jetrl flow`; argv: model directory, job file (JSON), output file."""
    parser = argparse.ArgumentParser()
    for name in ("model", "job", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args(argv)
    job = json.loads(args.job.read_text())
    torch.save(record(args.model, **job), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
