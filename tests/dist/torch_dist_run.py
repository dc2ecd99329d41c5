"""What one rank does in the distributed-checkpoint test: save the actor with Megatron-core, and load what the converter wrote."""

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu

from conversion.actor_io import load_hf_into_rank
from conversion.architecture import ModelArchitecture
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import local_device, megatron_scope
from jetrl_megatron.config import Arm, ParallelConfig, PrecisionConfig, RowParallel
from tests.dist.actor_run import recipe_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout; what Megatron saves goes to `save`, and `load` is a directory to load into the same ranks."""

    hf_dir: str
    parallel: ParallelConfig
    precision: PrecisionConfig
    save: str
    load: str


def case_of(hf_dir: Path, parallel: ParallelConfig, row_parallel: str, save: Path, load: Path) -> Case:
    """Return a BF16 case."""
    precision = PrecisionConfig(arm=Arm.bf16, row_parallel=RowParallel(row_parallel))
    return Case(hf_dir=str(hf_dir), parallel=parallel, precision=precision, save=str(save), load=str(load))


def run_cases(cases: list[Case]) -> list[list[str]]:
    """Return for each case the parameters that were loaded wrong, by chunk and name."""
    wrong = [_run(case) for case in cases]
    parallel_state.destroy()
    return wrong


def _run(case: Case) -> list[str]:
    device = local_device()
    ranks = parallel_state.initialize(case.parallel, device)
    arch = ModelArchitecture.from_hf_directory(case.hf_dir)
    actor = Actor(recipe_of(case.parallel, case.precision), arch, Path(case.hf_dir), ranks, device)
    wrong: list[str] = []
    with megatron_scope(device):
        if ranks.rank == 0:
            Path(case.save).mkdir(parents=True)
        parallel_state.barrier()
        # The chunks of one rank hold different layers under the same local names, so each has its own key here.
        states = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(actor.chunks)}
        dist_checkpointing.save(states, case.save)
        for parameter in (p for chunk in actor.chunks for p in chunk.parameters()):
            parameter.data.fill_(float("nan"))
        states = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(actor.chunks)}
        loaded = dist_checkpointing.load(states, case.load)
        for i, chunk in enumerate(actor.chunks):
            chunk.load_state_dict(loaded[f"model{i}"])
            expected = load_hf_into_rank(case.hf_dir, arch, actor.layout, pp_rank=ranks.pp_rank, tp_rank=ranks.tp_rank, vp_stage=i)
            mine = dict(chunk.named_parameters())
            wrong += [f"chunk {i}: {n}" for n, t in expected.items() if not torch.equal(mine[n].view(torch.int16), t.view(torch.int16))]
            wrong += [f"chunk {i}: {n} is no parameter of a shard" for n in mine.keys() - expected.keys()]
    mpu.destroy_model_parallel()
    return wrong
