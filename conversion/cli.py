"""`python -m conversion`: checkpoints in and out, and their comparison.

Exit codes: see `EXIT_CODES`; messages go to stderr. `--json` prints one object a line on stdout; the progress bar goes to stderr.
"""

import argparse
import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

from conversion.checkpoint import kind_of, open_checkpoint
from conversion.convert import Prepared, Target, prepare, publish
from conversion.execute import Progress
from conversion.layout import ParallelLayout
from conversion.verify import Difference, check_manifest, first_difference

_JSON = "print one JSON object a line on stdout, and no progress bar"
_ROOM = "; nothing was put at the target: make room and run the same command again, it goes on where it stopped"
EXIT_CODES = (
    "exit codes: 0 done or equal; 1 verify found a difference, or a step of bench failed; 2 the input is wrong, or it could not be read or "
    "written; 130 interrupted"
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    text = "Move checkpoints between layouts without changing a bit."
    parser = argparse.ArgumentParser(prog="python -m conversion", description=text, epilog=EXIT_CODES)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("to-megatron", "Hugging Face directory -> Megatron: rank shards, or a torch_dist checkpoint"),
        ("reshard", "Megatron rank shards or torch_dist checkpoint -> the other of them, or another TP x PP x VPP"),
        ("to-hf", "Megatron rank shards or torch_dist checkpoint (or Hugging Face, to change precision) -> Hugging Face directory"),
    ):
        command = commands.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
        command.add_argument("source", type=Path, help="directory to read")
        command.add_argument("target", type=Path, help="directory to write; new or empty, or with --overwrite a checkpoint")
        command.add_argument("--cast", choices=("bf16", "fp8"), help="change the precision; left out, bytes move as they are")
        command.add_argument("--scale-format", choices=("fp32", "ue8m0"), help="of --cast fp8, default fp32")
        command.add_argument("--bf16-layer", action="append", default=[], metavar="GLOB", help="stays BF16 in --cast fp8: *.mlp.down_proj")
        command.add_argument("--overwrite", action="store_true", help="replace a checkpoint at the target")
        command.add_argument("--workers", type=int, default=2, help="threads, each with one tensor in memory; default 2")
        command.add_argument("--dry-run", action="store_true", help="print the plan and its bytes, write nothing")
        command.add_argument("--json", action="store_true", help=_JSON)
        if name != "to-megatron":
            _add_hf_config(command)
        command.add_argument("--max-shard-gb", type=float, help="size of a file of a Hugging Face or torch_dist target, default 5")
        if name != "to-hf":
            _add_layout(command)
    _add_verify(commands)
    _add_bench(commands)
    return parser


def _add_verify(commands: Any) -> None:
    text = "compare two checkpoints of any kinds, or one with its manifest"
    verify = commands.add_parser("verify", help=text, description=text, epilog=EXIT_CODES)
    verify.add_argument("a", type=Path, help="directory of any kind")
    verify.add_argument("b", type=Path, nargs="?", help="second directory; left out, every tensor of the first is compared with its sha256")
    verify.add_argument("--values", action="store_true", help="compare dequantised values, so that FP8 and BF16 can be equal")
    _add_hf_config(verify)
    verify.add_argument("--json", action="store_true", help=_JSON)


def _add_bench(commands: Any) -> None:
    text = (
        "HF -> Megatron TP4 -> HF of a random checkpoint against cp of the same files on the same disk, and peak memory. Each step reads "
        "the checkpoint once from memory and writes it once, and is timed until its bytes are on the disk (cp: with a sync of its copies). "
        "..._speed_over_cp is the median time of cp over the median time of that conversion. What came back is compared with the source."
    )
    bench = commands.add_parser("bench", help="speed against cp, and peak memory", description=text, epilog=EXIT_CODES)
    bench.add_argument("directory", type=Path, help="on the disk to measure; empty or missing, and removed at the end")
    bench.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint, default 4")
    bench.add_argument("--rounds", type=int, default=3, help="of which the medians are compared, default 3")
    bench.add_argument("--json", action="store_true", help=_JSON)


