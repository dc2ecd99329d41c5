"""`jetrl flow RECIPE`: every operator of the rollout engine against the actor's, and whether the two flows are one.

Enters: a recipe with the model, the prompts and the precision of a run whose rollout is vLLM's. Leaves: a table, with `--json` one object
a line. Exit code 1 where an operator differs in the view `alone`; `in_place` shows what that adds up to. Two processes, one after the
other, because both engines want the default process group: the first records a real vLLM engine on the weights that the actor would push,
the second feeds what it recorded to the actor's training forward. One device, TP1.
"""

import argparse
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conversion.architecture import ModelArchitecture
from conversion.convert import Target, convert
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import local_device
from jetrl_megatron.choices import at_least
from jetrl_megatron.config import Engine, LinearPrecision, ParallelConfig, Recipe, ScaleFormat
from jetrl_megatron.data.prompts import load_prompts
from jetrl_megatron.data.tokenizer import load_tokenizer
from jetrl_megatron.flow.actor_taps import Differences, compare
from jetrl_megatron.flow.operators import FINAL_NORM, LAYER_OPERATORS, LOGITS, LOGPROB
from jetrl_megatron.grpo.rewards import gold_parses
from jetrl_megatron.load import load_recipe
from jetrl_megatron.rollout.compat import check_engine, engine_environment

_LOG = logging.getLogger(__name__)
_VIEWS, _PHASES = ("alone", "in_place"), ("prefill", "decode")
_READ = ("model.path", "model.tokenizer", "precision.", "data.", "reward.", "run.seed", "rollout.temperature", "rollout.max_new_toks")
_READ_BY_ENGINE = ("rollout.vllm.gpu_memory_utilization",)
Sequences = list[dict[str, Any]]


def main(args: argparse.Namespace) -> int:
    """Run the comparison; returns its exit code.

    args: `recipe` (path), `overrides` (`key=value` words), `prompts`, `new_toks` (numbers), `json` (one object an operator).

    Raises:
        ValueError: for a wrong number, a word that this command does not read, or a machine that cannot run the engine.
    """
    at_least("--prompts", args.prompts, 1)
    at_least("--new-toks", args.new_toks, 1)
    _refuse_unread([word.partition("=")[0] for word in args.overrides])
    given = load_recipe(args.recipe, args.overrides)
    recipe = replace(given, parallel=ParallelConfig(), rollout=replace(given.rollout, engine=Engine.local, max_staleness=0))
    if not recipe.model.path:
        raise ValueError("model.path is empty; jetrl flow compares engines on a Hugging Face directory: set model.path=DIR")
    check_engine()
    with tempfile.TemporaryDirectory(prefix="jetrl-flow-") as folder:
        sequences = _recorded(recipe, Path(folder), args.prompts, args.new_toks)
    if sequences is None:
        return 1
    rows = [row for view, found in zip(_VIEWS, _compared(recipe, sequences), strict=True) for row in _rows(view, found)]
    assert rows, "nothing was compared"
    _print(rows, args.json)
    return int(any(row["differing"] for row in rows if row["view"] == "alone"))


def _refuse_unread(keys: list[str]) -> None:
    """Raise ValueError for an override that would change nothing."""
    for key in keys:
        if not (key.startswith(_READ) or key in _READ_BY_ENGINE):
            raise ValueError(
                f"command line: jetrl flow does not read {key}: it runs both engines on one device, one sequence at a time. It reads "
                f"{', '.join((*_READ, *_READ_BY_ENGINE))}; remove the word"
            )


def _recorded(recipe: Recipe, folder: Path, num_prompts: int, new_toks: int) -> Sequences | None:
    """Record the engine on the bytes that the actor would push; None where the engine ended with an error, which is said."""
    source = Path(recipe.model.path)
    tokenizer = load_tokenizer(Path(recipe.model.tokenizer or source))
    data = replace(recipe.data, max_prompts=num_prompts)
    prompts = [list(p.token_ids) for p in load_prompts(data, "train", tokenizer, partial(gold_parses, cfg=recipe.reward)).prompts]
    arch = ModelArchitecture.from_hf_directory(source)
    longest = max(map(len, prompts)) + new_toks
    if longest > arch.max_positions:
        raise ValueError(f"{longest} tokens exceed the model's context of {arch.max_positions}: lower --new-toks or data.max_prompt_toks")
    scales = recipe.precision.rollout_scale_format or recipe.precision.scale_format
    model = source
    if recipe.precision.rollout_linear is LinearPrecision.fp8:
        model = folder / "model"
        convert(source, model, Target(kind="hf", cast=scales.value, bf16_layers=tuple(recipe.precision.bf16_layers)))
    job, out = folder / "job.json", folder / "recorded.pt"
    share = recipe.rollout.vllm.gpu_memory_utilization
    asked = {"prompts": prompts, "new_toks": new_toks, "max_model_len": arch.max_positions, "memory_share": share}
    job.write_text(json.dumps({**asked, "temperature": recipe.rollout.temperature, "seed": recipe.run.seed}))
    environment = os.environ | engine_environment(torch.cuda.is_available(), scales is ScaleFormat.ue8m0)
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", "jetrl_megatron.flow.engine_taps", str(model), str(job), str(out)]
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        _LOG.error(
            "the engine ended with exit code %d, its log is above; where its memory is short, change rollout.vllm.gpu_memory_utilization "
            "(now %g) or lower --prompts, --new-toks",
            done.returncode,
            share,
        )
        return None
    return list(torch.load(out))


def _compared(recipe: Recipe, sequences: Sequences) -> tuple[Differences, Differences]:
    """Return the views `alone` and `in_place`."""
    device = local_device()
    ranks = parallel_state.initialize(recipe.parallel, device)
    source, temperature = Path(recipe.model.path), recipe.rollout.temperature
    try:
        actor = Actor(recipe, ModelArchitecture.from_hf_directory(source), source, ranks, device)
        alone, in_place = (compare(actor, sequences, temperature=temperature, forced=forced) for forced in (True, False))
        return alone, in_place
    finally:
        parallel_state.destroy()


def _rows(view: str, found: Differences) -> list[dict[str, Any]]:
    rows = []
    for operator, phase in itertools.product((*LAYER_OPERATORS, FINAL_NORM, LOGITS, LOGPROB), _PHASES):
        difference = found.get((operator, phase))
        if difference is None or not difference.elements:
            continue
        row: dict[str, Any] = {"view": view, "operator": operator, "phase": phase}
        row |= {"elements": difference.elements, "differing": difference.differing, "share": difference.differing / difference.elements}
        row |= {"mean": difference.total / difference.elements, "largest": difference.largest, "first_layer": difference.first_layer}
        rows.append(row)
    return rows


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    print("| view | operator | phase | differing | of | mean | largest | first layer |\n|" + " --- |" * 8)
    for row in rows:
        first = "-" if row["first_layer"] < 0 else row["first_layer"]
        numbers = (row["differing"], row["elements"], f"{row['mean']:.3g}", f"{row['largest']:.3g}", first)
        print("| " + " | ".join(map(str, (row["view"], row["operator"], row["phase"], *numbers))) + " |")
