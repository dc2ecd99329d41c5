"""A real pretrained model through the actor: SmolLM2-135M-Instruct as published and aligned to 128, against Hugging Face's own model.

Bound as in tests/unit/actor/test_against_hf.py: the actor in BF16 is at most 1.5 times as far from HF in FP32 as HF in BF16 is.
"""

import pytest
import torch
from transformers import AutoTokenizer

from conversion.architecture import ModelArchitecture
from jetrl_megatron.config import Arm, PrecisionConfig
from jetrl_megatron.contracts import Completion, Prompt, Sample, SamplingParams
from tests.smollm2 import exported, needs_smollm2
from tests.unit.actor.hf_reference import hf_logprobs
from tests.unit.actor.single_rank import completion_logprobs, single_rank_actor
from tests.unit.rollout.drawing import differences, draw

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200), needs_smollm2]

SENTENCES = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "If a train travels 60 miles in 2 hours, its average speed is 30 miles per hour.",
    "def add(a, b):\n    return a + b\n",
    "Water boils at 100 degrees Celsius at sea level.",
]
PROMPT_TOKS = 3


@pytest.fixture(scope="module", params=["published", "aligned"])
def model_dir(request, tmp_path_factory):
    return exported(request.param, tmp_path_factory)


def samples_of(model_dir):
    """Each sentence: its first tokens as the prompt, the rest as the completion."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    samples = []
    for i, text in enumerate(SENTENCES):
        ids = tokenizer.encode(text)
        prompt = Prompt(id=f"s{i}", token_ids=tuple(ids[:PROMPT_TOKS]), text=text, answer="", source="test")
        rest = tuple(ids[PROMPT_TOKS:])
        n = len(rest)
        completion = Completion(
            prompt_id=prompt.id, sample_index=0, token_ids=rest, logprobs=(0.0,) * n, finish_reason="length", versions=(0,) * n
        )
        samples.append(Sample(prompt=prompt, completion=completion, reward=0.0, advantage=1.0, loss_mask=(1,) * n))
    return samples


def test_logprobs_are_as_close_to_fp32_as_hf_bf16_is(model_dir):
    samples = samples_of(model_dir)
    exact, theirs = (hf_logprobs(model_dir, samples, dtype) for dtype in (torch.float32, torch.bfloat16))
    with single_rank_actor(model_dir, PrecisionConfig(arm=Arm.bf16)) as actor:
        ours = torch.tensor([v for row in completion_logprobs(actor, samples) for v in row])
    assert -2.0 < exact.mean() < -0.5, "it must read English much better than by chance, -10.8"
    distance, own = (ours - exact).abs().mean(), (theirs - exact).abs().mean()
    assert 0 < own < 0.1
    assert distance <= 1.5 * own


def test_fp8_rollout_and_training_are_one_model(model_dir):
    if ModelArchitecture.from_hf_directory(model_dir).hidden_size == 576:
        refusal = pytest.raises(ValueError, match=r"q_proj rows 576 / tp 1 = 576.*multiple of the FP8 block size 128")
        with refusal, single_rank_actor(model_dir, PrecisionConfig()):
            pass
        return
    samples = samples_of(model_dir)[:2]
    with single_rank_actor(model_dir, PrecisionConfig()) as actor:
        prompts = [s.prompt for s in samples]
        completions = draw(actor, prompts, SamplingParams(max_new_toks=5))
        found = differences(actor, prompts, completions)
        assert found.numel() == 10 and found.max() == 0.0
        fp8 = torch.tensor([v for row in completion_logprobs(actor, samples) for v in row])
    bf16 = hf_logprobs(model_dir, samples, torch.bfloat16)
    assert 0.01 < (fp8 - bf16).abs().mean() < 0.5, "FP8 is another model than BF16, but still this one"
