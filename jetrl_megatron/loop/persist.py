"""Checkpoints of a session, and the Hugging Face export.

Enters: a session at a step boundary. Leaves: `checkpoints/step_N` through the store (complete or invisible), or an HF directory. A
checkpoint holds this rank's parameters, FP32 masters, moments and curve, the position in the data, and the rollouts that were drawn ahead
of the next step, behind which that position is: the weights that drew them are gone. Everything else is a function of seed and step.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from conversion.actor_io import merge_to_hf, write_rank_shards
from jetrl_megatron.actor.parallel_state import barrier
from jetrl_megatron.data.tokenizer import replace_tokenizer
from jetrl_megatron.loop.replicas import all_true
from jetrl_megatron.loop.rollouts import Rollouts
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.run.store import Checkpoint, CheckpointStore, Ranks

ACTOR_FILE = "actor.pt"
PENDING_FILE = "pending_rollouts.pt"
"""In rank 0's folder, where the next step's rollouts exist already; every rank holds the same ones."""


def open_store(session: Session) -> CheckpointStore:
    """Return the run's checkpoint store."""
    ranks = Ranks(
        rank=session.ranks.rank,
        num_ranks=session.ranks.world,
        barrier=barrier,
        all_true=lambda flag: all_true(flag, session.device),
    )
    return CheckpointStore(session.run_dir.checkpoints, session.recipe.run.keep_last, ranks)


def save(session: Session, store: CheckpointStore, step: int) -> None:
    """Save the session as it is after `step` steps."""
    state, pending = session.actor.state_dict(), session.pending

    def write(folder: Path) -> None:
        write_state(state, folder / ACTOR_FILE)
        if pending is not None and session.ranks.rank == 0:
            write_state(pending.state_dict(), folder / PENDING_FILE)

    with session.phases("save"):
        store.save(step, write, meta={"order": session.order.state_dict(), **_layout(session)})


def write_state(state: Mapping[str, Any], path: Path) -> None:
    """Write a state dict; raises OSError naming the file where there is no room, which torch by itself reports as a broken archive."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def restore(session: Session, checkpoint: Checkpoint) -> int:
    """Load a checkpoint into the session; returns its step.

    Raises:
        ValueError: when it was written by another layout or over other data.
    """
    written, here = {k: checkpoint.meta.get(k) for k in _layout(session)}, _layout(session)
    if written != here:
        raise ValueError(
            f"checkpoint {checkpoint.path} was written with {written}, this run has {here}: resume with the same processes and layout"
        )
    state = torch.load(checkpoint.rank_dir(session.ranks.rank) / ACTOR_FILE, map_location=session.device, weights_only=True)
    session.actor.load_state_dict(state)
    session.order.load_state_dict(dict(checkpoint.meta["order"]))
    pending = checkpoint.rank_dir(0) / PENDING_FILE
    if pending.exists():
        known = {p.id: p for p in session.train_prompts.prompts}
        session.pending = Rollouts.from_state_dict(torch.load(pending, weights_only=True), known)
    return checkpoint.step


def _layout(session: Session) -> Mapping[str, Any]:
    r, layout = session.ranks, session.actor.layout
    return {"tp": r.tp, "pp": r.pp, "dp": r.dp, "vpp": layout.vpp, "row_parallel": layout.row_parallel}


def export_hf(session: Session, out_dir: Path) -> None:
    """Write the actor's BF16 weights as an HF directory that appears by one rename; an earlier one at `out_dir` is replaced.

    It carries the tokenizer that the run trains with, also where that is not the one beside the weights it started from.
    """
    actor, ranks = session.actor, session.ranks
    shards = out_dir.with_name(out_dir.name + ".shards")
    fresh = out_dir.with_name(out_dir.name + ".new")
    if ranks.is_logger:
        shutil.rmtree(shards, ignore_errors=True)
        shutil.rmtree(fresh, ignore_errors=True)
    barrier()
    if ranks.dp_rank == 0:
        chunks: list[Mapping[str, torch.Tensor]] = [{n: p.detach() for n, p in chunk.named_parameters()} for chunk in actor.chunks]
        write_rank_shards(shards, actor.arch, actor.layout, (ranks.pp_rank, ranks.tp_rank), chunks)
    barrier()
    if ranks.is_logger:
        merge_to_hf(shards, fresh, session.source_dir, actor.arch, actor.layout)
        if session.tokenizer_dir != session.source_dir:
            replace_tokenizer(fresh, session.tokenizer_dir)
        shutil.rmtree(out_dir, ignore_errors=True)
        fresh.rename(out_dir)
        shutil.rmtree(shards)
    barrier()
