"""`jetrl bench step`: the actor's update step and its reference forward, BF16 against the FP8 flow, in one run on the same random weights.

Enters: a model shape, a layout (run it under torchrun for more than one rank), packed tokens. Leaves: for each arm the milliseconds of
forward + backward, optimizer, quantisation and the log-prob forward, the peak memory, what the forward of one micro-batch leaves to its
backward (logits among it), and where the device time of one step went by kind of kernel. Invariant: every arm runs the same Megatron model,
schedule and optimizer; only the precision of the linears differs.
Weights are random, so nothing is learned here. Left out: rollout, rewards and weight sync.
"""

import argparse
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from enum import Enum
from typing import Any

import torch

from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.device import local_device, megatron_scope
from jetrl_megatron.bench.shapes import MODELS
from jetrl_megatron.bench.timed_actor import StepCase, TimedActor, architecture, random_batch
from jetrl_megatron.bench.timing import machine, positive, print_table, require_cuda, write_json
from jetrl_megatron.config import ParallelConfig, PrecisionConfig, Recompute
from jetrl_megatron.contracts import TrainBatch

LONGEST = 30
"""Kernels that the JSON record names one by one."""
KINDS = (
    ("communication", r"nccl|all_?gather|reduce_scatter|sendrecv"),
    ("attention", r"flash|fmha|attention|sdpa|cudnn"),
    ("quantise", r"^_?(row|tile|transpose|requantize|accumulate)_kernel"),
    ("norm", r"^norm_(backward_|dw_)?kernel|layer_norm|gammabeta"),
    ("swiglu", r"^swiglu_(backward_)?kernel"),
    ("gemm", r"gemm|nvjet|cutlass|xmma|cublas"),
    ("optimizer", r"multi_tensor|foreach|adam"),
)
"""Kinds of kernel by name, first match wins; what matches none is elementwise work and copies. `quantise` is every Triton kernel of
`jetrl_megatron.fp8` that reads or writes FP8, or adds dW into main_grad: the quantisers with their transpose, a norm or SwiGLU in front of
them where that writes no BF16, and the tile kernel from the gradient behind SwiGLU to fc1's FP8 operands. `norm` is the norm that writes
BF16, the statistics of one that does not, and the backward; `swiglu` is SwiGLU and its gradient in BF16."""


def _saved_bytes(actor: TimedActor, batch: TrainBatch) -> int:
    """Bytes that the forward of one micro-batch leaves to its backward; with pipeline stages, of the stages that this rank has."""
    before = torch.cuda.memory_allocated()
    actor.gradients([batch])
    return max(0, actor.allocated_in_loss - before)


def _timed(run: Callable[[], object]) -> float:
    """Milliseconds of one call, the device drained before and after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def time_arm(case: StepCase, precision: PrecisionConfig, ranks: parallel_state.Ranks, device: torch.device) -> dict[str, Any]:
    """Return medians in milliseconds, peak memory and device time by kind of kernel; the arm's memory is free again afterwards."""
    with megatron_scope(device):
        result = _time_built(case, TimedActor(case, precision, ranks, device), device)
    gc.collect()
    torch.cuda.empty_cache()
    return result


def _time_built(case: StepCase, actor: TimedActor, device: torch.device) -> dict[str, Any]:
    batches = [random_batch(case, device, seed) for seed in range(case.micro_batches)]
    runs: dict[str, Callable[[], object]] = {
        "forward_backward_ms": lambda: actor.gradients(batches),
        "optimizer_ms": actor.update,
        "quantise_weights_ms": actor.sides.refresh,
        "logprob_forward_ms": lambda: actor.steps.logprobs(batches),
    }
    torch.cuda.reset_peak_memory_stats()
    rows: list[dict[str, float]] = [{name: _timed(run) for name, run in runs.items()} for _ in range(case.repeats + 2)]
    medians = {name: statistics.median(row[name] for row in rows[2:]) for name in runs}
    spread = {f"{name}_spread": max(row[name] for row in rows[2:]) - min(row[name] for row in rows[2:]) for name in runs}
    peak = torch.cuda.max_memory_allocated() / 2**30
    saved = _saved_bytes(actor, batches[0]) / 2**30
    kernels = _kernel_times(actor, batches)
    update = sum(medians[name] for name in ("forward_backward_ms", "optimizer_ms", "quantise_weights_ms"))
    longest = dict(list(kernels.items())[:LONGEST])
    return {
        "update_ms": update,
        **medians,
        **spread,
        "peak_gib": peak,
        "saved_gib": saved,
        "kernel_ms": _by_kind(kernels),
        "longest_kernels_ms": longest,
    }


def _kernel_times(actor: TimedActor, batches: list[TrainBatch]) -> dict[str, float]:
    """Milliseconds of device time of one update step by name of kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        actor.gradients(batches)
        actor.update()
        actor.sides.refresh()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / 1e3 for event in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _by_kind(kernels: dict[str, float]) -> dict[str, float]:
    """Sum the kernels' milliseconds by kind (see KINDS)."""
    found: dict[str, float] = {}
    for name, ms in kernels.items():
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, name.lower())), "elementwise, copies")
        found[kind] = found.get(kind, 0.0) + ms
    return {kind: round(value, 2) for kind, value in sorted(found.items(), key=lambda item: -item[1])}


