"""From a recipe to vLLM servers with the actor's weights, on other GPUs or its own: the engine, and the publisher that keeps it current.

Enters: a session with its actor. Leaves: `VllmEngine` and `Publisher`, parts of one rank; servers start at the first push. Whatever a user
can have got wrong (version of vLLM, TP degree of the servers, GPUs, transport) fails here, on every rank, before a server is started.
`check_servers`, `server_spec`, `server_pool` and `chosen_gpus` need no actor: a bench of servers alone uses them too.
"""

import logging
import os
import socket
from pathlib import Path
from typing import Any

import torch

from conversion.architecture import ModelArchitecture
from conversion.layout import ParallelLayout, check_layout
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.config import Engine, LinearPrecision, Recipe, ScaleFormat, Transport, VllmConfig, WeightLoad
from jetrl_megatron.loop.colocated import Seat, replica_gpus, settle_vllm
from jetrl_megatron.loop.replicas import is_replica_leader
from jetrl_megatron.rollout.compat import check_engine, request_fields, vllm_version
from jetrl_megatron.rollout.vllm_auth import key_of_environment
from jetrl_megatron.rollout.vllm_client import EngineClient
from jetrl_megatron.rollout.vllm_engine import Place, RunGroup, VllmEngine
from jetrl_megatron.rollout.vllm_pool import PoolLimits, ServerPool
from jetrl_megatron.rollout.vllm_server import ServerSpec, VllmServer, new_key
from jetrl_megatron.sync.disk import DiskTransport
from jetrl_megatron.sync.publish import Publisher
from jetrl_megatron.sync.transport import Transport as Pushes
from jetrl_megatron.sync.transport import engine_config
from jetrl_megatron.sync.wire import server_fp8

_LOG = logging.getLogger(__name__)


def build_vllm(recipe: Recipe, actor: Actor, run_dir: Path, source_dir: Path) -> tuple[VllmEngine, Publisher]:
    """Return engine and publisher of this rank.

    run_dir: of the run; logs and published weights go into it. source_dir: the run's HF directory.
    Raises ValueError for anything wrong in `rollout.vllm`.
    """
    colocated = recipe.rollout.engine is Engine.vllm_colocated
    on_cuda = actor.device.type == "cuda"
    cfg = settle_vllm(recipe, actor.ranks.dp, on_cuda)
    check_vllm(recipe, cfg, actor.arch, on_cuda)
    if colocated and not on_cuda and actor.ranks.is_logger:
        _LOG.warning(
            "rollout.engine is vllm_colocated on a CPU: the servers go to sleep and wake as on GPUs, but there is nothing to release"
        )
    group = RunGroup(cfg.start_timeout_s + cfg.request_timeout_s * (cfg.max_repeats + 1) + cfg.push_timeout_s)
    gpus = _gpus(cfg, actor, group, colocated)
    spec = server_spec(recipe, cfg, actor.arch, on_cuda, run_dir)
    pool = server_pool(recipe, cfg, actor.arch, spec, gpus, source_dir) if group.rank == 0 else None
    transport = _transport(cfg, actor, group, run_dir, source_dir)
    publisher = Publisher(actor, pool, transport, group, everywhere=cfg.transport is Transport.ipc, shares_device=colocated)
    place = Place(
        replica=actor.ranks.dp_rank,
        is_leader=is_replica_leader(),
        max_positions=actor.arch.max_positions,
        vocab_size=actor.arch.vocab_size,
        slots=cfg.max_num_seqs,
        max_repeats=cfg.max_repeats,
        shares_device=colocated,
    )
    engine = VllmEngine(pool, group, place, lambda: _again(publisher, actor.device))
    return engine, publisher


