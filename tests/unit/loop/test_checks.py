"""Everything that a long run would else stumble over late is refused before its first step, by name and with the way out."""

from dataclasses import replace
from pathlib import Path

import pytest

from conversion.architecture import ModelArchitecture
from jetrl_megatron.config import Arm, Engine, EvalConfig, ParallelConfig, PrecisionConfig, Recipe, RolloutConfig
from jetrl_megatron.contracts import Prompt
from jetrl_megatron.data.prompts import PromptSet
from jetrl_megatron.loop.checks import (
    check_checkpoints_are_there,
    check_lengths,
    check_number_of_prompts,
    check_prompts,
    check_records_are_there,
    check_stop_ids,
    warn_embedded_engine,
)
from jetrl_megatron.loop.learn import refuse_broken_step
from jetrl_megatron.run.run_dir import RunDir
from tests.tiny_models import tiny_config

ARCH = ModelArchitecture.from_hf_config(tiny_config("qwen3").to_dict())


def prompt(*ids: int) -> Prompt:
    return Prompt(id="p0", token_ids=ids, text="", answer="", source="test")


def test_prompts_must_have_tokens_of_the_models_vocabulary():
    check_prompts([prompt(0, ARCH.vocab_size - 1)], ARCH)
    with pytest.raises(ValueError, match=r"p0 has no tokens.*model.tokenizer"):
        check_prompts([prompt()], ARCH)
    with pytest.raises(ValueError, match=r"token id 203, the model's vocabulary ends at 202"):
        check_prompts([prompt(ARCH.vocab_size)], ARCH)


@pytest.mark.parametrize("value", [99999, -1, "x", True])
def test_stop_ids_must_be_of_the_vocabulary(value):
    check_stop_ids((1, 2), ARCH)
    with pytest.raises(ValueError, match=r"eos_token_id.*generation_config.json"):
        check_stop_ids((1, value), ARCH)


def test_lengths_are_refused_before_the_first_step():
    recipe = replace(Recipe(), rollout=RolloutConfig(max_new_toks=100), parallel=ParallelConfig(micro_batch_toks=256))
    check_lengths([prompt(*[1] * 156)], [prompt(1)], ARCH, recipe)
    with pytest.raises(ValueError, match=r"157 tokens.*parallel.micro_batch_toks 256; raise that"):
        check_lengths([prompt(*[1] * 157)], [], ARCH, recipe)
    with pytest.raises(ValueError, match=r"eval.max_new_toks is 512.*context of 512"):
        check_lengths([prompt(1)], [prompt(1)], ARCH, replace(recipe, eval=EvalConfig(max_new_toks=512)))
    small = replace(recipe, rollout=RolloutConfig(max_new_toks=300))
    check_lengths([], [prompt(1)], ARCH, small)  # an evaluation packs no micro-batches
    with pytest.raises(ValueError, match=r"1 tokens, rollout.max_new_toks is 300"):
        check_lengths([prompt(1)], [prompt(1)], ARCH, small)


def test_a_step_may_not_ask_for_more_prompts_than_there_are():
    prompts = PromptSet(prompts=tuple(prompt(i) for i in range(5)), targets={}, dropped={"too_long": 2}, fingerprint="f")
    check_number_of_prompts(prompts, replace(Recipe(), rollout=RolloutConfig(prompts_per_step=5)))
    with pytest.raises(ValueError, match=r"prompts_per_step is 6, but data.train has 5 prompts \(left out: \{'too_long': 2\}\); lower"):
        check_number_of_prompts(prompts, replace(Recipe(), rollout=RolloutConfig(prompts_per_step=6)))


def test_records_without_checkpoints_are_not_started_over(tmp_path: Path):
    run_dir = RunDir(tmp_path)
    check_checkpoints_are_there(run_dir, save_every=2)
    run_dir.records.write_text("".join(f'{{"kind": "step", "step": {s}}}\n' for s in (1, 2)))
    check_checkpoints_are_there(run_dir, save_every=2)
    run_dir.records.write_text('{"kind": "step", "step": 3}\n')
    with pytest.raises(ValueError, match=r"steps up to 3.*holds no checkpoint"):
        check_checkpoints_are_there(run_dir, save_every=2)


@pytest.mark.parametrize(
    ("steps", "lacks"), [((), "3 of the 3 steps .* is step 1"), ((1, 2), "is step 3"), ((1, 3, 4), "1 of .* is step 2")]
)
def test_a_checkpoint_without_its_records_is_not_gone_on_from(tmp_path: Path, steps, lacks):
    run_dir = RunDir(tmp_path)
    run_dir.records.write_text("".join(f'{{"kind": "step", "step": {s}}}\n' for s in (1, 2, 3, 4)))
    check_records_are_there(run_dir, 3)
    run_dir.records.write_text('{"kind": "eval", "step": 3}\n' + "".join(f'{{"kind": "step", "step": {s}}}\n' for s in steps))
    with pytest.raises(ValueError, match=rf"records.jsonl lacks {'' if lacks[0].isdigit() else '.*'}{lacks}: put the file back, .*run.dir"):
        check_records_are_there(run_dir, 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_refused_by_name(value):
    refuse_broken_step({"loss": 1.0, "count": 3})
    with pytest.raises(RuntimeError, match="grad_norm"):
        refuse_broken_step({"loss": 1.0, "grad_norm": value})


def test_the_embedded_engine_on_a_gpu_is_named_as_not_exact(caplog):
    local, pool = Recipe(), Recipe(rollout=RolloutConfig(engine=Engine.vllm_pool))
    warn_embedded_engine(local, on_cuda=False)
    warn_embedded_engine(pool, on_cuda=True)
    warn_embedded_engine(replace(local, precision=PrecisionConfig(arm=Arm.bf16)), on_cuda=True)
    assert not caplog.records
    warn_embedded_engine(local, on_cuda=True)
    assert "the mismatch of arm jetrl is not 0" in caplog.text and "vllm_pool" in caplog.text
