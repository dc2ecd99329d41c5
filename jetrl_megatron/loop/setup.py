"""From a recipe to everything a run holds: a `Session`, equal on all ranks where it must be.

Enters: Recipe, argv. Leaves: process groups, run directory, start weights, tokenizer, prompts, actor, rollout engine, reward workers.
Order: whatever a user can have got wrong (layout, data, tokenizer, reward function) fails before the model is built.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from conversion.architecture import ModelArchitecture
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import local_device
from jetrl_megatron.actor.flash import resolve_attention, resolve_backward
from jetrl_megatron.config import Engine, Recipe
from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.data.order import PromptOrder
from jetrl_megatron.data.prompts import PromptSet, load_prompts
from jetrl_megatron.data.tokenizer import load_tokenizer, stop_token_ids, tokenizer_digests
from jetrl_megatron.fp8 import resolve_backend
from jetrl_megatron.grpo.rewards import RewardPool, gold_parses
from jetrl_megatron.layout import architecture_of, check_recipe_layout
from jetrl_megatron.loop.checks import (
    check_lengths,
    check_number_of_prompts,
    check_prompts,
    check_stop_ids,
    warn_embedded_engine,
    warn_uncorrected,
)
from jetrl_megatron.loop.replicas import is_replica_leader
from jetrl_megatron.loop.rollouts import Rollouts
from jetrl_megatron.loop.synthetic_model import write_synthetic_model
from jetrl_megatron.rollout.background_draw import BackgroundDraw
from jetrl_megatron.rollout.engine import RolloutEngine
from jetrl_megatron.rollout.local import LocalEngine
from jetrl_megatron.run.phases import Phases
from jetrl_megatron.run.run_dir import RunDir, claim_data, open_run_dir

if TYPE_CHECKING:  # it brings in the vLLM pool, which a run on the local engine does not load
    from jetrl_megatron.sync.publish import Publisher

_LOG = logging.getLogger(__name__)
_LEAVE_S = 10.0
"""How long a run that failed waits for a draw whose servers were stopped, before it ends the process groups under it."""


@dataclass(kw_only=True)
class Session:
    """What one rank of a run holds."""

    recipe: Recipe
    ranks: parallel_state.Ranks
    device: torch.device
    run_dir: RunDir
    source_dir: Path
    """The HF directory that the run starts from; its config is copied at export."""
    tokenizer_dir: Path
    """Where the tokenizer was loaded from: `source_dir` unless `model.tokenizer` names another; copied at export."""
    arch: ModelArchitecture
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    train_prompts: PromptSet
    eval_prompts: PromptSet | None
    order: PromptOrder
    rewards: RewardPool | None
    """Only on the leader of each replica."""
    phases: Phases
    actor: Actor = field(init=False)
    engine: RolloutEngine = field(init=False)
    publisher: "Publisher | None" = None
    """Pushes weights to an engine that holds its own; None where the engine computes with the actor's."""
    pending: Rollouts | None = None
    """Scored rollouts of the next step, where they were drawn while the last one was learned."""
    drawing: BackgroundDraw | None = None
    """The draw that runs beside the update now."""
    on_close: list[Callable[[], None]] = field(default_factory=list)

    def sampling(self) -> SamplingParams:
        """How training completions are drawn."""
        cfg = self.recipe.rollout
        return SamplingParams(
            max_new_toks=cfg.max_new_toks, temperature=cfg.temperature, top_p=cfg.top_p, top_k=cfg.top_k, stop_token_ids=self.stop_ids
        )

    def close(self) -> None:
        """End engine servers, worker processes and process groups."""
        for end in self.on_close:
            end()
        if self.drawing is not None and not self.drawing.leave(_LEAVE_S):
            _LOG.warning("the draw of the next step did not end with the servers; it ends with this process")
        if self.rewards is not None:
            self.rewards.close()
        parallel_state.destroy()


