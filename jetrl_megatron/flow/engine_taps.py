"""Record what every operator of a vLLM engine gives: one prompt after the other, prefill and decoding.

Enters: a Hugging Face directory and a job. Leaves: one file for `actor_taps`: the tokens of every sequence and, by operator, outputs
[tokens, width] in the order in which the tokens entered. The engine has the arguments of a server that decide numbers
(`compat.engine_numerics`); unlike a server it runs eagerly, so that hooks are called, and one sequence at a time without a prefix cache, so
that a row is a token. Needs vLLM, in a process without another process group.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.flow.operators import FINAL_NORM, LOGITS, key
from jetrl_megatron.rollout.compat import OperatorModules, engine_numerics, operator_modules, prepare_device

Recorded = dict[str, list[Tensor]]


def record(model_dir: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each prompt `tokens` (prompt and drawn), `num_prompt`, `logprobs` of the drawn and `outputs` (key -> [n, width]).

    job: `prompts` (token ids), `new_toks`, `max_model_len`, `memory_share` (of the GPU), `temperature`, `seed`.
    """
    from vllm import LLM, SamplingParams

    prepare_device()
    llm = LLM(
        model=str(model_dir),
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        max_num_batched_tokens=job["max_model_len"],
        seed=0,
        enable_prefix_caching=False,
        gpu_memory_utilization=job["memory_share"],
        **engine_numerics(torch.cuda.is_available(), graph_seqs=0),
    )
    store: Recorded = {}
    llm.apply_model(lambda model: _tap(operator_modules(model), store))
    # A minimum of tokens would mask the end of sequence out of the distribution.
    params = SamplingParams(temperature=job["temperature"], seed=job["seed"], max_tokens=job["new_toks"], ignore_eos=True, logprobs=0)
    sequences = []
    for prompt in job["prompts"]:
        store.clear()
        drawn = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0]
        assert drawn.logprobs is not None
        logprobs = [step[token].logprob for token, step in zip(drawn.token_ids, drawn.logprobs, strict=True)]
        outputs = {name: torch.cat(parts).cpu() for name, parts in store.items()}
        tokens = [*prompt, *drawn.token_ids]
        sequences.append({"tokens": tokens, "num_prompt": len(prompt), "logprobs": logprobs, "outputs": outputs})
    return sequences


def _tap(modules: OperatorModules, store: Recorded) -> None:
    """Hook every operator; what a hook gets is copied at once, because the engine works in place."""

    def keep(name: str, tensor: Tensor, width: int | None = None) -> None:
        store.setdefault(name, []).append(tensor.detach().reshape(-1, width or tensor.shape[-1]).clone())

    def after(module: Any, then: Callable[[Any], None]) -> None:
        module.register_forward_hook(lambda _module, _inputs, out: then(out))

    def first(name: str, width: int | None = None) -> Callable[[Any], None]:
        return lambda out: keep(name, out[0] if isinstance(out, tuple) else out, width)

    def second(name: str) -> Callable[[Any], None]:
        return lambda out: keep(name, out[1])

    for number, layer in enumerate(modules.layers):
        for name, (module, width) in layer.items():
            after(module, first(key(number, name), width))
        after(layer["mlp_norm"][0], second(key(number, "residual")))
    turn = itertools.cycle(range(len(modules.layers)))

    def rope(out: Any) -> None:
        """All layers share one rope: its n-th call in a forward is that of layer n."""
        number = next(turn)
        for name, tensor, width in zip(("q_rope", "k_rope"), out, modules.rope_widths, strict=True):
            keep(key(number, name), tensor, width)

    after(modules.rope, rope)
    after(modules.final_norm, first(FINAL_NORM))
    after(modules.logits, first(LOGITS))


def main(argv: list[str]) -> int:
    """Record as a child process of `jetrl flow`; argv: model directory, job file (JSON), output file."""
    parser = argparse.ArgumentParser()
    for name in ("model", "job", "out"):
        parser.add_argument(name, type=Path)
    args = parser.parse_args(argv)
    torch.save(record(args.model, json.loads(args.job.read_text())), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
