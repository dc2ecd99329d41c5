"""One recipe with several precision arms, one after the other on the same machine: what `bench rollout` and `bench sync` have in common.

Enters: a recipe file, `key=value` words, arms. Leaves: for each arm the records that rank 0 wrote. Each arm runs in fresh processes, one a
rank, as `jetrl train` would start them, with no optimizer and the recipe's own vLLM servers; or, with `--servers-only`, in one process
that builds no actor (servers.py). The actor has the weights of `model.path`, or, where there is none, random ones that are drawn where it
computes: no file holds them (but for transport `disk`, whose pushes are files), so that a large shape starts in seconds.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conversion.architecture import ModelArchitecture
from jetrl_megatron.bench.shapes import MAX_POSITIONS, MODELS, VOCAB
from jetrl_megatron.bench.timing import positive, print_table, write_json
from jetrl_megatron.cli import count_processes
from jetrl_megatron.config import Engine, Recipe, SyntheticModelConfig, VllmConfig
from jetrl_megatron.layout import check_recipe_layout
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop.colocated import settle_vllm
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.run.local_launch import launch, under_launcher

Record = dict[str, Any]
Measure = Callable[[Session, argparse.Namespace], Record]
MeasureArm = Callable[[Recipe, argparse.Namespace], Record | None]
"""In a process of an arm; its record on rank 0, None elsewhere."""
Prepare = Callable[[Sequence[Recipe], argparse.Namespace], None]


def parser(name: str, what: str) -> argparse.ArgumentParser:
    """Return the parser with the options that both commands have."""
    options = argparse.ArgumentParser(prog=f"jetrl bench {name}", description=what)
    options.add_argument("recipe", help="a YAML file; its rollout.engine=vllm_colocated stands, any other becomes vllm_pool")
    options.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="recipe keys, for example parallel.tp=1")
    arms = ["jetrl", "bf16", "fp8_rollout"]
    options.add_argument("--arms", nargs="+", default=arms[:2], choices=arms, help="one after the other; default: jetrl bf16")
    options.add_argument("--model", choices=sorted(MODELS), help="random weights of this shape; default: model.path, or model.synthetic")
    options.add_argument("--layers", type=positive, help="of --model; default: the model's")
    options.add_argument("--nproc", type=int, help="processes of the actor; default as in jetrl train")
    options.add_argument("--json", default="", metavar="FILE", help="append one JSON object a line")
    options.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options.add_argument("--random-weights", action="store_true", help=argparse.SUPPRESS)
    options.set_defaults(servers_only=False)
    return options


def run_arms(
    name: str, options: argparse.ArgumentParser, argv: Sequence[str], measure: MeasureArm, prepare: Prepare = lambda recipes, args: None
) -> int:
    """Measure every arm and print the table; in a worker process, measure the one arm that it was started for.

    prepare: called once, with the recipes of all arms, before the first arm starts.
    """
    args, rest = options.parse_known_args(argv)
    strange = [word for word in rest if word.startswith("-") or "=" not in word]
    if strange:
        options.error(f"unrecognized arguments: {' '.join(strange)}")
    words = [*args.overrides, *rest]
    if load_recipe(args.recipe, [*words, f"precision.arm={args.arms[0]}"]).rollout.engine is Engine.local:
        words.append(f"rollout.engine={Engine.vllm_pool.value}")
    if args.layers is not None and args.model is None:
        options.error("--layers goes with --model; for a recipe's own model set model.synthetic.num_layers")
    if args.worker:
        return _worker(args, words, measure)
    if under_launcher(os.environ):
        raise ValueError(f"jetrl bench {name} starts its own processes; run it without torchrun")
    write_json(args.json, [])
    asked = {"recipe": args.recipe, "words": " ".join(words), "model": args.model or ""}
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="jetrl-bench-") as folder:
        drawn = _model_without_weights(args, words, Path(folder) / "model")
        recipes = {a: load_recipe(args.recipe, [*words, *drawn, f"precision.arm={a}", f"run.dir={folder}/{a}"]) for a in args.arms}
        for recipe in recipes.values():  # before an arm is measured that another one's fault would waste
            check_recipe_layout(recipe)
        prepare(list(recipes.values()), args)
        for arm, recipe in recipes.items():
            out = Path(folder) / f"{arm}.json"
            num_processes = 1 if args.servers_only else count_processes(recipe, args.nproc)
            command = _worker_command(name, argv, f"{arm}:{out}", drawn)
            code = launch(command, num_processes, recipe.run.grace_s, resumes=False)
            if code != 0 or not out.is_file():
                _say_why(arm, code, out.with_suffix("") / "engines")
                return code or 1
            records.append({"bench": name, "arm": arm, **json.loads(out.read_text()), **asked})
            write_json(args.json, records[-1:])  # at once: a later arm may fail
            print(f"arm {arm} is done", file=sys.stderr, flush=True)
    columns = [column for column in records[0] if column not in asked]
    print_table(f"{name}: {Path(args.recipe).stem} {asked['model']} {asked['words']}", columns, records)
    return 0


def _say_why(arm: str, code: int, logs: Path) -> None:
    """Say that an arm has no result, and keep the logs of its engines where one may have failed: their folder is about to go."""
    if code == 0:
        print(f"error: arm {arm} was stopped and has no result", file=sys.stderr)
        return
    where = ""
    if logs.is_dir():
        kept = tempfile.mkdtemp(prefix="jetrl-bench-logs-")
        try:
            where = f"; its engines' logs are in {shutil.copytree(logs, kept, dirs_exist_ok=True)}"
        except OSError as error:  # a full disk may be what the arm failed for
            shutil.rmtree(kept)
            where = f"; its engines' logs are gone, for they could not be copied: {error}"
    print(f"error: arm {arm} left without a result{where}", file=sys.stderr)


def _worker_command(name: str, argv: Sequence[str], worker: str, drawn: list[str]) -> list[str]:
    """Return the command of an arm's processes, which say an error as `jetrl` does.

    An option stands behind `argv`, whose last one may take any number of words.
    """
    drawing = ["--random-weights", *drawn] if drawn else []
    return [sys.executable, "-m", "jetrl_megatron.cli", "bench", name, *argv, "--worker", worker, *drawing]


def _model_without_weights(args: argparse.Namespace, words: list[str], out_dir: Path) -> list[str]:
    """Write the model whose weights the actor draws, and return the word that names it; nothing where `model.path` has weights.

    Raises ValueError where both `--model` and `model.path` say what to load.
    """
    from jetrl_megatron.loop.synthetic_model import MAX_POSITIONS as SYNTHETIC_POSITIONS
    from jetrl_megatron.loop.synthetic_model import write_synthetic_config

    model = load_recipe(args.recipe, words).model
    if model.path and args.model:
        raise ValueError(f"--model {args.model} draws random weights, and model.path is {model.path}: leave one of them out")
    if model.path:
        return []
    if args.model is None:
        return [f"model.path={write_synthetic_config(out_dir, model.synthetic, 0, SYNTHETIC_POSITIONS)}"]
    shape = MODELS[args.model]
    synthetic = SyntheticModelConfig(
        hidden_size=shape.hidden,
        num_layers=args.layers or shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        tie_embeddings=False,
    )
    return [f"model.path={write_synthetic_config(out_dir, synthetic, VOCAB, MAX_POSITIONS)}"]


def _worker(args: argparse.Namespace, words: list[str], measure: MeasureArm) -> int:
    arm, _, out = args.worker.partition(":")
    recipe = load_recipe(args.recipe, [*words, f"precision.arm={arm}", f"run.dir={Path(out).with_suffix('')}"])
    record = measure(recipe, args)
    if record is not None:
        Path(out).write_text(json.dumps(record))
    return 0


def with_actor(measure: Measure) -> MeasureArm:
    """Return what measures an arm with `measure` on every rank of an actor, and adds to rank 0's record where that was."""

    def measure_arm(recipe: Recipe, args: argparse.Namespace) -> Record | None:
        with _session(recipe, args.random_weights) as session:
            record = measure(session, args)
            if not session.ranks.is_logger:
                return None
            on_cuda = session.device.type == "cuda"
            vllm = settle_vllm(recipe, session.ranks.dp, on_cuda)
            return record | place(recipe, vllm, session.arch, on_cuda, session.ranks.world)

    return measure_arm


