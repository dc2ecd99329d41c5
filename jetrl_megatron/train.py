"""`jetrl train`: the loop, on every rank.

    prompts -> rollout -> rewards -> advantages -> batch -> log-probs, reference -> update -> quantise -> sync -> next version

Enters: a recipe. Leaves: records, checkpoints, an HF export, curves and summary.json in the run directory. Happens-before: a completion is
drawn with version v only after the optimizer step that made v has written BF16 parameters and they were quantised once. With
`rollout.max_staleness=1` the next step's rollouts are drawn beside the update, with the weights before it; no draw is under way in an
evaluation or a save. The run resumes by itself from the newest complete checkpoint and then continues bit for bit as if it had not stopped.
"""

import sys
import time

from jetrl_megatron.config import Recipe
from jetrl_megatron.grpo.advantages import make_samples
from jetrl_megatron.loop import ahead
from jetrl_megatron.loop.checks import check_checkpoints_are_there, check_records_are_there
from jetrl_megatron.loop.collect import collect
from jetrl_megatron.loop.held_out import evaluate
from jetrl_megatron.loop.learn import learn
from jetrl_megatron.loop.persist import export_hf, open_store, restore, save
from jetrl_megatron.loop.replicas import any_true
from jetrl_megatron.loop.setup import Session, build_actor, open_session
from jetrl_megatron.loop.warm_start import run_warm_start, warm_start_dir
from jetrl_megatron.metrics import Metrics
from jetrl_megatron.run.phases import BESIDE
from jetrl_megatron.run.report import close_run
from jetrl_megatron.run.signals import StopSignal
from jetrl_megatron.run.store import CheckpointStore


def train(recipe: Recipe, argv: list[str], json_lines: bool = False) -> int:
    """Run a recipe in this process, one rank of the run; returns the exit code (0: done, or stopped by a signal with everything saved).

    Raises:
        ValueError: for anything wrong in the recipe, the data or the run directory, before the first step.
    """
    start_s = time.perf_counter()
    with StopSignal(recipe.run.grace_s) as stop:
        session = open_session(recipe, argv)
        try:
            finished = _run(session, stop, json_lines)
            if finished and session.ranks.is_logger:
                close_run(session.run_dir, recipe.precision.arm.value, time.perf_counter() - start_s, json_lines=json_lines)
            stop.done()
        finally:
            session.close()
    return 0


def _run(session: Session, stop: StopSignal, json_lines: bool) -> bool:
    """Prepare, loop, export; returns False when a signal ended the run early."""
    recipe = session.recipe
    if not _prepare(session, stop):
        return False
    store = open_store(session)
    checkpoint = store.newest_complete()
    if checkpoint is None:
        check_checkpoints_are_there(session.run_dir, recipe.run.save_every)
    else:
        check_records_are_there(session.run_dir, checkpoint.step)
    done = restore(session, checkpoint) if checkpoint is not None else 0
    push(session)
    session.phases.take()
    metrics = Metrics(recipe.run, session.run_dir, done, json_lines=json_lines) if session.ranks.is_logger else None
    if done == 0:
        _evaluate(session, metrics, 0)
    for step in range(done + 1, recipe.run.steps + 1):
        if stop.should_stop(lambda flag: any_true(flag, session.device)):
            unsaved = step - 1 > done and (step - 1) % recipe.run.save_every != 0
            return _stop(session, store if unsaved else None, step - 1, metrics)
        _step(session, metrics, step)
        last = step == recipe.run.steps
        if last or (recipe.run.eval_every and step % recipe.run.eval_every == 0):
            _evaluate(session, metrics, step)
        if last or step % recipe.run.save_every == 0:
            save(session, store, step)
    if recipe.run.export_hf:
        export_hf(session, session.run_dir.hf)
    if metrics is not None:
        metrics.close()
    return True


def _prepare(session: Session, stop: StopSignal) -> bool:
    """Load the actor, warm-start it where asked, build the reference and the optimizer; returns False when a signal came."""
    recipe = session.recipe
    start_dir = session.source_dir
    if recipe.warm_start.steps:
        start_dir = warm_start_dir(session)
        if not start_dir.exists():
            build_actor(session, session.source_dir)
            if not run_warm_start(session, stop):
                return False
    build_actor(session, start_dir)
    if recipe.grpo.kl_coef > 0:
        session.actor.build_reference(start_dir)
    session.actor.start_optimizer(recipe.optim, recipe.run.steps * recipe.grpo.epochs * recipe.grpo.minibatches)
    return True


def _step(session: Session, metrics: Metrics | None, step: int) -> None:
    """Take one step of the loop and write its record."""
    recipe = session.recipe
    rollouts = session.pending or collect(session, step)
    begun = ahead.begin(session, step + 1)
    samples = make_samples(rollouts.prompts, rollouts.completions, rollouts.rewards, recipe.grpo, recipe.rollout.max_new_toks)
    rest(session)
    values = learn(session, samples)
    session.pending = ahead.finish(session, begun) if begun is not None else None
    push(session)
    seconds = session.phases.take()
    if begun is not None:
        seconds[BESIDE] = begun.draw.seconds
    if metrics is not None:
        counts = {"version": session.actor.version, "reward_failures": rollouts.reward_failures}
        parts = {"push_seconds": session.publisher.parts} if session.publisher is not None else {}
        metrics.log("step", step, {**values, **counts, "seconds": seconds, **parts})


def rest(session: Session) -> None:
    """Let an engine that holds its own weights give the actor's GPUs to the update; it draws again after the next push."""
    if session.publisher is not None:
        with session.phases("sync"):
            session.engine.rest()


def push(session: Session) -> None:
    """Bring the actor's current weights to an engine that holds its own; it serves only what it has verified."""
    if session.publisher is not None:
        with session.phases("sync"):
            session.publisher.push()


def _evaluate(session: Session, metrics: Metrics | None, step: int) -> None:
    """Evaluate where the recipe names held-out prompts, once a step."""
    if session.eval_prompts is None:
        return
    values = evaluate(session, session.eval_prompts)
    if metrics is not None and not metrics.has("eval", step):
        metrics.log("eval", step, values)


def _stop(session: Session, store: CheckpointStore | None, step: int, metrics: Metrics | None) -> bool:
    """Save at this boundary (`store` None: that is done already), say so, and end the run early."""
    if store is not None:
        save(session, store, step)
    if metrics is not None:
        metrics.close()
        print(f"stopped by a signal after step {step}; start the same command again to go on", file=sys.stderr, flush=True)
    return False
