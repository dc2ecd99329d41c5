"""What one rank does in the wire tests: build an actor and stream its stage, or push a whole version to a directory."""

import errno
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from conversion.architecture import ModelArchitecture
from conversion.files import ShardWriter
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import local_device
from jetrl_megatron.config import Arm, ParallelConfig, PrecisionConfig, Recipe, RowParallel
from jetrl_megatron.rollout.vllm_engine import RunGroup
from jetrl_megatron.rollout.vllm_pool import PoolCounts
from jetrl_megatron.sync import wire as wire_module
from jetrl_megatron.sync.disk import DiskTransport
from jetrl_megatron.sync.publish import Publisher


class FakePool:
    """Takes what is published; reads the directory as a server would, while it is there."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.counts = PoolCounts()
        self.fail = ""

    def update(self, published: Any, load: Any) -> None:
        from conversion.checkpoint import open_checkpoint

        open_checkpoint(published.directory).close()  # every tensor is there, with the right shape, scales and config
        if self.fail:
            raise RuntimeError(self.fail)
        self.seen.append(published)


def build(hf_dir: str, tp: int, pp: int, row: str, arm: str) -> Actor:
    """Return the actor of this rank."""
    recipe = replace(
        Recipe(),
        parallel=ParallelConfig(tp=tp, pp=pp),
        precision=PrecisionConfig(arm=Arm(arm), row_parallel=RowParallel(row)),
    )
    device = local_device()
    ranks = parallel_state.initialize(recipe.parallel, device)
    return Actor(recipe, ModelArchitecture.from_hf_directory(hf_dir), Path(hf_dir), ranks, device)


StreamCase = tuple[str, int, int, str, str, int]
"""HF directory, TP, PP, row_parallel, arm, bytes of a bucket."""


def stream_all(cases: list[StreamCase]) -> list[dict[str, Any]]:
    """Return, for each case, name -> (dtype, shape, sha256) of what this rank's stage streams to it."""
    out = []
    for hf_dir, tp, pp, row, arm, bucket_bytes in cases:
        wire_module.BUCKET_BYTES = bucket_bytes
        actor = build(hf_dir, tp, pp, row, arm)
        wire = wire_module.StageWire(actor)
        found = streamed(wire, held_memory(actor))
        assert wire.receives or not found
        kept = {name: tensor for name, tensor in wire.stream() if name in wire.resident}
        assert all(tensor is kept[name] for name, tensor in wire.stream() if name in kept), "views are made anew for nothing"
        assert bool(wire.resident) == (tp == 1)
        for held in (actor_parameters(actor), cached_codes(actor), cached_scales(actor)):
            move_memory(actor, held)
            assert streamed(wire, held_memory(actor)) == found, "views of before the move are streamed"
        turn_memory(actor)
        assert streamed(wire, held_memory(actor)) == streamed(wire_module.StageWire(actor), held_memory(actor)), "read in the old layout"
        out.append(found)
        mpu.destroy_model_parallel()
    parallel_state.destroy()
    return out


def streamed(wire: wire_module.StageWire, memory: set[int]) -> dict[str, Any]:
    """Return name -> (dtype, shape, sha256) of one pass; what is resident lies in `memory`, and nothing else does."""
    found: dict[str, Any] = {}
    for name, tensor in wire.stream():
        assert (name in wire.resident) == (tensor.untyped_storage().data_ptr() in memory), name
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert name not in found
        found[name] = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest())
    return found


def move_memory(actor: Actor, tensors: Iterable[torch.Tensor]) -> None:
    """Put tensors that the actor holds elsewhere, and other bytes where they lay."""
    for tensor in tensors:
        before = tensor.data
        tensor.data = before.clone()
        before.view(torch.uint8).fill_(7)
    for entry in cache_entries(actor):
        entry.seen = entry.fingerprint()


def turn_memory(actor: Actor) -> None:
    """Give matrices of parameters and quantised weights other strides, at the same addresses."""
    for tensor in [*actor_parameters(actor), *cached_codes(actor), *cached_scales(actor)]:
        if tensor.dim() == 2:
            tensor.data = tensor.data.reshape(tensor.shape[::-1]).t()