def open_session(recipe: Recipe, argv: list[str], evaluate_only: bool = False) -> Session:
    """Build everything but the actor; `evaluate_only` reads no training prompts and puts the held-out ones in their place.

    Raises:
        ValueError: for anything wrong in the recipe, the data, the model directory or the run directory.
    """
    check_recipe_layout(recipe)
    device = local_device()
    _seed(recipe, device)
    ranks = parallel_state.initialize(recipe.parallel, device)
    run_dir = open_run_dir(recipe, argv, str(device), ranks.rank, resolved_kernels(recipe, device))
    source = _source_dir(recipe, run_dir, ranks)
    arch = ModelArchitecture.from_hf_directory(source)
    tokenizer_dir = Path(recipe.model.tokenizer) if recipe.model.tokenizer else source
    tokenizer = load_tokenizer(tokenizer_dir)
    rewards = RewardPool(recipe.reward) if is_replica_leader() else None
    stop_ids = stop_token_ids(source, tokenizer)
    check_stop_ids(stop_ids, arch)
    eval_prompts = load_held_out(recipe, tokenizer, arch) if recipe.data.eval else None
    if evaluate_only:
        assert eval_prompts is not None, "an evaluation needs data.eval"
        train_prompts = eval_prompts
    else:
        train_prompts = _load_train(recipe, tokenizer, arch)
    if ranks.is_logger and any(train_prompts.dropped.values()):
        _LOG.warning("prompts left out of %d: %s", len(train_prompts.prompts), dict(train_prompts.dropped))
    if ranks.is_logger and not evaluate_only:
        sets = {"data.train": train_prompts, "data.eval": eval_prompts}
        warn_uncorrected(recipe)
        warn_embedded_engine(recipe, device.type == "cuda")
        prints = {key: (len(s.prompts), s.fingerprint) if s is not None else (0, "") for key, s in sets.items()}
        claim_data(run_dir, prints, tokenizer_digests(tokenizer_dir), stop_ids, asdict(arch))
    synchronize = torch.cuda.synchronize if device.type == "cuda" else None
    return Session(
        recipe=recipe,
        ranks=ranks,
        device=device,
        run_dir=run_dir,
        source_dir=source,
        tokenizer_dir=tokenizer_dir,
        arch=arch,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        order=PromptOrder(len(train_prompts.prompts), train_prompts.fingerprint, recipe.run.seed, recipe.data.shuffle),
        rewards=rewards,
        phases=Phases(synchronize=synchronize),
    )


def resolved_kernels(recipe: Recipe, device: torch.device) -> dict[str, str]:
    """Return which kernels run on `device`, by the recipe's key: `auto` depends on what is installed, which may change under a run.

    Raises ValueError where one that is asked for cannot run.
    """
    precision, head_dim = recipe.precision, architecture_of(recipe.model).head_dim
    attention = resolve_attention(precision.attention, device)
    backward = resolve_backward(precision.attention_backward, attention, head_dim, deterministic=recipe.run.deterministic)
    return {
        "precision.attention": attention.value,
        "precision.attention_backward": backward.value,
        "precision.backend": resolve_backend(precision.backend, device).value,
    }


def load_held_out(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arch: ModelArchitecture) -> PromptSet:
    """Load and check the prompts of `data.eval`; raises ValueError where they, the tokenizer and the model do not agree."""
    found = load_prompts(recipe.data, "eval", tokenizer, partial(gold_parses, cfg=recipe.reward))
    check_prompts(found.prompts, arch)
    check_lengths((), found.prompts, arch, recipe)
    return found


def _load_train(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, arch: ModelArchitecture) -> PromptSet:
    found = load_prompts(recipe.data, "train", tokenizer, partial(gold_parses, cfg=recipe.reward))
    check_prompts(found.prompts, arch)
    check_lengths(found.prompts, (), arch, recipe)
    check_number_of_prompts(found, recipe)
    return found


def build_actor(session: Session, weights_dir: Path | None, *, trainable: bool = True) -> None:
    """Load the actor from `weights_dir`, or draw random weights where it is None, and put the rollout engine on it."""
    recipe = session.recipe
    session.actor = Actor(recipe, session.arch, weights_dir, session.ranks, session.device, trainable=trainable)
    build_engine(session)


def build_engine(session: Session) -> None:
    """Give the session the engine that its recipe names, and the publisher that keeps it current where it holds weights of its own.

    Raises:
        ValueError: for servers that this machine, model or layout cannot have.
    """
    recipe = session.recipe
    if recipe.rollout.engine is Engine.local:
        session.engine = LocalEngine(session.actor, recipe.rollout.max_batch_seqs)
    else:
        from jetrl_megatron.loop.vllm_setup import build_vllm

        pool, session.publisher = build_vllm(recipe, session.actor, session.run_dir.path, session.source_dir)
        session.engine = pool
        session.on_close += [session.publisher.close, pool.close]


def _seed(recipe: Recipe, device: torch.device) -> None:
    """Seed what is not keyed by step: nothing of the loop draws from these, but a user's reward function or a library may."""
    random.seed(recipe.run.seed)
    np.random.seed(recipe.run.seed % 2**32)
    torch.manual_seed(recipe.run.seed)
    if recipe.run.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=device.type == "cuda")
        # Torch would also write NaN into every new tensor: a kernel for each of some 60 a layer. Here what is read has been written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _source_dir(recipe: Recipe, run_dir: RunDir, ranks: parallel_state.Ranks) -> Path:
    """Return the HF directory to start from, writing the synthetic one on rank 0 where the recipe names none."""
    if recipe.model.path:
        return Path(recipe.model.path)
    if ranks.is_logger:
        write_synthetic_model(run_dir.initial_model, recipe.model.synthetic, recipe.run.seed)
    parallel_state.barrier()
    return run_dir.initial_model
