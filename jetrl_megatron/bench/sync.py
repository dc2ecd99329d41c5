"""`jetrl bench sync`: seconds of a weight push from the actor to every server, verification included, FP8 against BF16 in one run.

Enters: a recipe. Leaves: one row an arm: bytes, seconds (median), the median of each part of a push (rollout/laps.py: `load_s`,
`verify_s` and so on), and on CUDA the time that a plain copy of as many bytes takes in the same process, with the ratio to it: from one
GPU to another for transport `nccl`, within one GPU for the others. The first push starts the servers and is not counted.
Checked: every push verifies every tensor.
"""

import argparse
import statistics
from collections.abc import Sequence
from math import prod

import torch

from jetrl_megatron.bench.engine_arms import Record, parser, run_arms
from jetrl_megatron.bench.timing import copy_bandwidth, link_bandwidth, positive
from jetrl_megatron.config import Transport
from jetrl_megatron.loop.colocated import settle_vllm
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.rollout.laps import PARTS
from jetrl_megatron.sync.wire import StageWire


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    options = parser("sync", "Seconds of a verified weight push, FP8 against BF16.")
    options.add_argument("--pushes", type=positive, default=5, help="counted pushes, behind the one that starts the servers")
    return run_arms("sync", options, argv, measure)


def measure(session: Session, args: argparse.Namespace) -> Record:
    """Start the servers by a first push, then push again and again."""
    assert session.publisher is not None
    session.publisher.push()
    return {"start_s": session.publisher.seconds, **pushed(session, args.pushes)}


def pushed(session: Session, num_pushes: int) -> Record:
    """Push `num_pushes` times to servers that run; the actor's version grows as it would with optimizer steps."""
    publisher = session.publisher
    assert publisher is not None
    seconds, parts = [], []
    for _ in range(num_pushes):
        session.engine.rest()  # as in a step; not counted
        session.actor.version += 1
        publisher.push()
        seconds.append(publisher.seconds)
        parts.append(publisher.parts)
    num_bytes = wire_bytes(StageWire(session.actor))
    record: Record = {
        "gib": num_bytes / 2**30,
        "push_s": statistics.median(seconds),
        "push_s_min": min(seconds),
        "push_s_max": max(seconds),
        "pushes": num_pushes,
    }
    record |= {f"{part}_s": statistics.median(push.get(part, 0.0) for push in parts) for part in PARTS if part in parts[-1]}
    if session.device.type == "cuda":
        transport = settle_vllm(session.recipe, session.ranks.dp, on_cuda=True).transport
        record |= wire_time(transport, num_bytes, record["push_s"])
    return record


def wire_time(transport: Transport | None, num_bytes: int, push_s: float) -> Record:
    """Return which copy stands for the wire of `transport`, the seconds of `num_bytes` by it, and how many times that a push took."""
    link = link_bandwidth() if transport is Transport.nccl else None
    # A copy within a GPU reads and writes each byte once: half of its traffic is what arrives.
    wire_s = num_bytes / (link or copy_bandwidth() / 2)
    return {"wire": "copy within a GPU" if link is None else "copy between GPUs", "wire_s": wire_s, "times_wire": push_s / wire_s}


def wire_bytes(wire: StageWire) -> int:
    """Return the bytes of one whole model on the wire, scales included."""
    return sum(prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in wire.described().values())