def check_vllm(recipe: Recipe, cfg: VllmConfig, arch: ModelArchitecture, on_cuda: bool) -> None:
    """Raise ValueError where this machine, model or layout cannot have the servers of `cfg`, which `settle_vllm` gave."""
    assert cfg.transport is not None, "not settled"
    short = check_servers(recipe, cfg, arch)
    if cfg.transport is not Transport.disk and not (on_cuda and short == "0.26"):
        raise ValueError(
            f"rollout.vllm.transport is {cfg.transport.value}, which needs CUDA and vLLM 0.26; this is vLLM {short} on "
            f"{'cuda' if on_cuda else 'cpu'}: use rollout.vllm.transport=disk"
        )
    if cfg.transport is not Transport.disk and cfg.urls:
        raise ValueError(f"rollout.vllm.urls needs rollout.vllm.transport=disk, not {cfg.transport.value}")


def check_servers(recipe: Recipe, cfg: VllmConfig, arch: ModelArchitecture) -> str:
    """Return the version of vLLM; raises ValueError where it or the model cannot have the servers of `cfg`, however filled."""
    short = check_engine()
    fp8 = recipe.precision.rollout_linear is LinearPrecision.fp8
    layout = ParallelLayout(tp=cfg.tp, row_parallel="k_split")
    try:
        check_layout(arch, layout, fp8=fp8, bf16_layers=recipe.precision.bf16_layers)
    except ValueError as error:
        raise ValueError(f"rollout.vllm.tp is {cfg.tp}: {error}") from error
    if arch.family == "qwen2" and arch.head_dim * arch.num_heads != arch.hidden_size:
        raise ValueError(
            f"the model's head_dim is {arch.head_dim}, with {arch.num_heads} heads and hidden_size {arch.hidden_size}: vLLM's qwen2 does "
            f"not read head_dim and takes {arch.hidden_size // arch.num_heads}; use rollout.engine=local, or another head_dim"
        )
    return short


def _gpus(cfg: VllmConfig, actor: Actor, group: RunGroup, colocated: bool) -> list[str]:
    """Return, on every rank, CUDA_VISIBLE_DEVICES of each server; empty ones on a CPU."""
    if actor.device.type != "cuda":
        return [""] * cfg.num_servers
    if not colocated:
        return server_gpus(cfg, actor.ranks.world)
    ranks = actor.ranks
    assert actor.device.index is not None
    gpu = visible_gpus()[actor.device.index]
    seat = Seat(replica=ranks.dp_rank, stage=ranks.pp_rank, tp_rank=ranks.tp_rank, host=socket.gethostname(), gpu=gpu)
    return replica_gpus(group.from_first(group.to_first(seat)))


def server_spec(recipe: Recipe, cfg: VllmConfig, arch: ModelArchitecture, on_cuda: bool, run_dir: Path) -> ServerSpec:
    """Return how the recipe's servers are started; their logs go into `run_dir`. cfg: from `settle_vllm`."""
    assert cfg.transport is not None
    formats = recipe.precision.rollout_scale_format or recipe.precision.scale_format
    return ServerSpec(
        tp=cfg.tp,
        max_model_len=arch.max_positions,
        max_num_seqs=cfg.max_num_seqs,
        gpu_memory_utilization=cfg.gpu_memory_utilization,
        kv_cache_gib=cfg.kv_cache_gib,
        cuda_graphs=cfg.cuda_graphs and on_cuda,
        prefix_caching=cfg.prefix_caching,
        transport=cfg.transport.value,
        in_place=cfg.load is WeightLoad.in_place,
        power_of_two_scales=formats is ScaleFormat.ue8m0,
        on_cuda=on_cuda,
        log_dir=run_dir / "engines",
        start_timeout_s=cfg.start_timeout_s,
        sleeps=recipe.rollout.engine is Engine.vllm_colocated,
    )