@contextmanager
def _session(recipe: Recipe, random_weights: bool) -> Iterator[Session]:
    """Open a session with its actor and engine, no optimizer, no reference and, unlike a run, no gradients; close it whatever happens.

    random_weights: the actor draws its weights, and `model.path` holds none.
    """
    from jetrl_megatron.loop.setup import build_actor, open_session

    session = open_session(recipe, sys.argv)
    try:
        build_actor(session, None if random_weights else session.source_dir, trainable=False)
        yield session
    finally:
        session.close()


def place(recipe: Recipe, vllm: VllmConfig, arch: ModelArchitecture, on_cuda: bool, num_actors: int) -> Record:
    """Return the columns that say on what an arm was measured. vllm: from `settle_vllm`. num_actors: processes of the actor."""
    import torch

    from jetrl_megatron.rollout.compat import vllm_version

    name = torch.cuda.get_device_name() if on_cuda else "cpu"
    assert vllm.transport is not None
    return {
        "device": name,
        "torch": torch.__version__,
        "vllm": vllm_version(),
        "layers": arch.num_layers,
        "hidden": arch.hidden_size,
        "vocab": arch.vocab_size,
        "engine": recipe.rollout.engine.value,
        "actors": num_actors,
        "servers": vllm.num_servers + len(vllm.urls),
        "engine_tp": vllm.tp,
        "transport": vllm.transport.value,
    }
