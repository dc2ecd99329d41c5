"""The command `jetrl`.

Exit codes, the same for every command: 0 done (also: stopped by SIGTERM or SIGINT with everything saved); 1 the run or the check failed;
2 a wrong command line or recipe; 3 a stop that did not reach a step boundary within run.grace_s (the last complete checkpoint is intact).
Standard output carries results only (with `--json` one object a line, except that `train` ends with the path of summary.json); everything
else goes to standard error.
"""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jetrl_megatron.expected_warnings import ignore_expected_warnings
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.run.early_stop import stopping_early
from jetrl_megatron.run.local_launch import die_with_launcher, launch, slurm_rank, under_launcher

if TYPE_CHECKING:  # reading a recipe takes seconds of imports on a busy machine: they come after the signal handlers
    from jetrl_megatron.config import Recipe

EXIT_FAILED = 1
EXIT_USAGE = 2
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""What the system says where nothing more can be written: no fault of this code."""
_LEFT = "Connection closed by peer"
"""What gloo says on a rank that waits for one that is gone."""
MAX_CPU_PROCESSES = 64
"""Started here on a machine without GPUs: each is a Python process with torch, about half a gigabyte."""


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(prog="jetrl", description="On-policy FP8 reinforcement learning on Megatron-core.")
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="run a recipe; resumes by itself from its run directory")
    train.add_argument("recipe", help="a YAML file, for example recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml")
    example = "recipe keys, for example run.steps=10 data.train=[gsm8k]"
    train.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=example)
    train.add_argument("--nproc", type=int, help="processes on this machine; default: its GPUs, or tp * pp on a CPU")
    train.add_argument("--json", action="store_true", help="print records as JSON, one a line")
    train.set_defaults(call=_train)

    evaluate = commands.add_parser("eval", help="pass@1 and avg@k of a model on a benchmark")
    evaluate.add_argument("model", help="a run directory or a Hugging Face directory")
    evaluate.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="recipe keys, for example eval.samples=8")
    evaluate.add_argument("--data", action="append", required=True, metavar="NAME_OR_FILE", help="may be given several times")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object for each data set")
    evaluate.set_defaults(call=_evaluate)

    flow = commands.add_parser("flow", help="every operator of the vLLM engine against the actor's; exit code 1 where one differs")
    flow.add_argument("recipe", help="a YAML file; both engines run on one device whatever its layout")
    flow.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="recipe keys, for example model.path=DIR")
    flow.add_argument("--prompts", type=int, default=4, help="prompts of data.train")
    flow.add_argument("--new-toks", type=int, default=64, help="tokens drawn for each")
    flow.add_argument("--json", action="store_true", help="print one JSON object for each operator")
    flow.set_defaults(call=_flow)

    bench = commands.add_parser("bench", help="timings against BF16 and other libraries, each checked first", add_help=False)
    bench.set_defaults(call=_bench)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code; argv: words after `jetrl`, by default those of this process."""
    words = list(sys.argv[1:] if argv is None else argv)
    die_with_launcher()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    ignore_expected_warnings()
    args = parse(words)
    try:
        return int(args.call(args, words))
    except (ValueError, FileNotFoundError) as error:
        if not _raised_by_us(error):
            raise
        return _end(str(error), EXIT_USAGE)
    except RunFailure as error:
        return _end(str(error), EXIT_FAILED)
    except RuntimeError as error:
        if _LEFT not in str(error):
            raise
        return _end("another rank has left; what it said says why", EXIT_FAILED)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        text = f"cannot write {error.filename2 or error.filename or 'a file of the run'}: {error.strerror}"  # the second: of a copy
        return _end(f"{text}; free space there, or set another run.dir (TMPDIR for temporary files)", EXIT_FAILED)


def _end(text: str, code: int) -> int:
    """Say why the command ends, naming the rank where there are several; returns the exit code."""
    rank = f" (rank {os.environ['RANK']})" if "RANK" in os.environ else ""
    print(f"jetrl{rank}: {text}", file=sys.stderr, flush=True)
    return code


def parse(words: list[str]) -> argparse.Namespace:
    """Parse a command line; `key=value` words may stand anywhere behind the command."""
    parser = build_parser()
    if words[:1] == ["bench"]:  # its options are its own
        return parser.parse_args(words[:1])
    args, rest = parser.parse_known_args(words)
    strange = [word for word in rest if word.startswith("-") or "=" not in word]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    args.overrides = [*args.overrides, *rest]
    return args


def _raised_by_us(error: Exception) -> bool:
    """Tell our own checks of what the user wrote from a library's error, which is a fault of ours and keeps its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    package = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
    return package in ("jetrl_megatron", "conversion", "__main__")


def _train(args: argparse.Namespace, words: list[str]) -> int:
    """Run one rank, or launch all of them; a launcher that is told to stop before it has started any exits 0."""
    if not under_launcher(os.environ):
        os.environ.update(slurm_rank(os.environ))
    if under_launcher(os.environ):
        from jetrl_megatron.load import load_recipe
        from jetrl_megatron.train import train

        return train(load_recipe(args.recipe, args.overrides), ["jetrl", *words], json_lines=args.json)
    with stopping_early():
        num_processes, grace_s = _check_and_count(args)
    return launch([sys.executable, "-m", "jetrl_megatron.cli", *words], num_processes, grace_s)


def _check_and_count(args: argparse.Namespace) -> tuple[int, float]:
    """Check the recipe of a run before a process starts; returns how many to start and run.grace_s."""
    from jetrl_megatron.layout import check_recipe_layout
    from jetrl_megatron.load import load_recipe
    from jetrl_megatron.metrics import check_sinks

    recipe = load_recipe(args.recipe, args.overrides)
    check_recipe_layout(recipe)
    check_sinks(recipe.run)
    return count_processes(recipe, args.nproc), recipe.run.grace_s


def count_processes(recipe: "Recipe", asked: int | None) -> int:
    """Say how many processes to start here.

    asked: the user's number, else the machine's GPUs, else tp * pp. Raises ValueError when tp * pp does not divide it, or for more
    than this machine should hold.
    """
    import torch

    replica = recipe.parallel.tp * recipe.parallel.pp
    num_gpus = torch.cuda.device_count()
    number = asked if asked is not None else (num_gpus or replica)
    if number < 1 or number % replica:
        raise ValueError(
            f"{number} processes ({'--nproc' if asked is not None else 'one for each GPU'}) do not divide into replicas of "
            f"parallel.tp * parallel.pp = {recipe.parallel.tp} * {recipe.parallel.pp} = {replica}; use --nproc with a multiple of {replica}"
        )
    if not num_gpus and number > MAX_CPU_PROCESSES:
        raise ValueError(
            f"{number} processes on a machine without GPUs; at most {MAX_CPU_PROCESSES} are started here: lower --nproc, parallel.tp or "
            "parallel.pp, or start them yourself with torchrun"
        )
    if num_gpus and number > num_gpus:
        raise ValueError(f"{number} processes need as many GPUs and this machine has {num_gpus}; lower --nproc, parallel.tp or parallel.pp")
    return number


def _evaluate(args: argparse.Namespace, words: list[str]) -> int:
    from jetrl_megatron.evaluate import main as evaluate

    return evaluate(args)


def _flow(args: argparse.Namespace, words: list[str]) -> int:
    from jetrl_megatron.flow.command import main as flow

    return flow(args)


def _bench(args: argparse.Namespace, words: list[str]) -> int:
    from jetrl_megatron.bench.__main__ import main as bench

    return bench(words[1:])


if __name__ == "__main__":
    sys.exit(main())
