"""What one step learns from, and its form in a checkpoint.

Enters: scored completions. Leaves: `Rollouts`, and a state of tensors and plain values that gives it back bit for bit: with
`rollout.max_staleness=1` the next step's completions exist when a step is saved, and the weights that drew them do not any more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jetrl_megatron.contracts import Completion, Prompt


@dataclass(kw_only=True)
class Rollouts:
    """Scored completions, group after group."""

    prompts: dict[str, Prompt] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    reward_failures: int = 0
    """Samples that the reward function failed on, over all replicas."""

    def add(self, prompts: Sequence[Prompt], scored: Sequence[tuple[Completion, float]]) -> None:
        """Append groups."""
        self.prompts.update({p.id: p for p in prompts})
        self.completions += [c for c, _ in scored]
        self.rewards += [r for _, r in scored]

    def only(self, ids: set[str]) -> "Rollouts":
        """Return the groups of these prompts, order kept."""
        kept = Rollouts()
        pairs = [(c, r) for c, r in zip(self.completions, self.rewards, strict=True) if c.prompt_id in ids]
        kept.add([p for i, p in self.prompts.items() if i in ids], pairs)
        return kept

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values: prompts by id, the per-token arrays of all completions end to end."""
        done = self.completions
        return {
            "prompts": list(self.prompts),
            "prompt_ids": [c.prompt_id for c in done],
            "sample_indices": [c.sample_index for c in done],
            "finish_reasons": [c.finish_reason for c in done],
            "lengths": [len(c.token_ids) for c in done],
            "token_ids": torch.tensor([i for c in done for i in c.token_ids], dtype=torch.int32),
            "logprobs": torch.tensor([x for c in done for x in c.logprobs], dtype=torch.float64),  # as servers give them
            "versions": torch.tensor([v for c in done for v in c.versions], dtype=torch.int32),
            "rewards": torch.tensor(self.rewards, dtype=torch.float64),
            "reward_failures": self.reward_failures,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], known: Mapping[str, Prompt]) -> "Rollouts":
        """Return the rollouts of a state; known: the run's prompts by id, those of the state among them."""
        arrays = [state[name].split(state["lengths"]) for name in ("token_ids", "logprobs", "versions")]
        names = zip(state["prompt_ids"], state["sample_indices"], state["finish_reasons"], strict=True)
        completions = [
            Completion(
                prompt_id=prompt,
                sample_index=sample,
                finish_reason=reason,
                token_ids=tuple(ids.tolist()),
                logprobs=tuple(logprobs.tolist()),
                versions=tuple(versions.tolist()),
            )
            for (prompt, sample, reason), ids, logprobs, versions in zip(names, *arrays, strict=True)
        ]
        return cls(
            prompts={i: known[i] for i in state["prompts"]},
            completions=completions,
            rewards=state["rewards"].tolist(),
            reward_failures=state["reward_failures"],
        )
