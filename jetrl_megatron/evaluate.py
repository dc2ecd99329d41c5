"""`jetrl eval MODEL --data NAME_OR_FILE`: pass@1, avg@k and pass@k of a model with the embedded engine.

Enters: a run directory (its exported `hf/` is read) or a Hugging Face directory, data sources, recipe keys. Leaves: one line of numbers
for each source. A run directory brings its recipe, so prompts are formatted and precision chosen as in training; a bare HF directory
takes the base recipe in BF16 unless `precision.arm` says otherwise. One process evaluates, so the layout is TP1 PP1.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jetrl_megatron.config import Engine, ModelConfig, ParallelConfig, Recipe
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop.held_out import evaluate
from jetrl_megatron.loop.setup import build_actor, load_held_out, open_session

_READ = ("data.", "eval.", "precision.", "reward.")
"""Sections whose keys an evaluation reads."""
_ALSO_READ = ("model.tokenizer", "rollout.max_new_toks", "rollout.max_batch_seqs", "run.seed", "run.deterministic")
_NAMED_ELSEWHERE = {
    "data.train": "an evaluation trains on nothing",
    "data.eval": "name the data with --data",
    "data.max_prompts": "the limit of an evaluation is data.max_eval_prompts",
}


def recipe_for(model: Path, data: str, overrides: list[str], scratch: Path) -> Recipe:
    """Return the recipe under which `model` is evaluated on `data`.

    Args:
        model: a run directory or an HF directory.
        data: one source, as in `data.eval`.
        overrides: `key=value` words.
        scratch: a directory for what a session writes.

    Raises:
        ValueError: when `model` is neither, or a run without an export, and for an override that an evaluation would not read.
    """
    if not model.is_dir():
        raise ValueError(f"{model} is no directory; give a run directory or a Hugging Face directory")
    own = model / "recipe.yaml"
    if own.exists():
        recipe, weights = load_recipe(own, overrides), model / "hf"
        if not weights.is_dir():
            raise ValueError(f"run {model} has no hf/ yet: let it finish with run.export_hf=true, or give a Hugging Face directory")
    elif (model / "config.json").exists():
        bare = scratch / "eval.yaml"
        bare.write_text("precision: {arm: bf16}\n")
        recipe, weights = load_recipe(bare, overrides), model
    else:
        raise ValueError(f"{model} holds neither recipe.yaml (a run) nor config.json (a Hugging Face directory)")
    keys = [word.partition("=")[0] for word in overrides]
    _refuse_unread(keys, model)
    # An export carries the tokenizer that its run trained with, wherever that came from.
    tokenizer = recipe.model.tokenizer if "model.tokenizer" in keys else ""
    return replace(
        recipe,
        model=ModelConfig(path=str(weights), tokenizer=tokenizer),
        parallel=ParallelConfig(),
        data=replace(recipe.data, train=(), eval=(data,)),
        run=replace(recipe.run, dir=str(scratch / "session"), tensorboard=False, wandb=False),
        rollout=replace(recipe.rollout, engine=Engine.local, max_staleness=0),
        grpo=replace(recipe.grpo, kl_coef=0.0),
    )


def _refuse_unread(keys: Sequence[str], model: Path) -> None:
    """Raise ValueError for an override that would change nothing."""
    for key in keys:
        if key in _NAMED_ELSEWHERE or not (key.startswith(_READ) or key in _ALSO_READ):
            why = _NAMED_ELSEWHERE.get(key, f"the weights are those of {model}, computed by one process with the embedded engine")
            raise ValueError(
                f"command line: jetrl eval does not read {key}: {why}. It reads {', '.join(name + '*' for name in _READ)}, "
                f"{', '.join(_ALSO_READ)}; remove the word"
            )


def main(args: argparse.Namespace) -> int:
    """Evaluate `args.model` on every source of `args.data` and print one line each; returns the exit code.

    Every source is read and checked before the model is loaded, which happens once.

    Args:
        args: `model` (path), `data` (list of sources), `overrides` (`key=value` words), `json` (one object a line).

    Raises:
        ValueError: for a model, source or key that is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_for(Path(args.model), args.data[0], args.overrides, Path(folder))
        session = open_session(recipe, ["jetrl", "eval"], evaluate_only=True)
        try:
            assert session.eval_prompts is not None
            others = [replace(recipe, data=replace(recipe.data, eval=(data,))) for data in args.data[1:]]
            prompts = [session.eval_prompts, *(load_held_out(other, session.tokenizer, session.arch) for other in others)]
            build_actor(session, session.source_dir)
            for data, held_out in zip(args.data, prompts, strict=True):
                values = evaluate(session, held_out)
                dropped = {name: count for name, count in held_out.dropped.items() if count}
                record = {"model": str(args.model), "data": data, "arm": recipe.precision.arm.value, **values, "dropped": dropped}
                print(json.dumps(record, allow_nan=False) if args.json else _line(record), flush=True)
        finally:
            session.close()
    return 0


def _line(record: dict[str, object]) -> str:
    k = f"{record['samples']:.0f}"
    text = f"{record['data']}  pass@1 {record['pass@1']:.4f}  avg@{k} {record['avg@k']:.4f}  pass@{k} {record['pass@k']:.4f}"
    return f"{text}  prompts {record['num_prompts']:.0f}  length {record['response_toks']:.1f}  arm {record['arm']}"
