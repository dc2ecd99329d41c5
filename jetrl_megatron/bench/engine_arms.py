"""One recipe with several precision arms, one after the other on the same machine: what `bench rollout` and `bench sync` have in common.

Enters: a recipe file, `key=value` words, arms. Leaves: for each arm the records that rank 0 wrote. Each arm runs in fresh processes, one a
rank, as `jetrl train` would start them, with an actor of random or given weights, no optimizer, and the recipe's own vLLM servers.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jetrl_megatron.bench.timing import print_table, write_json
from jetrl_megatron.cli import count_processes
from jetrl_megatron.config import Engine
from jetrl_megatron.layout import check_recipe_layout
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop.colocated import settle_vllm
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.run.local_launch import die_with_launcher, launch, under_launcher

Record = dict[str, Any]
Measure = Callable[[Session, argparse.Namespace], Record]


def parser(name: str, what: str) -> argparse.ArgumentParser:
    """Return the parser with the options that both commands have."""
    options = argparse.ArgumentParser(prog=f"jetrl bench {name}", description=what)
    options.add_argument("recipe", help="a YAML file; its rollout.engine=vllm_colocated stands, any other becomes vllm_pool")
    options.add_argument("overrides", nargs="*", metavar="key=value")
    options.add_argument("--arms", nargs="+", default=["jetrl", "bf16"], choices=["jetrl", "bf16", "fp8_rollout"])
    options.add_argument("--nproc", type=int, help="processes of the actor; default as in jetrl train")
    options.add_argument("--json", default="", metavar="FILE", help="append one JSON object a line")
    options.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return options


def run_arms(name: str, options: argparse.ArgumentParser, argv: Sequence[str], measure: Measure) -> int:
    """Measure every arm and print the table; in a worker process, measure the one arm that it was started for."""
    args, rest = options.parse_known_args(argv)
    strange = [word for word in rest if word.startswith("-") or "=" not in word]
    if strange:
        options.error(f"unrecognized arguments: {' '.join(strange)}")
    words = [*args.overrides, *rest]
    if load_recipe(args.recipe, [*words, f"precision.arm={args.arms[0]}"]).rollout.engine is Engine.local:
        words.append(f"rollout.engine={Engine.vllm_pool.value}")
    if args.worker:
        return _worker(args, words, measure)
    if under_launcher(os.environ):
        raise ValueError(f"jetrl bench {name} starts its own processes; run it without torchrun")
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="jetrl-bench-") as folder:
        for arm in args.arms:
            out = Path(folder) / f"{arm}.json"
            recipe = load_recipe(args.recipe, [*words, f"precision.arm={arm}", f"run.dir={folder}/{arm}"])
            check_recipe_layout(recipe)
            command = [sys.executable, "-m", "jetrl_megatron.bench", name, *argv, "--worker", f"{arm}:{out}"]
            code = launch(command, count_processes(recipe, args.nproc), recipe.run.grace_s)
            if code != 0 or not out.is_file():
                print(f"error: arm {arm} left without a result; its engines' logs are gone with its temporary folder", file=sys.stderr)
                return code or 1
            records.append({"bench": name, "arm": arm, **json.loads(out.read_text())})
    print_table(f"{name}: {Path(args.recipe).stem} {' '.join([*args.overrides, *rest])}", list(records[0]), records)
    write_json(args.json, records)
    return 0


def _worker(args: argparse.Namespace, words: list[str], measure: Measure) -> int:
    die_with_launcher()
    arm, _, out = args.worker.partition(":")
    recipe = load_recipe(args.recipe, [*words, f"precision.arm={arm}", f"run.dir={Path(out).with_suffix('')}"])
    with _session(recipe) as session:
        record = measure(session, args)
        if session.ranks.is_logger:
            Path(out).write_text(json.dumps({**record, **_machine(session)}))
    return 0


@contextmanager
def _session(recipe: Any) -> Iterator[Session]:
    """Open a session with its actor and engine, no optimizer and no reference; close it whatever happens."""
    from jetrl_megatron.loop.setup import build_actor, open_session

    session = open_session(recipe, sys.argv)
    try:
        build_actor(session, session.source_dir)
        yield session
    finally:
        session.close()


def _machine(session: Session) -> Record:
    import torch

    name = torch.cuda.get_device_name() if session.device.type == "cuda" else "cpu"
    vllm = settle_vllm(session.recipe, session.ranks.dp, session.device.type == "cuda")
    assert vllm.transport is not None
    return {
        "device": name,
        "engine": session.recipe.rollout.engine.value,
        "actors": session.ranks.world,
        "servers": vllm.num_servers + len(vllm.urls),
        "engine_tp": vllm.tp,
        "transport": vllm.transport.value,
    }
