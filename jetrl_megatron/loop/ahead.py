"""The next step's rollouts, drawn while this step learns (`rollout.max_staleness=1`).

Enters: the session at the start of a step, its engine verified to hold the actor's weights. Leaves: `session.pending`, the scored rollouts
of the next step. With R_s the rollouts of step s:

    begin(s + 1) | learn R_s in the foreground, the engines draw R_(s+1) with version s - 1 in the background | finish | push version s

Only the engine's draw runs in the background; prompts are taken before it and rewards are scored after it, in the foreground, since both
use the actor's groups or change what a checkpoint holds. Nothing is drawn ahead for a step behind `run.steps`, so a run that is made longer
after its end draws the first of its new steps in turn.
"""

from dataclasses import dataclass

from jetrl_megatron.contracts import Prompt
from jetrl_megatron.loop.collect import draw_seed, own_failures, requests_of, reward_failures, score_and_share, take_prompts
from jetrl_megatron.loop.rollouts import Rollouts
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.rollout.background_draw import BackgroundDraw
from jetrl_megatron.rollout.engine import DrawsAhead, Request


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """A step's draw under way."""

    prompts: list[Prompt]
    requests: list[Request]
    """This replica's."""
    draw: BackgroundDraw


def begin(session: Session, step: int) -> Ahead | None:
    """Start to draw the rollouts of `step`; None where the recipe draws nothing ahead or the run ends before."""
    cfg = session.recipe
    if cfg.rollout.max_staleness == 0 or step > cfg.run.steps:
        return None
    assert isinstance(session.engine, DrawsAhead), session.engine
    prompts = take_prompts(session, cfg.rollout.prompts_per_step)
    requests = requests_of(session, prompts, cfg.rollout.group_size)
    session.drawing = session.engine.begin(requests, session.sampling(), seed=draw_seed(cfg.run.seed, step))
    return Ahead(prompts=prompts, requests=requests, draw=session.drawing)


def finish(session: Session, ahead: Ahead) -> Rollouts:
    """Wait for the draw and score it; the actor must have learned. Raises what the draw raised."""
    with session.phases("draw_wait"):
        completions = ahead.draw.join()
    session.drawing = None
    failed_before, rollouts = own_failures(session), Rollouts()
    rollouts.add(ahead.prompts, score_and_share(session, ahead.prompts, ahead.requests, completions))
    rollouts.reward_failures = reward_failures(session, failed_before)
    return rollouts
