"""`jetrl flow RECIPE`: every operator of the rollout engine against the actor's, and whether the two flows are one.

Enters: a recipe whose rollout runs on vLLM, its model and prompts. Leaves: a table, with `--json` one object a line. Exit code 1 where an
operator differs. Two processes, one after the other, because both engines want the default process group: the first records a real vLLM
engine on the weights that the actor would push, the second feeds what it recorded to the actor. One device, TP1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from conversion.architecture import ModelArchitecture
from conversion.convert import Target, convert
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import local_device
from jetrl_megatron.config import LinearPrecision, Recipe, ScaleFormat
from jetrl_megatron.data.prompts import load_prompts
from jetrl_megatron.data.tokenizer import load_tokenizer
from jetrl_megatron.flow.actor_taps import Differences, compare
from jetrl_megatron.flow.operators import FINAL_NORM, LAYER_OPERATORS, LOGITS, LOGPROB
from jetrl_megatron.load import load_recipe
from jetrl_megatron.rollout.compat import engine_environment

_VIEWS = ("alone", "in_place")


def main(argv: Sequence[str]) -> int:
    """Run the comparison; returns its exit code."""
    options = argparse.ArgumentParser(prog="jetrl flow", description=str(__doc__).splitlines()[0])
    options.add_argument("recipe", help="a YAML file; runs on one device whatever its layout")
    options.add_argument("overrides", nargs="*", metavar="key=value")
    options.add_argument("--prompts", type=int, default=4, help="prompts of data.train")
    options.add_argument("--new-toks", type=int, default=64, help="tokens drawn for each")
    options.add_argument("--json", action="store_true", help="one JSON object an operator instead of the table")
    args, rest = options.parse_known_args(argv)
    strange = [word for word in rest if word.startswith("-") or "=" not in word]
    if strange:
        options.error(f"unrecognized arguments: {' '.join(strange)}")
    layout = ["parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "rollout.engine=vllm_pool"]
    recipe = load_recipe(args.recipe, [*args.overrides, *rest, *layout])
    if not recipe.model.path:
        raise ValueError("model.path is empty; jetrl flow compares engines on a Hugging Face directory: set model.path=DIR")
    with tempfile.TemporaryDirectory(prefix="jetrl-flow-") as folder:
        sequences = _recorded(recipe, Path(folder), args.prompts, args.new_toks)
    views = dict(zip(_VIEWS, _compared(recipe, sequences), strict=True))
    rows = _rows(views)
    _print(rows, args.json)
    return int(any(row["differing"] for row in rows if row["view"] == "alone"))


def _recorded(recipe: Recipe, folder: Path, num_prompts: int, new_toks: int) -> list[dict[str, Any]]:
    """Record the engine on the bytes that the actor would push."""
    source = Path(recipe.model.path)
    tokenizer = load_tokenizer(Path(recipe.model.tokenizer or source))
    prompts = [list(p.token_ids) for p in load_prompts(recipe.data, "train", tokenizer).prompts[:num_prompts]]
    arch = ModelArchitecture.from_hf_directory(source)
    longest = max(map(len, prompts)) + new_toks
    if longest > arch.max_positions:
        raise ValueError(f"{longest} tokens exceed the model's context of {arch.max_positions}: lower --new-toks or data.max_prompt_toks")
    model = source
    scales = recipe.precision.rollout_scale_format or recipe.precision.scale_format
    if recipe.precision.rollout_linear is LinearPrecision.fp8:
        model = folder / "model"
        convert(source, model, Target(kind="hf", cast=scales.value, bf16_layers=tuple(recipe.precision.bf16_layers)))
    job, out = folder / "job.json", folder / "recorded.pt"
    share = recipe.rollout.vllm.gpu_memory_utilization
    job.write_text(json.dumps({"prompts": prompts, "new_toks": new_toks, "max_model_len": arch.max_positions, "memory_share": share}))
    environment = os.environ | engine_environment(torch.cuda.is_available(), scales is ScaleFormat.ue8m0)
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-m", "jetrl_megatron.flow.engine_taps", str(model), str(job), str(out)]
    done = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the engine's recording ended with exit code {done.returncode}; its log is above")
    return list(torch.load(out))


def _compared(recipe: Recipe, sequences: list[dict[str, Any]]) -> tuple[Differences, Differences]:
    """Return the views `alone` and `in_place`."""
    device = local_device()
    ranks = parallel_state.initialize(recipe.parallel, device)
    source = Path(recipe.model.path)
    try:
        actor = Actor(recipe, ModelArchitecture.from_hf_directory(source), source, ranks, device)
        return compare(actor, sequences, forced=True), compare(actor, sequences, forced=False)
    finally:
        parallel_state.destroy()


def _rows(views: dict[str, Differences]) -> list[dict[str, Any]]:
    rows = []
    for view, found in views.items():
        for operator in (*LAYER_OPERATORS, FINAL_NORM, LOGITS, LOGPROB):
            for phase in ("prefill", "decode"):
                difference = found.get((operator, phase))
                if difference is None or not difference.elements:
                    continue
                rows.append(
                    {
                        "view": view,
                        "operator": operator,
                        "phase": phase,
                        "elements": difference.elements,
                        "differing": difference.differing,
                        "share": difference.differing / difference.elements,
                        "mean": difference.total / difference.elements,
                        "largest": difference.largest,
                        "first_layer": difference.first_layer,
                    }
                )
    return rows


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    print("| view | operator | phase | differing | mean | largest | first layer |\n|" + " --- |" * 7)
    for row in rows:
        first = "-" if row["first_layer"] < 0 else row["first_layer"]
        cells = (row["view"], row["operator"], row["phase"], f"{row['share']:.4%}", f"{row['mean']:.3g}", f"{row['largest']:.3g}", first)
        print("| " + " | ".join(map(str, cells)) + " |")
