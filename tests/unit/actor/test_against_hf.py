"""Log-probs of the actor's training forward against the Hugging Face model of the same directory, in BF16.

Bound: both round to BF16 after every operator but accumulate in another precision (float32 there, float64 here), and the residual stream
of four random layers amplifies it. Measured on these models: mean |d| 0.008 to 0.011 nats against an FP32 copy of the HF model, while the
HF BF16 model itself is 0.007 to 0.011 away from that copy. So the actor must be within 1.5 times the distance that HF's own BF16 has.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from jetrl_megatron.config import Arm, PrecisionConfig
from tests.dist.actor_run import batches_of, fixed_samples
from tests.tiny_models import write_tiny_model
from tests.unit.actor.single_rank import single_rank_actor

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def hf_logprobs(hf_dir: Path, samples: list, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the HF model's log-probs of each sample's completion, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=dtype).eval()
    found = []
    with torch.no_grad():
        for s in samples:
            ids = torch.tensor([[*s.prompt.token_ids, *s.completion.token_ids]])
            logp = model(input_ids=ids).logits[0].float().log_softmax(-1)
            start = len(s.prompt.token_ids)
            found.append(logp[start - 1 : -1].gather(1, ids[0, start:, None]).squeeze(1))
    return found


def actor_logprobs(hf_dir: Path, vocab: int) -> tuple[list, list[torch.Tensor]]:
    """Return the samples and the actor's packed log-probs of each."""
    from jetrl_megatron.grpo.batch import unpack_per_position

    with single_rank_actor(hf_dir, PrecisionConfig(arm=Arm.bf16)) as actor:
        samples = fixed_samples(vocab)
        batches = batches_of(samples, actor, 1024)
        found: dict[int, torch.Tensor] = {}
        for (logp, _), batch in zip(actor.logprobs(batches), batches, strict=True):
            found.update(unpack_per_position(logp, batch, samples))
    return samples, [found[i] for i in range(len(samples))]


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": False}), ("qwen2", {}), ("qwen3", {})],
    ids=["llama-llama3rope-tied", "llama-linear-untied", "qwen2", "qwen3"],
)
def test_packed_logprobs_are_as_close_to_fp32_as_hf_bf16_is(tmp_path: Path, family: str, changes: dict) -> None:
    hf_dir = write_tiny_model(tmp_path / "hf", family, **changes)
    samples, ours = actor_logprobs(hf_dir, 203)
    exact = torch.cat(hf_logprobs(hf_dir, samples, torch.float32))
    theirs = torch.cat(hf_logprobs(hf_dir, samples, torch.bfloat16))
    own = (torch.cat(ours) - exact).abs().mean()
    assert exact.std() > 0.5, "the models must be far from uniform for this to mean anything"
    print(family, "ours", float(own), "theirs", float((theirs - exact).abs().mean()))
    assert own <= 1.5 * (theirs - exact).abs().mean()
