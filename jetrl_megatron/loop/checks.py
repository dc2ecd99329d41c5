"""What prompts, tokenizer and model must agree on, checked before the first step: what fails here would else fail hours into a run.

Enters: loaded prompts, stop ids, the architecture, the recipe. Leaves: nothing, or ValueError naming the prompt or id, the limit and
the way out. Also the checks that a run directory with steps in its records still has its checkpoints, and the other way round; and a
warning of old tokens that are trained on as if they were fresh.
"""

import logging
from collections.abc import Iterable, Sequence

from conversion.architecture import ModelArchitecture
from jetrl_megatron.config import Arm, Correction, Engine, Recipe
from jetrl_megatron.contracts import Prompt
from jetrl_megatron.data.prompts import PromptSet
from jetrl_megatron.rollout.engine import check_vocabulary
from jetrl_megatron.run.records import read_records
from jetrl_megatron.run.run_dir import RunDir

_LOG = logging.getLogger(__name__)


def check_prompts(prompts: Iterable[Prompt], arch: ModelArchitecture) -> None:
    """Raise ValueError for a prompt without tokens and for a token id that the model has no embedding of."""
    for prompt in prompts:
        if not prompt.token_ids:
            raise ValueError(
                f"prompt {prompt.id} has no tokens: its question is empty, or the model directory holds no tokenizer; mend the row, or set "
                "model.tokenizer to a directory with one"
            )
        check_vocabulary(prompt, arch.vocab_size)


def check_stop_ids(stop_ids: Iterable[object], arch: ModelArchitecture) -> None:
    """Raise ValueError for an end-of-sequence id that is no id of the model's vocabulary."""
    for value in stop_ids:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < arch.vocab_size:
            raise ValueError(
                f"eos_token_id {value!r} is no token of a vocabulary of {arch.vocab_size}; mend it in generation_config.json or config.json"
            )


def check_lengths(train: Sequence[Prompt], held_out: Sequence[Prompt], arch: ModelArchitecture, recipe: Recipe) -> None:
    """Raise ValueError where the longest prompt and its completion exceed the model's context or a micro-batch."""
    new_toks = {
        "rollout.max_new_toks": recipe.rollout.max_new_toks,
        "eval.max_new_toks": recipe.eval.max_new_toks or recipe.rollout.max_new_toks,
    }
    for (key, limit), prompts in zip(new_toks.items(), (train, held_out), strict=True):
        longest = max((len(p.token_ids) for p in prompts), default=0)
        if longest + limit > arch.max_positions:
            raise ValueError(
                f"the longest prompt has {longest} tokens and {key} is {limit}; together they exceed the model's context of "
                f"{arch.max_positions}: lower {key} or data.max_prompt_toks"
            )
    longest = max((len(p.token_ids) for p in train), default=0)
    if train and longest + recipe.rollout.max_new_toks > recipe.parallel.micro_batch_toks:
        raise ValueError(
            f"the longest prompt has {longest} tokens, rollout.max_new_toks is {recipe.rollout.max_new_toks}: one sequence would not fit "
            f"into parallel.micro_batch_toks {recipe.parallel.micro_batch_toks}; raise that, or lower rollout.max_new_toks"
        )


def check_number_of_prompts(train: PromptSet, recipe: Recipe) -> None:
    """Raise ValueError where one step asks for more prompts than there are: it would be smaller than the recipe says."""
    wanted, there = recipe.rollout.prompts_per_step, len(train.prompts)
    if wanted > there:
        raise ValueError(
            f"rollout.prompts_per_step is {wanted}, but data.train has {there} prompts (left out: {dict(train.dropped)}); lower "
            "rollout.prompts_per_step, or name more data"
        )


def warn_uncorrected(recipe: Recipe) -> None:
    """Warn where tokens of older weights are trained on without importance weights: legal, and what the recipe says."""
    if recipe.rollout.max_staleness and recipe.grpo.correction is Correction.none:
        _LOG.warning(
            "rollout.max_staleness is %d and grpo.correction is none: tokens of older weights are trained on without truncated importance "
            "weights, as configured; grpo.correction=tis weighs them",
            recipe.rollout.max_staleness,
        )


def warn_embedded_engine(recipe: Recipe, on_cuda: bool) -> None:
    """Warn where the embedded engine decodes on a GPU: its attention there is another kernel than the training forward's."""
    if on_cuda and recipe.rollout.engine is Engine.local and recipe.precision.arm is Arm.jetrl:
        _LOG.warning(
            "rollout.engine is local on CUDA: it decodes with another attention kernel than the training forward, so the mismatch of arm "
            "jetrl is not 0; rollout.engine=vllm_pool or vllm_colocated decodes with the same one"
        )


def check_checkpoints_are_there(run_dir: RunDir, save_every: int) -> None:
    """Raise ValueError where the records tell of a save and no checkpoint is left: starting over would drop the records."""
    last = max((int(r["step"]) for r in read_records(run_dir.records) if r["kind"] == "step"), default=0)
    if last > save_every:
        raise ValueError(
            f"{run_dir.records} holds steps up to {last}, but {run_dir.checkpoints} holds no checkpoint: put them back, or remove "
            f"{run_dir.path} (or set another run.dir) to start over"
        )


def check_records_are_there(run_dir: RunDir, step: int) -> None:
    """Raise ValueError where records of steps up to the checkpoint of `step` are gone: each is on the disk before a checkpoint is."""
    there = {int(r["step"]) for r in read_records(run_dir.records) if r["kind"] == "step"}
    missing = [s for s in range(1, step + 1) if s not in there]
    if missing:
        raise ValueError(
            f"{run_dir.records} lacks {len(missing)} of the {step} steps before the checkpoint in {run_dir.checkpoints}, the first is step "
            f"{missing[0]}: put the file back, or set another run.dir to start over"
        )
