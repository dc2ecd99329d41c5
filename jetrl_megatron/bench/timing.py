"""How a number is measured: device events around each call, medians, the machine and the ceilings beside it.

Enters: functions that launch device work. Leaves: `Timing`s, and records for the table and the JSON lines.
Left out: what is measured (quant.py, linear.py, step.py and the engine benches).
"""

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Timing:
    """One measured function, milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    repeats: int


def measure(run: Callable[[], object], repeats: int = 20, warmup: int = 3, batch: int = 1, graph: bool = False) -> Timing:
    """Time `run` on the current CUDA device: `warmup` calls unmeasured, then `repeats` pairs of events around `batch` calls each.

    Calls follow each other without a pause, so that each is charged for writing out what the one before left in the L2 cache. `run` has to
    move several times the L2 cache, or it is timed from cache. graph: capture the batch as a CUDA graph and time its replays, which leaves
    the host's launch time out.
    """
    for _ in range(warmup):
        run()
    if graph:
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(batch):
                run()
        captured.replay()
        return _timed(captured.replay, repeats, 1, batch)
    return _timed(run, repeats, batch, batch)


def _timed(run: Callable[[], object], repeats: int, calls: int, batch: int) -> Timing:
    """`repeats` pairs of events around `calls` calls of `run`; times are divided by `batch`."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        for _ in range(calls):
            run()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) / batch for start, end in pairs)
    return Timing(statistics.median(times), times[len(times) // 10], times[-1 - len(times) // 10], repeats)


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes read plus written a second by a device-to-device copy of `num_bytes`: the ceiling of every quantiser."""
    # Not from a graph: there the copy becomes a memory-copy node, which measured a third slower.
    source = torch.empty(num_bytes, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (measure(lambda: target.copy_(source), batch=4).median_ms * 1e-3)


def link_bandwidth(num_bytes: int = 1 << 28) -> float | None:
    """Bytes a second of a copy from the current GPU to the last other one that this process sees; None where it sees no other."""
    here, last = torch.cuda.current_device(), torch.cuda.device_count() - 1
    if last == 0:
        return None
    source = torch.empty(num_bytes, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source, device=torch.device("cuda", last if here != last else last - 1))
    return source.numel() / (measure(lambda: target.copy_(source, non_blocking=True), batch=4).median_ms * 1e-3)


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def calc_diff(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - 2ab / (aa + bb) in float64: about the squared relative error, 0 for equal tensors; NaN never passes a comparison."""
    a, b = a.detach().double(), b.detach().double()
    return 1.0 - float(2 * (a * b).sum() / (a * a + b * b).sum())


def positive(text: str) -> int:
    """Read an option that counts something, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def require_cuda(what: str) -> None:
    """Raise ValueError where no CUDA device is there to time."""
    if not torch.cuda.is_available():
        raise ValueError(f"{what} times CUDA kernels and torch sees no CUDA device; run it on the machine of the training job")


def print_table(title: str, columns: Sequence[str], rows: Sequence[dict[str, object]]) -> None:
    """Print a Markdown table of `rows` under `title`; floats get three decimals."""
    print(f"\n### {title}\n| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for row in rows:
        cells = [row.get(c, "") for c in columns]
        print("| " + " | ".join(f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells) + " |", flush=True)


def write_json(path: str, records: Sequence[dict[str, object]]) -> None:
    """Append one JSON object a line; nothing where `path` is empty. Call it without records before anything is measured.

    Raises ValueError where the file cannot be written.
    """
    if not path:
        return
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written ({error.strerror}: {error.filename}); name another file") from error
