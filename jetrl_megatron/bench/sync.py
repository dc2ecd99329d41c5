"""`jetrl bench sync`: seconds of a weight push from the actor to every server, verification included, FP8 against BF16 in one run.

Enters: a recipe. Leaves: one row an arm: bytes, seconds (median), the median of each part of a push (rollout/laps.py: `load_s`,
`verify_s` and so on), and on CUDA the time that a plain copy of as many bytes takes in the same process, with the ratio to it: from one
GPU to another for transport `nccl`, within one GPU for the others. The first push starts the servers and is not counted.
Checked: every push verifies every tensor.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from jetrl_megatron.bench.engine_arms import Record, parser, run_arms, with_actor
from jetrl_megatron.bench.timing import copy_bandwidth, link_bandwidth, positive
from jetrl_megatron.config import Transport
from jetrl_megatron.loop.colocated import settle_vllm
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.rollout.laps import PARTS
from jetrl_megatron.sync.wire import StageWire


@dataclass(frozen=True)
class Wire:
    """The copy that a push is compared with, and its speed."""

    name: str
    bytes_a_s: float


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    options = parser("sync", "Seconds of a verified weight push, FP8 against BF16.")
    options.add_argument("--pushes", type=positive, default=5, help="counted pushes, behind the one that starts the servers")
    return run_arms("sync", options, argv, with_actor(measure))


def measure(session: Session, args: argparse.Namespace) -> Record:
    """Start the servers by a first push, then push again and again."""
    assert session.publisher is not None
    wire = wire_of(session)
    session.publisher.push()
    return {"start_s": session.publisher.seconds, **pushed(session, args.pushes, wire)}


def pushed(session: Session, num_pushes: int, wire: Wire | None) -> Record:
    """Push `num_pushes` times to servers that run; the actor's version grows as it would with optimizer steps.

    wire: what `wire_of` gave before the servers started.
    """
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
    if wire is not None:
        wire_s = num_bytes / wire.bytes_a_s
        record |= {"wire": wire.name, "wire_s": wire_s, "times_wire": record["push_s"] / wire_s}
    return record


def wire_of(session: Session) -> Wire | None:
    """Time a copy along the way of a push, on rank 0 and before a server takes its GPU's memory; None on other ranks and on a CPU.

    Between GPUs it leaves a CUDA context of this process on the other one.
    """
    if session.device.type != "cuda" or not session.ranks.is_logger:
        return None
    nccl = settle_vllm(session.recipe, session.ranks.dp, on_cuda=True).transport is Transport.nccl
    link = link_bandwidth() if nccl else None
    # A copy within a GPU reads and writes each byte once: half of its traffic is what arrives.
    wire = Wire("copy within a GPU", copy_bandwidth() / 2) if link is None else Wire("copy between GPUs", link)
    torch.cuda.empty_cache()
    return wire


def wire_bytes(wire: StageWire) -> int:
    """Return the bytes of one whole model on the wire, scales included."""
    return sum(prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in wire.described().values())
