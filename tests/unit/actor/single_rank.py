"""An actor in the test's own process: one rank, the smallest models."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conversion.architecture import ModelArchitecture
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import local_device
from jetrl_megatron.config import OptimConfig, ParallelConfig, PrecisionConfig, Recipe
from jetrl_megatron.contracts import Sample, TrainBatch
from tests.dist.actor_run import batches_of, fixed_samples, weighted_loss
from tests.packed_values import unpack_per_position

OPTIM = OptimConfig(lr=1e-3, clip_grad=0.0)


@contextmanager
def single_rank_actor(
    hf_dir: Path, precision: PrecisionConfig, parallel: ParallelConfig | None = None, optim: OptimConfig = OPTIM
) -> Iterator[Actor]:
    """Build an actor with an optimizer on one process and tear the groups down afterwards."""
    torch.set_num_threads(1)
    device = local_device()
    parallel = parallel or ParallelConfig(micro_batch_toks=1024)
    ranks = parallel_state.initialize(parallel, device)
    try:
        recipe = replace(Recipe(), precision=precision, parallel=parallel, optim=optim)
        actor = Actor(recipe, ModelArchitecture.from_hf_directory(hf_dir), hf_dir, ranks, device)
        actor.start_optimizer(recipe.optim, total_steps=10)
        yield actor
    finally:
        parallel_state.destroy()


@contextmanager
def trained_actor(hf_dir: Path, optim: OptimConfig, steps: int, state: dict[str, Any] | None = None) -> Iterator[Actor]:
    """An actor of arm `jetrl` that took `steps` steps, behind loading `state` if there is one."""
    with single_rank_actor(hf_dir, PrecisionConfig(), optim=optim) as actor:
        if state is not None:
            actor.load_state_dict(state)
        for _ in range(steps):
            take_step(actor, few_batches(actor))
        yield actor


def few_samples(actor: Actor) -> list[Sample]:
    """Four short sequences that fill one micro-batch of 128 positions, the last prompt the longest."""
    return fixed_samples(actor.arch.vocab_size)[:4]


def few_batches(actor: Actor) -> list[TrainBatch]:
    """The micro-batch of `few_samples`."""
    return batches_of(few_samples(actor), actor, 1024)


def take_step(actor: Actor, batches: Sequence[TrainBatch]) -> dict[str, torch.Tensor]:
    """One optimizer step of the plain weighted loss; returns its sums."""
    return actor.train_step(batches, weighted_loss, lambda name: nullcontext())


def gradients(actor: Actor) -> dict[str, torch.Tensor]:
    """A copy of every FP32 gradient, by Megatron name."""
    return {name: p.main_grad.clone() for name, p in actor.chunks[0].named_parameters()}


def parameters(actor: Actor) -> dict[str, torch.Tensor]:
    """A copy of every BF16 parameter, by Megatron name."""
    return {name: p.detach().clone() for name, p in actor.chunks[0].named_parameters()}


def completion_logprobs(actor: Actor, samples: Sequence[Sample]) -> list[list[float]]:
    """The training forward's log-probs of every sample's completion."""
    batches = batches_of(list(samples), actor, 1024)
    found: dict[int, list[float]] = {}
    for (logp, _), batch in zip(actor.logprobs(batches), batches, strict=True):
        found |= {i: values.tolist() for i, values in unpack_per_position(logp, batch, samples).items()}
    return [found[i] for i in range(len(samples))]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """|a - b| / |a| over all tensors, L2."""
    return float(torch.stack([(a[n] - b[n]).norm() for n in a]).norm() / torch.stack([a[n].norm() for n in a]).norm())
