"""What Hugging Face's own model says of the same directory and the same completions."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from jetrl_megatron.contracts import Sample


def hf_logprobs(hf_dir: Path, samples: Sequence[Sample], dtype: torch.dtype) -> torch.Tensor:
    """The HF model's log-probs of every completion token, one sequence at a time; all in one [n] float32."""
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype).eval()
    found = []
    with torch.no_grad():
        for s in samples:
            ids = torch.tensor([[*s.prompt.token_ids, *s.completion.token_ids]])
            logp = model(input_ids=ids).logits[0].float().log_softmax(-1)
            start = len(s.prompt.token_ids)
            found.append(logp[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1))
    return torch.cat(found)
