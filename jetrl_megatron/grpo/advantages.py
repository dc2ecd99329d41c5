"""Rewards to advantages, group by group, and what happens to completions that ran into the length limit.

Enters: rewards of the completions of some prompts. Leaves: one advantage a completion, a_i = r_i - mean(r of the group), divided by
(std + 1e-6) when asked, with the sample standard deviation (n - 1). Invariant: a group without spread, or of one, gives exactly 0.
Sources: group-relative advantages from DeepSeekMath (arXiv 2402.03300); the length penalty and dynamic sampling from DAPO
(arXiv 2503.14476).
"""

import math
from collections.abc import Mapping, Sequence

from jetrl_megatron.config import GrpoConfig, Overlong
from jetrl_megatron.contracts import Completion, Prompt, Sample

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that a group with a tiny spread does not get huge advantages."""


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether the rewards of one group differ at all; a group without spread teaches nothing."""
    return len(rewards) > 0 and max(rewards) != min(rewards)


def groups_with_spread(rewards: Sequence[float], group_ids: Sequence[str]) -> set[str]:
    """Return the ids of the groups that have spread: what dynamic sampling keeps; the others are drawn anew."""
    return {group_id for group_id, indices in _groups(group_ids).items() if has_spread([rewards[i] for i in indices])}


def group_advantages(rewards: Sequence[float], group_ids: Sequence[str], std_normalize: bool) -> list[float]:
    """Return the advantage of each completion within its group.

    rewards: one a completion. group_ids: the prompt id of each, in any order. std_normalize: divide by the group's standard
    deviation. Raises ValueError on a reward that is not finite.
    """
    assert len(rewards) == len(group_ids), (len(rewards), len(group_ids))
    advantages = [0.0] * len(rewards)
    for group_id, indices in _groups(group_ids).items():
        values = [float(rewards[i]) for i in indices]
        if not all(math.isfinite(value) for value in values):
            raise ValueError(f"prompt {group_id} has the rewards {values}; each must be finite: mend the reward function")
        if not has_spread(values):
            continue
        mean = math.fsum(values) / len(values)
        scale = 1.0
        if std_normalize:
            scale = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) + STD_EPSILON
        for i, value in zip(indices, values, strict=True):
            advantages[i] = (value - mean) / scale
    return advantages


def overlong_penalty(num_toks: int, max_new_toks: int, buffer_toks: int) -> float:
    """Return the length penalty of one completion: 0 up to `max_new_toks - buffer_toks`, then falling linearly to -1 at the limit.

    num_toks: tokens of the completion. Source: DAPO, equation 13.
    """
    if not 1 <= buffer_toks <= max_new_toks:
        raise ValueError(f"grpo.overlong_buffer_toks is {buffer_toks}; it must lie between 1 and rollout.max_new_toks {max_new_toks}")
    assert 0 <= num_toks <= max_new_toks, (num_toks, max_new_toks)
    return min((max_new_toks - buffer_toks - num_toks) / buffer_toks, 0.0)


def shaped_rewards(rewards: Sequence[float], completions: Sequence[Completion], cfg: GrpoConfig, max_new_toks: int) -> list[float]:
    """Return the rewards that advantages are computed from: those given, plus the length penalty under `overlong: penalty`."""
    if cfg.overlong is not Overlong.penalty:
        return [float(reward) for reward in rewards]
    pairs = zip(rewards, completions, strict=True)
    return [r + overlong_penalty(len(c.token_ids), max_new_toks, cfg.overlong_buffer_toks) for r, c in pairs]


def make_samples(
    prompts: Mapping[str, Prompt], completions: Sequence[Completion], rewards: Sequence[float], cfg: GrpoConfig, max_new_toks: int
) -> list[Sample]:
    """Join completions, rewards and advantages into the samples of one step, in the order of the completions.

    prompts: by id. rewards: as scored; they are kept in `Sample.reward` while the advantage is computed from the shaped ones. Under
    `overlong: mask` completions that were cut (finish reason "length") have a loss mask of zeros; their reward still counts in the
    group's mean.
    """
    shaped = shaped_rewards(rewards, completions, cfg, max_new_toks)
    advantages = group_advantages(shaped, [completion.prompt_id for completion in completions], cfg.std_normalize)
    samples = []
    for completion, reward, advantage in zip(completions, rewards, advantages, strict=True):
        counts = not (cfg.overlong is Overlong.mask and completion.finish_reason == "length")
        samples.append(
            Sample(
                prompt=prompts[completion.prompt_id],
                completion=completion,
                reward=float(reward),
                advantage=advantage,
                loss_mask=(int(counts),) * len(completion.token_ids),
            )
        )
    return samples


def _groups(group_ids: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(index)
    return groups
