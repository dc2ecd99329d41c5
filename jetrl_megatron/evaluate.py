"""`jetrl eval MODEL --data NAME_OR_FILE`: pass@1, avg@k and pass@k of a model with the embedded engine.

Enters: a run directory (its exported `hf/` is read) or a Hugging Face directory, data sources, recipe keys. Leaves: one line of numbers
for each source. A run directory brings its recipe, so prompts are formatted and precision chosen as in training; a bare HF directory
takes the base recipe in BF16 unless `precision.arm` says otherwise. One process evaluates, so the layout is TP1 PP1.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from jetrl_megatron.config import Engine, ModelConfig, ParallelConfig, Recipe
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop.held_out import evaluate
from jetrl_megatron.loop.setup import build_actor, open_session


def recipe_for(model: Path, data: str, overrides: list[str], scratch: Path) -> Recipe:
    """Return the recipe under which `model` is evaluated on `data`.

    Args:
        model: a run directory or an HF directory.
        data: one source, as in `data.eval`.
        overrides: `key=value` words.
        scratch: a directory for what a session writes.

    Raises:
        ValueError: when `model` is neither, or a run without an export.
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
    return replace(
        recipe,
        model=ModelConfig(path=str(weights)),
        parallel=ParallelConfig(micro_batch_toks=recipe.parallel.micro_batch_toks),
        data=replace(recipe.data, train=(), eval=(data,)),
        run=replace(recipe.run, dir=str(scratch / "session"), tensorboard=False, wandb=False),
        rollout=replace(recipe.rollout, engine=Engine.local),
        grpo=replace(recipe.grpo, kl_coef=0.0),
    )


def main(args: argparse.Namespace) -> int:
    """Evaluate `args.model` on every source of `args.data` and print one line each; returns the exit code.

    Args:
        args: `model` (path), `data` (list of sources), `overrides` (`key=value` words), `json` (one object a line).

    Raises:
        ValueError: for a model, source or key that is wrong.
    """
    for data in args.data:
        with tempfile.TemporaryDirectory() as folder:
            recipe = recipe_for(Path(args.model), data, args.overrides, Path(folder))
            session = open_session(recipe, ["jetrl", "eval"], evaluate_only=True)
            try:
                build_actor(session, session.source_dir)
                assert session.eval_prompts is not None
                values = evaluate(session, session.eval_prompts)
            finally:
                session.close()
        dropped = {name: count for name, count in session.eval_prompts.dropped.items() if count}
        record = {"model": str(args.model), "data": data, "arm": recipe.precision.arm.value, **values, "dropped": dropped}
        print(json.dumps(record) if args.json else _line(record), flush=True)
    return 0


def _line(record: dict[str, object]) -> str:
    k = f"{record['samples']:.0f}"
    text = f"{record['data']}  pass@1 {record['pass@1']:.4f}  avg@{k} {record['avg@k']:.4f}  pass@{k} {record['pass@k']:.4f}"
    return f"{text}  prompts {record['num_prompts']:.0f}  length {record['response_toks']:.1f}  arm {record['arm']}"
