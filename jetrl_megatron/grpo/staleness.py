"""How old the tokens of a batch are: rollout batches that the weights have learned since a token was drawn.

Enters: samples, the actor's version before their first update. Leaves, over all completion tokens, with n the updates of one batch:

    staleness = mean of ceil((version - version of the token) / n)        staleness_max = the largest

Invariant: none is above the limit. 0 for a batch drawn with the weights that it is going to update, whatever `grpo.epochs` and
`grpo.minibatches` are: the updates within a batch are not counted.
"""

from collections.abc import Sequence

from jetrl_megatron.contracts import Sample
from jetrl_megatron.failure import RunFailure


def batch_staleness(samples: Sequence[Sample], version: int, updates_per_batch: int, limit: int) -> dict[str, float]:
    """Return `staleness` and `staleness_max`.

    version: of the actor, in optimizer steps. limit: `rollout.max_staleness`. Raises RunFailure naming the first completion that is older.
    """
    total = toks = largest = 0
    for sample in samples:
        completion = sample.completion
        newest = max(completion.versions)
        assert newest <= version, f"{completion.prompt_id}/{completion.sample_index} has version {newest}, the actor {version}"
        ages = [-((v - version) // updates_per_batch) for v in completion.versions]
        if max(ages) > limit:
            raise RunFailure(
                f"completion {completion.sample_index} of prompt {completion.prompt_id} has tokens of version {min(completion.versions)} "
                f"and the actor is at version {version}: {max(ages)} rollout batches of {updates_per_batch} updates, "
                f"rollout.max_staleness is {limit}. Nothing is learned from it and the last checkpoint is intact; start the same command "
                "again to go on from there"
            )
        total, toks, largest = total + sum(ages), toks + len(ages), max(largest, *ages)
    return {"staleness": total / toks, "staleness_max": float(largest)}
