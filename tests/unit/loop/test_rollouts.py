"""Rollouts in a checkpoint come back bit for bit."""

import torch

from jetrl_megatron.contracts import Completion, Prompt
from jetrl_megatron.loop.persist import write_state
from jetrl_megatron.loop.rollouts import Rollouts

PROMPTS = {f"p{i}": Prompt(id=f"p{i}", token_ids=(1, i), text=f"t{i}", answer="a", source="s") for i in range(4)}


def completion(prompt, sample, ids, versions, reason):
    logprobs = tuple(-0.1 * (i + 1) - 1e-13 for i in ids)  # more digits than FP32 has
    return Completion(prompt_id=prompt, sample_index=sample, token_ids=ids, logprobs=logprobs, finish_reason=reason, versions=versions)


def test_a_state_that_was_written_gives_the_same_rollouts(tmp_path):
    rollouts = Rollouts(reward_failures=2)
    pairs = [
        (completion("p3", 0, (7, 151_000, 2), (4, 5, 5), "stop"), 0.1),
        (completion("p3", 1, (9,), (5,), "length"), -1 / 3),
        (completion("p1", 0, (2, 2), (4, 4), "stop"), 1.0),
    ]
    rollouts.add([PROMPTS["p3"], PROMPTS["p1"]], pairs)
    write_state(rollouts.state_dict(), tmp_path / "rollouts.pt")
    back = Rollouts.from_state_dict(torch.load(tmp_path / "rollouts.pt", weights_only=True), PROMPTS)
    assert back == rollouts and list(back.prompts) == ["p3", "p1"]
    assert type(back.rewards[0]) is float and type(back.completions[0].token_ids[0]) is int
