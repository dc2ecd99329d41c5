"""Prompts to scored completions: one rollout batch, equal on every rank, in an order that timing cannot change.

Enters: the session at a step. Leaves: completions and rewards of whole groups. Each data-parallel replica draws its share of the prompts;
its leader scores them; then everybody holds everything. Dynamic sampling replaces groups without spread by fresh prompts.
`ahead.py` makes the same of a draw that runs beside the update.
"""

import logging
from collections.abc import Sequence

from jetrl_megatron.config import SEEDS_PER_STEP
from jetrl_megatron.contracts import Completion, Prompt, SamplingParams
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.grpo.advantages import groups_with_spread
from jetrl_megatron.grpo.rewards import with_open_think
from jetrl_megatron.loop.replicas import from_leader, gather_replicas
from jetrl_megatron.loop.rollouts import Rollouts
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.rollout.engine import Request

_LOG = logging.getLogger(__name__)


def score(session: Session, requests: Sequence[Request], completions: Sequence[Completion]) -> list[float]:
    """Return one reward a completion, scored by the replica's leader and known to its whole replica."""
    rewards = None
    if session.rewards is not None:
        texts = session.tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
        opened = [with_open_think(r.prompt.text, text) for r, text in zip(requests, texts, strict=True)]
        failed = session.rewards.counters.failures
        rewards = session.rewards.score(opened, [r.prompt.answer for r in requests])
        failed = session.rewards.counters.failures - failed
        if failed:
            _LOG.warning(
                "reward.function %s timed out or died on %d of %d samples, which score 0",
                session.recipe.reward.function,
                failed,
                len(opened),
            )
        if opened and failed == len(opened):
            raise RunFailure(
                f"reward.function {session.recipe.reward.function} timed out or died on all {failed} samples; raise reward.timeout_s "
                f"({session.recipe.reward.timeout_s:g} s) or reward.memory_mb, or mend the function"
            )
    return list(from_leader(rewards))


def own_failures(session: Session) -> int:
    """Return on how many samples the reward function failed since this process started, as this rank knows it (0 but on leaders)."""
    return session.rewards.counters.failures if session.rewards is not None else 0


def reward_failures(session: Session, before: int) -> int:
    """Return on how many samples the reward function failed since `own_failures` was `before`, over all replicas; equal on every rank."""
    return sum(gather_replicas(from_leader(own_failures(session) - before)))


def draw_and_score(
    session: Session, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams, seed: int
) -> list[tuple[Completion, float]]:
    """Draw `num_samples` completions a prompt over all replicas and score them; returns pairs, prompt after prompt, sample after sample."""
    mine = requests_of(session, prompts, num_samples)
    with session.phases("rollout"):
        completions = session.engine.generate(mine, params, seed=seed)
    return score_and_share(session, prompts, mine, completions)


def requests_of(session: Session, prompts: Sequence[Prompt], num_samples: int) -> list[Request]:
    """Return this data-parallel replica's requests for `num_samples` completions a prompt."""
    return [Request(prompt=p, sample_index=j) for p in prompts[session.ranks.dp_rank :: session.ranks.dp] for j in range(num_samples)]


def score_and_share(
    session: Session, prompts: Sequence[Prompt], requests: Sequence[Request], completions: Sequence[Completion]
) -> list[tuple[Completion, float]]:
    """Score this replica's completions and bring all replicas' together; returns pairs, prompt after prompt, sample after sample."""
    with session.phases("reward"):
        rewards = score(session, requests, completions)
        shares = gather_replicas(list(zip(completions, rewards, strict=True)))
    place = {p.id: i for i, p in enumerate(prompts)}
    return sorted((pair for share in shares for pair in share), key=lambda pair: (place[pair[0].prompt_id], pair[0].sample_index))


def take_prompts(session: Session, count: int) -> list[Prompt]:
    """Return the next `count` prompts in the run's order."""
    return [session.train_prompts.prompts[i] for i in session.order.take(count)]


def collect(session: Session, step: int) -> Rollouts:
    """Return the rollout batch of `step` (from 1), drawing groups anew where dynamic sampling asks for it."""
    cfg = session.recipe
    wanted = cfg.rollout.prompts_per_step
    rounds = cfg.grpo.dynamic_max_rounds if cfg.grpo.dynamic_sampling else 0
    kept, failed_before = Rollouts(), own_failures(session)
    for attempt in range(rounds + 1):
        prompts = [p for p in take_prompts(session, wanted - len(kept.prompts)) if p.id not in kept.prompts]
        scored = draw_and_score(session, prompts, cfg.rollout.group_size, session.sampling(), draw_seed(cfg.run.seed, step, attempt))
        fresh = Rollouts()
        fresh.add(prompts, scored)
        spread = groups_with_spread(fresh.rewards, [c.prompt_id for c in fresh.completions])
        # The last round keeps what it got: groups without spread have advantage 0.
        usable = fresh if attempt == rounds else fresh.only(spread)
        kept.add(list(usable.prompts.values()), list(zip(usable.completions, usable.rewards, strict=True)))
        if len(kept.prompts) >= wanted:
            break
    kept.reward_failures = reward_failures(session, failed_before)
    return kept


def draw_seed(run_seed: int, step: int, attempt: int = 0) -> int:
    """Return the seed of one round of draws: a function of run, step and round, so that a resumed step draws what the lost one drew."""
    assert 0 <= attempt < SEEDS_PER_STEP, attempt
    return (run_seed * 1_000_003 + step) * SEEDS_PER_STEP + attempt
