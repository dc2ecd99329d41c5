"""An actor in the test's own process: one rank, the smallest models."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from conversion.architecture import ModelArchitecture
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import local_device
from jetrl_megatron.config import OptimConfig, ParallelConfig, PrecisionConfig, Recipe


@contextmanager
def single_rank_actor(hf_dir: Path, precision: PrecisionConfig, parallel: ParallelConfig | None = None) -> Iterator[Actor]:
    """Build an actor with an optimizer on one process and tear the groups down afterwards."""
    torch.set_num_threads(1)
    device = local_device()
    parallel = parallel or ParallelConfig(micro_batch_toks=1024)
    ranks = parallel_state.initialize(parallel, device)
    try:
        recipe = replace(Recipe(), precision=precision, parallel=parallel, optim=OptimConfig(lr=1e-3))
        actor = Actor(recipe, ModelArchitecture.from_hf_directory(hf_dir), hf_dir, ranks, device)
        actor.start_optimizer(recipe.optim, total_steps=10)
        yield actor
    finally:
        parallel_state.destroy()