def _add_hf_config(command: argparse.ArgumentParser) -> None:
    text = "Hugging Face directory of the model's config and tokenizer, for a torch_dist checkpoint that Megatron wrote"
    command.add_argument("--hf-config", type=Path, metavar="DIR", help=text)


def _add_layout(command: argparse.ArgumentParser) -> None:
    text = "ranks: one safetensors file a rank. torch_dist: for megatron.core.dist_checkpointing.load, BF16, the same for every layout"
    command.add_argument("--format", choices=("ranks", "torch_dist"), default="ranks", help=text)
    command.add_argument("--tp", type=int, help="tensor-parallel ranks; needed for --format ranks")
    command.add_argument("--pp", type=int, help="pipeline ranks, default 1")
    command.add_argument("--vpp", type=int, help="model chunks of a pipeline rank, default 1")
    command.add_argument("--first-stage-layers", type=int, help="layers of the first pipeline rank; default an even share")
    command.add_argument("--last-stage-layers", type=int, help="layers of the last pipeline rank; default an even share")
    command.add_argument(
        "--row-parallel", choices=("k_complete", "k_split"), help="how o and down are cut: by output rows (k_complete, default) or along K"
    )
    command.add_argument("--vocab-divisible-by", type=int, help="embedding and head are padded to a multiple of this times TP, default 128")


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        code = {"verify": _verify, "bench": _bench}.get(args.command, _convert)(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_stdout()
        return 128 + 13  # as a program that SIGPIPE ends: whoever read the output wanted no more of it
    except KeyboardInterrupt:
        resumes = args.command not in ("verify", "bench")
        print(f"interrupted{'; the same command goes on where it stopped' if resumes else ''}", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        _drop_stdout()
        return 2


def _drop_stdout() -> None:
    """Push out what was printed; where nothing can be, throw it away, so that the interpreter does not fail on it once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _bench(args: argparse.Namespace) -> int:
    from conversion.bench import bench

    try:
        result = bench(args.directory, args.gb, args.rounds)
    except RuntimeError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    _print(args.json, result)
    return 0


def _target(args: argparse.Namespace) -> Target:
    if args.scale_format is not None and args.cast != "fp8":
        raise ValueError(f"--scale-format {args.scale_format} is the scales' of --cast fp8, which is not asked for; leave it out")
    cast = (args.scale_format or "fp32") if args.cast == "fp8" else args.cast
    bf16_layers = tuple(args.bf16_layer)
    shared: dict[str, Any] = {"cast": cast, "bf16_layers": bf16_layers, "overwrite": args.overwrite}
    if args.max_shard_gb is not None and not 0 < args.max_shard_gb < float("inf"):
        raise ValueError(f"--max-shard-gb is {args.max_shard_gb:g}; it must be a number above 0")
    sized: dict[str, Any] = {} if args.max_shard_gb is None else {"max_shard_bytes": int(args.max_shard_gb * 1e9)}
    if args.command == "to-hf":
        return Target(kind="hf", **sized, **shared)
    names = ("tp", "pp", "vpp", "first_stage_layers", "last_stage_layers", "row_parallel", "vocab_divisible_by")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.format == "torch_dist":
        if given:
            listed = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"--format torch_dist is loaded at any layout and has none of its own; leave {listed} out")
        return Target(kind="torch_dist", **sized, **shared)
    if sized:
        raise ValueError(f"--format ranks writes one file for each model chunk of a rank; leave --max-shard-gb {args.max_shard_gb:g} out")
    if "tp" not in given:
        raise ValueError(f"{args.command} --format ranks needs --tp, the tensor-parallel degree")
    return Target(kind="megatron", layout=ParallelLayout(**given), **shared)


def _convert(args: argparse.Namespace) -> int:
    if args.workers < 1:
        raise ValueError(f"--workers is {args.workers}; it must be at least 1")
    source = open_checkpoint(args.source, getattr(args, "hf_config", None))
    try:
        expected = {"to-megatron": ("hf",), "reshard": ("megatron", "torch_dist")}.get(args.command)
        if expected is not None and source.kind not in expected:
            raise ValueError(f"{args.command} reads a {' or '.join(expected)} checkpoint, but {args.source} is of kind {source.kind}")
        if args.command == "to-hf" and source.kind == "hf" and args.cast is None:
            raise ValueError(f"{args.source} is a Hugging Face directory already; to change its precision give --cast bf16 or fp8")
        prepared = prepare(source, _target(args))
        summary = _summary(prepared, args.target)
        if args.dry_run:
            _print_plan(args.json, prepared, summary)
            return 0
        with _bar(prepared.plan.num_bytes, args.json) as progress:
            try:
                publish(prepared, args.target, workers=args.workers, progress=progress)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise ValueError(f"{error}{_ROOM}") from error
                raise
        _print(args.json, summary)
    finally:
        source.close()
    return 0


def _summary(prepared: Prepared, target: Path) -> dict[str, Any]:
    layout = prepared.target.layout
    return {
        "target": str(target),
        "kind": prepared.target.kind,
        "layout": asdict(layout) if layout is not None else None,
        "fp8_linears": len(prepared.fp8),
        "files": len(prepared.files),
        "tensors": len(prepared.plan.targets),
        "bytes": prepared.plan.num_bytes,
    }


def _print_plan(as_json: bool, prepared: Prepared, summary: dict[str, Any]) -> None:
    for target_plan in prepared.plan.targets:
        for op in target_plan.ops:
            line = {
                "from": f"{op.source.location}:{op.source.name}",
                "rows": op.source_rows,
                "cols": op.source_cols,
                "to": f"{op.target.location}:{op.target.name}",
                "to_rows": op.target_rows,
                "to_cols": op.target_cols,
                "scale_blocks": op.scale_ranges if op.with_scales else None,
            }
            _print(as_json, line)
    for name, size in prepared.files.items():
        _print(as_json, {"file": name, "bytes": size})
    _print(as_json, summary)


def _verify(args: argparse.Namespace) -> int:
    if args.b is None:
        if args.hf_config is not None:
            raise ValueError(f"one checkpoint is compared with its manifest, without a config; leave --hf-config {args.hf_config} out")
        if args.values:
            raise ValueError("one checkpoint is compared with its manifest, byte for byte; leave --values out")
        checked, difference = check_manifest(args.a)
        return _report(args.json, difference, {"tensors_checked": checked})
    dist = [path for path in (args.a, args.b) if kind_of(path) == "torch_dist"]
    if args.hf_config is not None and not dist:
        raise ValueError(f"neither checkpoint is a torch_dist one, each has its own config; leave --hf-config {args.hf_config} out")
    a, b = (open_checkpoint(path, args.hf_config if path in dist else None) for path in (args.a, args.b))
    try:
        with _bar(sum(t.num_bytes for t in a.tensors), args.json) as progress:
            difference = first_difference(a, b, args.values, progress)
    finally:
        a.close()
        b.close()
    return _report(args.json, difference, {})


def _report(as_json: bool, difference: Difference | None, more: dict[str, Any]) -> int:
    """Print a comparison and return its exit code; more: what equality adds."""
    if difference is None:
        _print(as_json, {"equal": True, **more})
        return 0
    if as_json:
        _print(True, {"equal": False, **asdict(difference)})
    else:
        print(difference)
    return 1


@contextmanager
def _bar(total: int, quiet: bool) -> Iterator[Progress]:
    """Show bytes done on stderr; the callback may be called from any thread."""
    lock = Lock()
    with tqdm(total=total, unit="B", unit_scale=True, disable=quiet) as bar:

        def progress(num_bytes: int) -> None:
            with lock:
                bar.update(num_bytes)

        yield progress


def _print(as_json: bool, record: dict[str, Any]) -> None:
    print(json.dumps(record) if as_json else "  ".join(f"{key}={value}" for key, value in record.items() if value is not None))
