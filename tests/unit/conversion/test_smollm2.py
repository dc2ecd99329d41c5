"""A real pretrained checkpoint both ways: SmolLM2-135M-Instruct as published and aligned to 128; also through torch_dist."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion.architecture import ModelArchitecture
from conversion.checkpoint import open_checkpoint
from conversion.convert import Target, convert
from conversion.layout import ParallelLayout, working_tp_degrees
from conversion.verify import first_difference
from tests.smollm2 import exported, needs_smollm2
from tests.unit.conversion.directories import as_bytes

pytestmark = needs_smollm2


@pytest.fixture(scope="module", params=["published", "aligned"])
def model(request, tmp_path_factory):
    path = exported(request.param, tmp_path_factory)
    return path, ModelArchitecture.from_hf_directory(path)


def test_every_legal_layout_and_back(model, tmp_path):
    path, arch = model
    degrees = working_tp_degrees(arch, "k_complete", fp8=False)
    assert degrees == ((1, 3) if arch.hidden_size == 576 else (1, 2, 4))
    for tp in degrees:
        layout = ParallelLayout(tp=tp, pp=2, vpp=3)
        convert(path, tmp_path / f"m{tp}", Target(kind="megatron", layout=layout))
        convert(tmp_path / f"m{tp}", tmp_path / f"hf{tp}", Target(kind="hf"))
        assert as_bytes(tmp_path / f"hf{tp}") == as_bytes(path)


def test_through_a_torch_dist_checkpoint_and_back(model, tmp_path):
    path, _ = model
    convert(path, tmp_path / "dist", Target(kind="torch_dist"))
    convert(tmp_path / "dist", tmp_path / "hf", Target(kind="hf"))
    assert as_bytes(tmp_path / "hf") == as_bytes(path)


def test_exported_directory_alone_generates_the_same_text(model, tmp_path):
    path, arch = model
    convert(path, tmp_path / "m", Target(kind="megatron", layout=ParallelLayout(tp=3 if arch.hidden_size == 576 else 4)))
    convert(tmp_path / "m", tmp_path / "hf", Target(kind="hf"))
    texts = []
    for directory in (path, tmp_path / "hf"):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        causal = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        tokens = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        texts.append(tokenizer.decode(causal.generate(**tokens, max_new_tokens=12, do_sample=False)[0]))
    assert texts[0] == texts[1] and "Paris" in texts[1]


@pytest.mark.parametrize("form", ["aligned", "aligned128"])
def test_widened_forms_compute_what_the_published_model_does(form, tmp_path_factory):
    logits = []
    for directory in (exported("published", tmp_path_factory), exported(form, tmp_path_factory)):
        causal = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokens = AutoTokenizer.from_pretrained(directory)("If a train travels 60 miles in 2 hours, its speed is 30", return_tensors="pt")
        logits.append(causal(**tokens).logits)
    # Norm weights times sqrt(3 / 4), and q's times sqrt(2), are rounded to BF16: one part in 512 of each.
    assert (logits[0] - logits[1]).abs().mean() < 0.02 * logits[0].std()


def test_fp8_needs_the_aligned_form(model, tmp_path):
    path, arch = model
    if arch.hidden_size == 576:
        with pytest.raises(ValueError, match=r"q_proj rows 576 / tp 1 = 576.*TP degrees that work: none"):
            convert(path, tmp_path / "fp8", Target(kind="megatron", layout=ParallelLayout(), cast="fp32"))
        return
    convert(path, tmp_path / "fp8", Target(kind="hf", cast="fp32"))
    convert(tmp_path / "fp8", tmp_path / "m", Target(kind="megatron", layout=ParallelLayout(tp=2, pp=2)))
    convert(tmp_path / "m", tmp_path / "back", Target(kind="hf"))
    assert as_bytes(tmp_path / "back") == as_bytes(tmp_path / "fp8")
    assert first_difference(open_checkpoint(tmp_path / "m"), open_checkpoint(tmp_path / "fp8")) is None
