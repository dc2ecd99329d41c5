"""Process groups: torch.distributed and Megatron's tensor, pipeline and data groups, set up once a process.

Enters: ParallelConfig and the environment of the launcher (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; absent: one process).
Leaves: Megatron's parallel state and a `Ranks` record. Gloo on CPUs, NCCL on GPUs.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from jetrl_megatron.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place."""

    rank: int
    world: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    dp: int
    dp_rank: int

    @property
    def is_logger(self) -> bool:
        """Whether this process prints and writes records: global rank 0."""
        return self.rank == 0


def initialize(parallel: ParallelConfig, device: torch.device, timeout_min: float = 30.0) -> Ranks:
    """Create the process groups of the layout.

    Raises:
        ValueError: when the world size is not a multiple of tp * pp; names the numbers and the way out.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model_ranks = parallel.tp * parallel.pp
    if world % model_ranks:
        raise ValueError(
            f"{world} processes cannot hold parallel.tp={parallel.tp} x parallel.pp={parallel.pp}: start a multiple of {model_ranks}"
        )
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        store = None if world > 1 else dist.HashStore()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=world,
            store=store,
            timeout=timedelta(minutes=timeout_min),
            # No device_id: with one, torch makes a communicator of every group at once, and Megatron has some thirty of which a run uses
            # a few. Each takes memory of the GPU that torch's allocator does not see.
        )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        create_gloo_process_groups=False,
    )
    if device.type == "cuda":
        # Megatron forks these generators under sequence parallelism and recompute; nothing draws from them, dropout is 0.
        model_parallel_cuda_manual_seed(0)
    return Ranks(
        rank=rank,
        world=world,
        tp=parallel.tp,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp=parallel.pp,
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        dp=mpu.get_data_parallel_world_size(),
        dp_rank=mpu.get_data_parallel_rank(),
    )


def destroy() -> None:
    """Tear the groups down, so that a test can build another layout in the same process."""
    mpu.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for every process of the run."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