def actor_parameters(actor: Actor) -> list[torch.Tensor]:
    return [parameter for chunk in actor.chunks for parameter in chunk.parameters()]


def cached_codes(actor: Actor) -> list[torch.Tensor]:
    return [entry.cached.w.data for entry in cache_entries(actor)]


def cached_scales(actor: Actor) -> list[torch.Tensor]:
    return [entry.cached.w.scale for entry in cache_entries(actor)]


def cache_entries(actor: Actor) -> list[Any]:
    """Return what the weight caches of the rollout side hold, each once."""
    weights = [module.flow_sides["rollout"].cache for chunk in actor.chunks for module in chunk.modules() if hasattr(module, "flow_sides")]
    return list({id(entry): entry for cache in weights if cache is not None for entry in cache._entries.values()}.values())


def held_memory(actor: Actor) -> set[int]:
    """Return where the actor's parameters and weight cache lie."""
    held = [*actor_parameters(actor), *cached_codes(actor), *cached_scales(actor)]
    return {tensor.untyped_storage().data_ptr() for tensor in held}


def push(hf_dir: str, root: str, tp: int, pp: int) -> list[Any]:
    """Push twice the same weights and once changed ones to a directory, then fail one push; returns what was seen."""
    actor = build(hf_dir, tp, pp, "k_complete", "jetrl")
    group = RunGroup(60.0)
    pool = FakePool() if group.rank == 0 else None
    transport = DiskTransport(Path(root), Path(hf_dir), actor, group, engine_tp=1, timeout_s=10.0)
    publisher = Publisher(actor, pool, transport, group)  # type: ignore[arg-type]
    out: list[Any] = [publisher.push()]
    actor.version = 1
    out.append(publisher.push())
    with torch.no_grad():
        for chunk in actor.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("linear_fc2.weight"):
                    parameter.mul_(1.5)
    actor.version = 2
    try:
        publisher.push()
    except RuntimeError as error:
        out.append(f"stale: {'was modified after the last refresh' in str(error)}")
    actor.sides.refresh()
    out.append(publisher.push())
    actor.version = 3
    if pool is not None:
        pool.fail = "server 0 does not hold version 3: rank 0: x differs"
    try:
        publisher.push()
    except RuntimeError as error:
        out.append(str(error))
    out.append(publisher.version)
    actor.version = 1
    try:
        publisher.push()
    except RuntimeError as error:
        out.append(str(error))
    out.append(sorted(p.name for p in Path(root).iterdir()))
    return out


def push_to_a_full_disk(hf_dir: str, root: str, tp: int, pp: int, full: int) -> tuple[list[str], list[str]]:
    """Push the model where rank `full` has room for three tensors, and once more with room for all; returns what it came to."""
    actor = build(hf_dir, tp, pp, "k_complete", "jetrl")
    group = RunGroup(60.0)
    pool = FakePool() if group.rank == 0 else None
    transport = DiskTransport(Path(root), Path(hf_dir), actor, group, engine_tp=1, timeout_s=10.0)
    publisher = Publisher(actor, pool, transport, group)  # type: ignore[arg-type]
    room, write = [3 if group.rank == full else 10**6], ShardWriter.write

    def limited(writer: ShardWriter, name: str, data: Any) -> dict[str, Any]:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", writer.path.name)
        return write(writer, name, data)

    ShardWriter.write = limited  # type: ignore[method-assign]
    out = []
    for _ in range(2):
        try:
            out.append(f"version {publisher.push().step}")
        except (OSError, RuntimeError) as error:
            out.append(f"{type(error).__name__}: {error}")
            if group.rank == full != 0:  # the word of rank 0, which a process that ends does not wait for
                group.from_first(None)
        room[0] = 10**6
    return out, sorted(p.name for p in Path(root).iterdir())


def push_once(hf_dir: str, root: str, tp: int, pp: int) -> Any:
    """Push the model as it is; returns the version on every rank."""
    actor = build(hf_dir, tp, pp, "k_complete", "jetrl")
    group = RunGroup(60.0)
    pool = FakePool() if group.rank == 0 else None
    transport = DiskTransport(Path(root), Path(hf_dir), actor, group, engine_tp=1, timeout_s=10.0)
    return Publisher(actor, pool, transport, group).push()  # type: ignore[arg-type]
