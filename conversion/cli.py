"""`python -m conversion`: checkpoints in and out, and their comparison.

Exit codes: 0 done or equal, 1 `verify` found a difference, 2 the input is wrong (message on stderr). `--json` prints one object a line on
stdout; the progress bar goes to stderr.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

from conversion.checkpoint import open_checkpoint
from conversion.convert import Prepared, Target, prepare, publish
from conversion.execute import Progress
from conversion.layout import ParallelLayout
from conversion.verify import check_manifest, first_difference


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="python -m conversion", description="Move checkpoints between layouts without changing a bit.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("to-megatron", "Hugging Face directory -> Megatron rank shards"),
        ("reshard", "Megatron rank shards -> another TP x PP x VPP"),
        ("to-hf", "Megatron rank shards (or a Hugging Face directory, to change precision) -> Hugging Face directory"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
        command.add_argument("--cast", choices=("bf16", "fp8"), help="change the precision; left out, bytes move as they are")
        command.add_argument("--scale-format", choices=("fp32", "ue8m0"), default="fp32", help="of --cast fp8")
        command.add_argument("--bf16-layer", action="append", default=[], metavar="GLOB", help="stays BF16 in --cast fp8: *.mlp.down_proj")
        command.add_argument("--overwrite", action="store_true", help="replace a checkpoint at the target")
        command.add_argument("--workers", type=int, default=2, help="threads, each with one tensor in memory")
        command.add_argument("--dry-run", action="store_true", help="print the plan and its bytes, write nothing")
        command.add_argument("--json", action="store_true")
        if name == "to-hf":
            command.add_argument("--max-shard-gb", type=float, default=5.0)
        else:
            _add_layout(command)
    verify = commands.add_parser("verify", help="compare two checkpoints of any kinds, or one with its manifest")
    verify.add_argument("a", type=Path)
    verify.add_argument("b", type=Path, nargs="?")
    verify.add_argument("--values", action="store_true", help="compare dequantised values")
    verify.add_argument("--json", action="store_true")
    bench = commands.add_parser("bench", help="HF -> Megatron TP4 -> HF of a random checkpoint against cp, and peak memory")
    bench.add_argument("directory", type=Path, help="on the disk to measure; its contents are removed at the end")
    bench.add_argument("--gb", type=float, default=4.0)
    bench.add_argument("--json", action="store_true")
    return parser


def _add_layout(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tp", type=int, required=True)
    command.add_argument("--pp", type=int, default=1)
    command.add_argument("--vpp", type=int, default=1)
    command.add_argument("--first-stage-layers", type=int)
    command.add_argument("--last-stage-layers", type=int)
    command.add_argument("--row-parallel", choices=("k_complete", "k_split"), default="k_complete")
    command.add_argument("--vocab-divisible-by", type=int, default=128)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        if args.command == "verify":
            return _verify(args)
        if args.command == "bench":
            from conversion.bench import bench

            _print(args.json, bench(args.directory, args.gb))
            return 0
        return _convert(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _target(args: argparse.Namespace) -> Target:
    cast = args.scale_format if args.cast == "fp8" else args.cast
    bf16_layers = tuple(args.bf16_layer)
    if args.command == "to-hf":
        return Target(kind="hf", cast=cast, bf16_layers=bf16_layers, max_shard_bytes=int(args.max_shard_gb * 1e9), overwrite=args.overwrite)
    layout = ParallelLayout(
        tp=args.tp,
        pp=args.pp,
        vpp=args.vpp,
        first_stage_layers=args.first_stage_layers,
        last_stage_layers=args.last_stage_layers,
        row_parallel=args.row_parallel,
        vocab_divisible_by=args.vocab_divisible_by,
    )
    return Target(kind="megatron", layout=layout, cast=cast, bf16_layers=bf16_layers, overwrite=args.overwrite)


def _convert(args: argparse.Namespace) -> int:
    source = open_checkpoint(args.source)
    try:
        expected = {"to-megatron": "hf", "reshard": "megatron"}.get(args.command)
        if expected is not None and source.kind != expected:
            raise ValueError(f"{args.command} reads a {expected} checkpoint, but {args.source} is of kind {source.kind}")
        if args.command == "to-hf" and source.kind == "hf" and args.cast is None:
            raise ValueError(f"{args.source} is a Hugging Face directory already; to change its precision give --cast bf16 or fp8")
        prepared = prepare(source, _target(args))
        summary = _summary(prepared, args.target)
        if args.dry_run:
            _print_plan(args.json, prepared, summary)
            return 0
        with _bar(prepared.plan.num_bytes, args.json) as progress:
            publish(prepared, args.target, workers=args.workers, progress=progress)
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
        checked = check_manifest(args.a)
        _print(args.json, {"equal": True, "tensors_checked": checked})
        return 0
    a, b = open_checkpoint(args.a), open_checkpoint(args.b)
    try:
        with _bar(sum(t.num_bytes for t in a.tensors), args.json) as progress:
            difference = first_difference(a, b, args.values, progress)
    finally:
        a.close()
        b.close()
    if difference is None:
        _print(args.json, {"equal": True})
        return 0
    if args.json:
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
