"""One vLLM engine in a process of its own, on one directory: it goes on with a sentence and scores token sequences."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.rollout.compat import engine_environment, engine_numerics
from jetrl_megatron.rollout.vllm_plugin import registered

SENTENCE = "The capital of France is"


def ask(model_dir: Path, sequences: list[list[int]], scratch: Path) -> dict[str, Any]:
    """Load a directory and nothing else; returns the greedy text behind SENTENCE and each sequence's log-probs from its second token on."""
    request, answer = scratch / "request.json", scratch / "answer.json"
    request.write_text(json.dumps({"model": str(model_dir), "sequences": sequences}))
    # Outside the repository and without a network, so that nothing but the directory can help.
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env |= engine_environment(torch.cuda.is_available(), power_of_two_scales=False)
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")])
    words = [sys.executable, "-W", "ignore", "-m", "tests.vllm.offline", str(request), str(answer)]
    done = subprocess.run(words, env=env, cwd=scratch, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(answer.read_text())


def _main(request: Path, answer: Path) -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(request.read_text())
    numerics = engine_numerics(torch.cuda.is_available(), graph_seqs=0)
    engine = LLM(model=asked["model"], enforce_eager=True, max_model_len=256, max_num_seqs=4, **numerics)
    assert registered(), "the engine does not run the actor's operators"
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    text = engine.generate(SENTENCE, greedy)[0].outputs[0].text
    score = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scored = engine.generate([{"prompt_token_ids": ids} for ids in asked["sequences"]], score)
    rows = [
        [found[token].logprob for token, found in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
        for ids, out in zip(asked["sequences"], scored, strict=True)
    ]
    answer.write_text(json.dumps({"text": text, "logprobs": rows}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
