"""What Hugging Face's own model says of the same directory and the same completions: log-probs, and gradients by its own autograd."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from jetrl_megatron.contracts import Sample


def hf_logprobs(hf_dir: Path, samples: Sequence[Sample], dtype: torch.dtype) -> torch.Tensor:
    """The HF model's log-probs of every completion token, one sequence at a time; all in one [n] float32."""
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype).eval()
    with torch.no_grad():
        return torch.cat([_logprobs(model, s) for s in samples])


def hf_gradients(hf_dir: Path, samples: Sequence[Sample], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The gradient of the advantage-weighted mean log-likelihood over all completion tokens, by HF name, in FP32."""
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype).eval()
    total = sum(len(s.completion.token_ids) for s in samples)
    loss = -sum(s.advantage * _logprobs(model, s).sum() for s in samples) / total
    loss.backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


def _logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.completion.token_ids]])
    logp = model(input_ids=ids).logits[0].float().log_softmax(-1)
    start = len(sample.prompt.token_ids)
    return logp[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1)
