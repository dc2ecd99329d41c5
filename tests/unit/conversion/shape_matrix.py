"""The dimensions of published models through every layout, on disk, bit for bit: `python -m tests.unit.conversion.shape_matrix OUT.md`.

For each model and precision a random checkpoint of four layers is written and then resharded through all TP x PP of the matrix, one after
the other: HF -> TP1 PP1 -> TP1 PP2 -> ... -> TP8 uneven. Every stop is compared with the source element by element, codes and scales, and
for each TP degree one stop is exported, whose files must equal the source's files byte for byte. `k_complete` and `k_split` alternate. A
TP degree at which a rank would hold part of a head or of a 128 x 128 scale block must be refused instead. BF16 ends in a `torch_dist`
checkpoint, which must refuse FP8. The vocabulary is cut to 1003 rows, which need padding: all else is as published. Weights are random
bytes; scales are positive random numbers.
"""

import argparse
import filecmp
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conversion.architecture import ModelArchitecture
from conversion.checkpoint import open_checkpoint
from conversion.convert import Target, convert
from conversion.layout import ParallelLayout, fp8_modules
from conversion.random_checkpoint import write_random
from conversion.verify import first_difference
from tests.unit.conversion.shapes import published_config

LAYERS, VOCAB = 4, 1003
ALL = (1, 2, 4, 8)
LEGAL: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "Qwen2.5-0.5B": ((1, 2), (1,)),
    "Qwen3-0.6B": (ALL, ALL),
    "Llama-3.2-1B": (ALL, (1, 2, 4)),
    "Qwen3-4B": (ALL, (1, 2, 4)),
    "Qwen3-8B": (ALL, ALL),
    "Llama-3.1-8B": (ALL, ALL),
    "Qwen2.5-7B": ((1, 2, 4), (1, 2, 4)),
    "Qwen3-32B": (ALL, ALL),
    "Llama-3.1-70B": (ALL, ALL),
    "Qwen2.5-72B": (ALL, (1,)),
}
"""Model -> TP degrees that are legal in BF16 and in FP8, out of 1, 2, 4, 8; worked out by hand.

TP must divide query and kv heads. In FP8 the rows of q, k, v, gate and up, and both sides of o and down, must be whole blocks of 128 on
each rank.
"""
PIPELINES = {"PP1": {}, "PP2": {"pp": 2}, "PP4": {"pp": 4}, "PP3 uneven 2+1+1": {"pp": 3, "first_stage_layers": 2}}


@dataclass(frozen=True)
class Cell:
    """What one layout came to."""

    tp: int
    """0 for `torch_dist`."""
    pipeline: str
    outcome: str
    """`bit-exact`, or `refused: ` and the reason."""


def run_model(name: str, fp8: bool, work: Path) -> Iterator[Cell]:
    """Yield the cells of one model and precision; `work` holds up to three copies of it and is empty afterwards.

    Raises AssertionError at the first cell that is neither bit-exact nor refused as it must be.
    """
    config, source = published_config(name, layers=LAYERS, vocab=VOCAB), work / "source"
    modules = fp8_modules(ModelArchitecture.from_hf_config(config)) if fp8 else frozenset()
    write_random(source, config, modules, np.random.Generator(np.random.SFC64(0)))
    current, legal = source, LEGAL[name][int(fp8)]
    for tp in ALL:
        for number, (pipeline, options) in enumerate(PIPELINES.items()):
            layout = ParallelLayout(tp=tp, row_parallel=("k_complete", "k_split")[number % 2], **options)
            following = work / f"tp{tp}-{number}"
            try:
                convert(current, following, Target(kind="megatron", layout=layout))
            except ValueError as error:
                assert tp not in legal, f"{name} tp={tp} is legal but was refused: {error}"
                assert not following.exists() and not (work / f".{following.name}.partial").exists()
                yield Cell(tp, pipeline, f"refused: {str(error).split(': ', 1)[1].split(';')[0]}")
                continue
            assert tp in legal, f"{name} tp={tp} is illegal but was not refused"
            one, two = open_checkpoint(source), open_checkpoint(following)
            difference = first_difference(one, two)
            one.close()
            two.close()
            assert difference is None, f"{name} tp={tp} {pipeline}: {difference}"
            if current != source:
                shutil.rmtree(current)
            current = following
            if number == len(PIPELINES) - 1:
                _compare_export(current, source, work / "back")
            yield Cell(tp, pipeline, "bit-exact")
    yield _torch_dist(current, source, fp8, work)
    for path in (source, current):
        shutil.rmtree(path)


def _torch_dist(current: Path, source: Path, fp8: bool, work: Path) -> Cell:
    """Go through Megatron-core's distributed checkpoint, which has no layout."""
    try:
        convert(current, work / "dist", Target(kind="torch_dist"))
    except ValueError as error:
        assert fp8 and "holds the actor's BF16 parameters" in str(error), error
        return Cell(0, "torch_dist", "refused: it holds BF16 parameters")
    assert not fp8
    _compare_export(work / "dist", source, work / "back")
    shutil.rmtree(work / "dist")
    return Cell(0, "torch_dist", "bit-exact")


def _compare_export(current: Path, source: Path, out: Path) -> None:
    convert(current, out, Target(kind="hf"))
    files = sorted(p.name for p in source.glob("*.safetensors"))
    assert files == sorted(p.name for p in out.glob("*.safetensors"))
    for file in files:
        assert filecmp.cmp(source / file, out / file, shallow=False), f"{current}: {file} differs from the source's"
    shutil.rmtree(out)


def _rows(label: str, cells: list[Cell]) -> list[str]:
    """One line a TP degree; a refusal that is the same for every pipeline is written once."""
    rows = []
    for tp in ALL:
        outcomes = [cell.outcome for cell in cells if cell.tp == tp]
        same = outcomes[:1] + ["same"] * (len(outcomes) - 1) if len(set(outcomes)) == 1 and outcomes[0] != "bit-exact" else outcomes
        last = next(cell.outcome for cell in cells if cell.tp == 0) if tp == ALL[0] else ""
        rows.append(f"| {label} | {tp} | {' | '.join(same)} | {last} |")
    return rows


def main(argv: list[str] | None = None) -> None:
    """Run all models, smallest first, and write the table after each."""
    parser = argparse.ArgumentParser(description="The matrix of published shapes, on disk.")
    parser.add_argument("out", type=Path, help="the table, Markdown")
    parser.add_argument("--work", type=Path, help="an empty directory for up to 22 GB; by default a temporary one")
    parser.add_argument("--models", nargs="*", default=list(LEGAL))
    args = parser.parse_args(argv)
    os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]
    lines = ["| model | precision | TP | " + " | ".join(PIPELINES) + " | torch_dist |", "|" + "---|" * (4 + len(PIPELINES))]
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        for name in args.models:
            for fp8 in (False, True):
                started = time.perf_counter()
                cells = list(run_model(name, fp8, Path(work)))
                lines += _rows(f"{name} | {'FP8' if fp8 else 'BF16'}", cells)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text("\n".join(lines) + "\n")
                print(f"{name} {'FP8' if fp8 else 'BF16'}: {len(cells)} layouts in {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
