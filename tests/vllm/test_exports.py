"""vLLM on exported directories alone: the real SmolLM2 in BF16 and in block FP8 answers sensibly and scores as the actor does.

The engine runs the actor's norms, and on a CPU its FP8 linears, so engine and actor differ by what attention, rope and the BF16 lm_head
round, and by what quantising activations behind such a rounding makes of it. That noise is as large as the effect of the quantising,
so the bound cannot tell which linear ran: `offline.py` asserts that, and `test_flow.py` compares operators one by one.
"""

import shutil

import pytest
import torch

from conversion.convert import Target, convert
from conversion.layout import ParallelLayout
from jetrl_megatron.config import Arm, PrecisionConfig
from tests.dist.test_smollm2 import PROMPT_TOKS, samples_of
from tests.smollm2 import exported, needs_smollm2
from tests.unit.actor.hf_reference import hf_logprobs
from tests.unit.actor.single_rank import completion_logprobs, single_rank_actor
from tests.vllm.offline import ask

pytestmark = needs_smollm2

NOISE = 0.12
"""Mean |difference| in nats between the FP8 forwards of engine and actor."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Exports through two tensor-parallel layouts, alone in a directory of their own: the sources and shards are gone."""
    root = tmp_path_factory.mktemp("exports")
    for form, tp in (("published", 3), ("aligned", 2)):
        convert(exported(form, tmp_path_factory), root / "ranks", Target(kind="megatron", layout=ParallelLayout(tp=tp, pp=2)))
        convert(root / "ranks", root / form, Target(kind="hf"))
        shutil.rmtree(root / "ranks")
    convert(root / "aligned", root / "ranks", Target(kind="megatron", layout=ParallelLayout(tp=2, pp=3), cast="fp32"))
    convert(root / "ranks", root / "fp8", Target(kind="hf"))
    shutil.rmtree(root / "ranks")
    convert(root / "fp8", root / "dequantised", Target(kind="hf", cast="bf16"))
    return root


def score(directory, samples, tmp_path):
    """Return the answer to a question, and the log-probs of all completions in one tensor."""
    said = ask(directory, [[*s.prompt.token_ids, *s.completion.token_ids] for s in samples], tmp_path)
    return said["text"], torch.tensor([p for row in said["logprobs"] for p in row[PROMPT_TOKS - 1 :]])


def actor_logprobs(directory, precision, samples):
    with single_rank_actor(directory, precision) as actor:
        return torch.tensor([value for row in completion_logprobs(actor, samples) for value in row])


def distance(a, b):
    return float((a - b).abs().mean())


@pytest.mark.parametrize("form", ["published", "aligned"])
def test_a_bf16_export_alone_answers_and_scores_like_hugging_face(directories, tmp_path, form):
    samples = samples_of(directories / form)
    text, logprobs = score(directories / form, samples, tmp_path)
    assert "Paris" in text
    exact, own = (hf_logprobs(directories / form, samples, dtype) for dtype in (torch.float32, torch.bfloat16))
    print(f"{form}: vllm-hf32 {distance(logprobs, exact):.4f} hf16-hf32 {distance(own, exact):.4f}")
    # As for the actor: at most 1.5 times as far from Hugging Face in FP32 as Hugging Face in BF16 is.
    assert distance(logprobs, exact) <= 1.5 * distance(own, exact)


def test_an_fp8_export_alone_answers_and_scores_as_the_actor_does(directories, tmp_path):
    samples = samples_of(directories / "aligned")
    text, logprobs = score(directories / "fp8", samples, tmp_path)
    assert "Paris" in text
    fp8 = actor_logprobs(directories / "aligned", PrecisionConfig(), samples)
    w8a16 = actor_logprobs(directories / "dequantised", PrecisionConfig(arm=Arm.bf16), samples)
    bf16 = actor_logprobs(directories / "aligned", PrecisionConfig(arm=Arm.bf16), samples)
    found = {"fp8": distance(logprobs, fp8), "w8a16": distance(logprobs, w8a16), "bf16": distance(logprobs, bf16)}
    print(f"mean |vLLM - actor|, nats: {found}; actor fp8 - w8a16: {distance(fp8, w8a16):.4f}, w8a16 - bf16: {distance(w8a16, bf16):.4f}")
    assert found["fp8"] <= NOISE
