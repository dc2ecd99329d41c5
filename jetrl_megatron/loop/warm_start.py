"""The short supervised run before step 0: teaches the answers' form, so that rewards are not all zero.

Enters: a session, WarmStartConfig. Leaves: an HF directory `warm_start` in the run directory, complete or not there; the run, its
reference policy and every resume start from that directory. It runs in the actor's training precision. A killed warm start begins again
from its seed.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

import torch

from jetrl_megatron.config import Decay
from jetrl_megatron.contracts import Sample, TrainBatch
from jetrl_megatron.data.prompts import target_token_ids
from jetrl_megatron.grpo.batch import supervised_sample
from jetrl_megatron.grpo.loss import supervised_loss
from jetrl_megatron.loop.learn import pack
from jetrl_megatron.loop.persist import export_hf
from jetrl_megatron.loop.replicas import add_up, any_true
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.run.signals import StopSignal

PROGRESS_EVERY = 20


def warm_start_dir(session: Session) -> Path:
    """Return where the warm-started weights lie once they are complete."""
    return session.run_dir.path / "warm_start"


def run_warm_start(session: Session, stop: StopSignal) -> bool:
    """Train on the targets and export; the actor holds the weights before and after. Returns False when a stop signal ended it early.

    Raises:
        ValueError: when no training prompt has a target text.
    """
    cfg, recipe = session.recipe.warm_start, session.recipe
    samples = _supervised(session)
    optim = replace(recipe.optim, lr=cfg.lr, min_lr=0.0, decay=Decay.linear, decay_steps=cfg.steps, warmup_steps=max(1, cfg.steps // 20))
    session.actor.start_optimizer(optim, cfg.steps)
    draw = random.Random(f"{recipe.run.seed}/warm_start")
    for step in range(1, cfg.steps + 1):
        if stop.should_stop(lambda flag: any_true(flag, session.device)):
            return False
        chosen = draw.sample(samples, min(cfg.batch_seqs, len(samples)))
        sums = session.actor.train_step(pack(session, chosen), _loss, session.phases)
        sums.pop("grad_norm")
        if step % PROGRESS_EVERY == 0 or step == cfg.steps:
            total = add_up(sums)
            if session.ranks.is_logger:
                print(
                    f"warm start {step}/{cfg.steps}  loss {float(total['nll'] / total['toks']):.3f} nats a token",
                    file=sys.stderr,
                    flush=True,
                )
    session.actor.version = 0
    export_hf(session, warm_start_dir(session))
    return True


def _loss(logp: torch.Tensor, entropy: torch.Tensor, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return supervised_loss(logp, batch)


def _supervised(session: Session) -> list[Sample]:
    targets = session.train_prompts.targets
    samples = [
        supervised_sample(p, target_token_ids(session.tokenizer, targets[p.id])) for p in session.train_prompts.prompts if p.id in targets
    ]
    if not samples:
        raise ValueError(
            f"warm_start.steps is {session.recipe.warm_start.steps} but no prompt of data.train has a target text; "
            "set warm_start.steps=0 or train on a set with worked answers (gsm8k, arithmetic)"
        )
    return samples