def server_pool(
    recipe: Recipe, cfg: VllmConfig, arch: ModelArchitecture, spec: ServerSpec, gpus: list[str], source_dir: Path
) -> ServerPool:
    """Return the pool of the recipe's servers, not yet started.

    gpus: CUDA_VISIBLE_DEVICES of each. source_dir: the run's HF directory.
    """
    key = key_of_environment() if cfg.urls else new_key()
    servers = [VllmServer(number, spec, key, gpus[number]) for number in range(cfg.num_servers)]
    clients = [EngineClient(url=url.rstrip("/"), key=key, fields=request_fields(vllm_version())) for url in cfg.urls]
    limits = PoolLimits(request_timeout_s=cfg.request_timeout_s, push_timeout_s=cfg.push_timeout_s, max_restarts=cfg.max_restarts)
    return ServerPool(servers, clients, engine_config(arch, server_fp8(recipe, arch), source_dir), limits)


def visible_gpus() -> list[str]:
    """Return the names by which CUDA_VISIBLE_DEVICES speaks of this machine's GPUs, those of the actor's processes first."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def server_gpus(cfg: VllmConfig, num_actors: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each server: as the recipe says, or the GPUs behind the actor's.

    Raises ValueError where there are too few, where one that NCCL joins with the actor is the actor's own, and where one that CUDA IPC
    reaches is not.
    """
    visible, chosen = visible_gpus(), chosen_gpus(cfg, num_actors)
    shared = sorted({gpu for gpus in chosen for gpu in gpus.split(",")} & set(visible[:num_actors]))
    if shared and cfg.transport is Transport.nccl:
        raise ValueError(
            f"rollout.vllm.gpus puts servers on GPU {', '.join(shared)}, where the actor runs: NCCL cannot join two processes on one GPU; "
            "use other GPUs, or rollout.vllm.transport=disk or ipc"
        )
    others = sorted({gpu for gpus in chosen for gpu in gpus.split(",")} - set(visible[:num_actors]))
    if others and cfg.transport is Transport.ipc:
        raise ValueError(
            f"rollout.vllm.transport is ipc and there are servers on GPU {', '.join(others)}, where no process of the actor runs: name the "
            "actor's GPUs in rollout.vllm.gpus, or use rollout.engine=vllm_colocated, or rollout.vllm.transport=nccl or disk"
        )
    return chosen


def chosen_gpus(cfg: VllmConfig, num_actors: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each server, whatever brings its weights; raises ValueError where there are too few GPUs."""
    visible, needed = visible_gpus(), num_actors + cfg.num_servers * cfg.tp
    if not cfg.gpus and len(visible) < needed:
        raise ValueError(
            f"{num_actors} actor processes and rollout.vllm.servers={cfg.num_servers} of tp={cfg.tp} need {needed} GPUs and this machine "
            f"has {len(visible)}: use fewer, or let them share with rollout.vllm.gpus and a lower rollout.vllm.gpu_memory_utilization"
        )
    firsts = range(num_actors, needed, cfg.tp)
    return list(cfg.gpus) or [",".join(visible[first : first + cfg.tp]) for first in firsts]


def _transport(cfg: VllmConfig, actor: Actor, group: RunGroup, run_dir: Path, source_dir: Path) -> Pushes:
    root = Path(cfg.weights_dir) if cfg.weights_dir else run_dir / "engine_weights"
    if cfg.transport is Transport.disk:
        return DiskTransport(root.absolute(), source_dir, actor, group, engine_tp=cfg.tp, timeout_s=cfg.push_timeout_s)
    options: dict[str, Any] = {"engine_tp": cfg.tp, "timeout_s": cfg.push_timeout_s, "in_place": cfg.load is WeightLoad.in_place}
    if cfg.transport is Transport.nccl:
        from jetrl_megatron.sync.cuda import NcclTransport

        return NcclTransport(root.absolute(), source_dir, group, **options)
    from jetrl_megatron.sync.ipc import IpcTransport

    return IpcTransport(root.absolute(), source_dir, group, **options)


def _again(publisher: Publisher, device: torch.device) -> None:
    """Push once more; also from the thread of a draw, which begins on the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    publisher.push()
