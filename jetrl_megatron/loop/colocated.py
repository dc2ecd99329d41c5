"""Where the servers of `rollout.engine=vllm_colocated` go: one for each data-parallel replica of the actor, on exactly its GPUs.

Enters: a recipe, where every rank of the actor stands. Leaves: the servers' settings with nothing left open, and CUDA_VISIBLE_DEVICES of
each server. Rule: a server's TP degree is the number of GPUs of a replica, parallel.tp * parallel.pp (config.py refuses another).
Left out: when they sleep (rollout/vllm_pool.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jetrl_megatron.config import Engine, Recipe, Transport, VllmConfig


def settle_vllm(recipe: Recipe, num_replicas: int, on_cuda: bool) -> VllmConfig:
    """Return `rollout.vllm` with the number of servers and the transport that the engine means where the recipe leaves them open.

    num_replicas: data-parallel degree of the actor. Raises ValueError where a given number of servers contradicts it.
    """
    cfg, colocated = recipe.rollout.vllm, recipe.rollout.engine is Engine.vllm_colocated
    if not colocated:
        return replace(cfg, servers=cfg.num_servers, transport=cfg.transport or Transport.disk)
    if cfg.servers not in (None, num_replicas):
        raise ValueError(
            f"rollout.vllm.servers is {cfg.servers} and rollout.engine is vllm_colocated, which has one server for each of the actor's "
            f"{num_replicas} data-parallel replicas: remove rollout.vllm.servers, or use rollout.engine=vllm_pool"
        )
    transport = cfg.transport or (Transport.ipc if on_cuda else Transport.disk)
    if transport is Transport.ipc and recipe.parallel.pp > 1:
        raise ValueError(
            f"rollout.vllm.transport is ipc and parallel.pp is {recipe.parallel.pp}: with stages no rank holds all tensors; set "
            "rollout.vllm.transport=disk, or parallel.pp=1"
        )
    return replace(cfg, servers=num_replicas, transport=transport)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where one rank of the actor runs."""

    replica: int
    """Data-parallel rank."""
    stage: int
    """Pipeline rank."""
    tp_rank: int
    host: str
    gpu: str
    """Its name in CUDA_VISIBLE_DEVICES."""


def replica_gpus(seats: Sequence[Seat]) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each replica's server: the GPUs of its ranks, by stage and TP rank.

    Raises ValueError where the actor runs on several machines: rank 0 starts the servers, on its own.
    """
    hosts = sorted({seat.host for seat in seats})
    if len(hosts) > 1:
        raise ValueError(
            f"rollout.engine is vllm_colocated and the actor runs on {len(hosts)} machines ({', '.join(hosts)}); the servers are started "
            "on one: use one machine, or rollout.engine=vllm_pool"
        )
    ordered = sorted(seats, key=lambda seat: (seat.replica, seat.stage, seat.tp_rank))
    replicas = sorted({seat.replica for seat in seats})
    return [",".join(seat.gpu for seat in ordered if seat.replica == replica) for replica in replicas]