def _arms(names: list[str]) -> dict[str, PrecisionConfig]:
    """Return the precision of each named arm: `bf16`, `jetrl`, or either with `+KEY=VALUE` behind it for keys of the precision section.

    Raises ValueError for an arm, a key or a value that there is not.
    """
    arms = {}
    for name in names:
        base, *changes = name.split("+")
        precision = PrecisionConfig()
        for change in [f"arm={base}", *changes]:
            key, _, value = change.partition("=")
            kind = type(getattr(precision, key, None))
            if not issubclass(kind, Enum):
                known = [field.name for field in fields(precision) if isinstance(getattr(precision, field.name), Enum)]
                raise ValueError(f"--arms {name}: {key!r} is no key that can be changed here; there are {', '.join(known)}")
            if value not in [member.value for member in kind]:
                raise ValueError(f"--arms {name}: {key} is {value!r}; it must be one of {', '.join(member.value for member in kind)}")
            changed: dict[str, Any] = {key: kind(value)}
            precision = replace(precision, **changed)
        arms[name] = precision
    return arms


def main(argv: list[str]) -> int:
    """Time every arm and print the table on rank 0; returns 0."""
    parser = argparse.ArgumentParser(prog="jetrl bench step", description="The actor's update step, BF16 against FP8.")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-8b", help="whose shape; default: %(default)s")
    parser.add_argument("--layers", type=positive, help="default: the model's")
    parser.add_argument("--tokens", type=positive, default=8192, help="packed tokens of one micro-batch; default: %(default)s")
    parser.add_argument("--seqs", type=positive, default=1, help="sequences in a micro-batch; default: %(default)s")
    parser.add_argument("--micro-batches", type=positive, default=2, help="of one update, on each data-parallel rank; default: %(default)s")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; for more than one rank in all run it under torchrun")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--recompute", choices=[kind.value for kind in Recompute], default="none", help="what the backward makes again")
    parser.add_argument("--repeats", type=positive, default=5, help="updates that count, behind two that do not; default: %(default)s")
    parser.add_argument("--offload-fraction", type=float, default=0.0, metavar="SHARE", help="of the optimizer's state, on the host")
    parser.add_argument(
        "--no-optimizer", action="store_true", help="leave it out: its state has no room, update_ms is the rest of an update"
    )
    parser.add_argument(
        "--arms", nargs="+", default=["bf16", "jetrl"], metavar="ARM", help="bf16, jetrl, jetrl+wgrad_granularity=groups, ..."
    )
    parser.add_argument("--json", default="", metavar="FILE", help="append one JSON object a line")
    args = parser.parse_args(argv)
    arms = _arms(args.arms)
    require_cuda("bench step")
    write_json(args.json, [])
    args.layers = args.layers or MODELS[args.model].num_layers
    device = local_device()
    parallel = ParallelConfig(tp=args.tp, pp=args.pp, micro_batch_toks=args.tokens, recompute=Recompute(args.recompute))
    ranks = parallel_state.initialize(parallel, device)
    case = StepCase(
        arch=architecture(args.model, args.layers),
        parallel=parallel,
        tokens=args.tokens,
        seqs=args.seqs,
        micro_batches=args.micro_batches,
        repeats=args.repeats,
        offload_fraction=args.offload_fraction,
        optimizer=not args.no_optimizer,
    )
    asked = {key: value for key, value in vars(args).items() if key != "json"}
    records: list[dict[str, object]] = []
    for name, precision in arms.items():
        if ranks.is_logger:
            print(f"arm {name}: {case.arch.num_layers} layers, {case.micro_batches} micro-batches on {device}", file=sys.stderr, flush=True)
        result = time_arm(case, precision, ranks, device)
        records.append({"bench": "step", "arm": name, **asked, **machine(), "ranks": ranks.world, "dp": ranks.dp, **result})
        if ranks.is_logger:
            write_json(args.json, records[-1:])  # at once: a later arm may fail
    if ranks.is_logger:
        _report(records)
    parallel_state.barrier()
    parallel_state.destroy()
    return 0


def _report(records: list[dict[str, Any]]) -> None:
    """Print medians with the speed-up over the first arm."""
    base, rows = records[0], []
    columns = (
        "arm",
        "update_ms",
        "x",
        "forward_backward_ms",
        "optimizer_ms",
        "quantise_weights_ms",
        "logprob_forward_ms",
        "x logprob",
        "peak_gib",
        "saved_gib",
    )
    for r in records:
        numbers = {name: round(r[name], 2) for name in columns if name in r and name != "arm"}
        speed = {
            "x": round(base["update_ms"] / r["update_ms"], 3),
            "x logprob": round(base["logprob_forward_ms"] / r["logprob_forward_ms"], 3),
        }
        rows.append({"arm": r["arm"], **numbers, **speed})
    print_table(f"update step, {base['model']} shape, {base['layers']} layers, tp{base['tp']} pp{base['pp']}", columns, rows)
    for r in records:
        print(f"{r['arm']}: device ms of one step by kind: {r['kernel_ms']}")
