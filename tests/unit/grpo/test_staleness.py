"""Ages of tokens, counted in rollout batches, and what is too old to be learned from."""

import pytest

from jetrl_megatron.contracts import Completion, Prompt, Sample
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.grpo.staleness import batch_staleness


def sample(*versions, name="p0"):
    ids = (5,) * len(versions)
    drawn = {"token_ids": ids, "logprobs": (-1.0,) * len(ids), "finish_reason": "stop", "versions": versions}
    return Sample(
        prompt=Prompt(id=name, token_ids=(1,), text="", answer="", source=""),
        completion=Completion(prompt_id=name, sample_index=3, **drawn),
        reward=0.0,
        advantage=0.0,
        loss_mask=(0,) * len(ids),
    )


def test_tokens_count_and_not_completions_whatever_the_mask_is():
    samples = [sample(4, 4, 4, 4, 4, 4), sample(3, 4)]
    assert batch_staleness(samples, 4, 1, 1) == {"staleness": 1 / 8, "staleness_max": 1.0}
    assert batch_staleness([sample(4, 4)], 4, 1, 0) == {"staleness": 0.0, "staleness_max": 0.0}


@pytest.mark.parametrize(("version", "age"), [(12, 0), (11, 1), (9, 1), (8, 1)])
def test_the_updates_of_one_batch_are_one(version, age):
    """Versions are optimizer steps, of which a batch takes epochs * minibatches; a part of them is a whole batch."""
    assert batch_staleness([sample(version)], 12, 4, 1)["staleness_max"] == age


def test_older_than_allowed_is_refused_by_prompt_version_and_limit():
    words = r"completion 3 of prompt p7 has tokens of version 3 and the actor is at version 8: 2 rollout batches of 4 updates, .* is 1\. "
    with pytest.raises(RunFailure, match=words):
        batch_staleness([sample(8), sample(8, 3, name="p7")], 8, 4, 1)
    with pytest.raises(RunFailure, match=r"version 7 and the actor is at version 8: 1 rollout batches of 1 updates, .* is 0\. "):
        batch_staleness([sample(7)], 8, 1, 0)


def test_a_version_that_does_not_exist_yet_is_a_fault_of_ours():
    with pytest.raises(AssertionError, match="p0/3 has version 9, the actor 8"):
        batch_staleness([sample(9)], 8, 1, 1)
