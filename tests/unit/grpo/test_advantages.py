import math

import pytest

from jetrl_megatron.config import GrpoConfig, Overlong
from jetrl_megatron.contracts import Completion, FinishReason, Prompt
from jetrl_megatron.grpo.advantages import (
    STD_EPSILON,
    group_advantages,
    groups_with_spread,
    make_samples,
    overlong_penalty,
    shaped_rewards,
)


def _completion(prompt_id: str, index: int, num_toks: int, finish: FinishReason) -> Completion:
    return Completion(
        prompt_id=prompt_id,
        sample_index=index,
        token_ids=(7,) * num_toks,
        logprobs=(-0.5,) * num_toks,
        finish_reason=finish,
        versions=(0,) * num_toks,
    )


def test_advantages_are_within_the_group_whatever_the_order() -> None:
    assert group_advantages([1.0, 10.0, 0.0, 20.0], ["a", "b", "a", "b"], std_normalize=False) == [0.5, -5.0, -0.5, 5.0]


def test_standard_deviation_is_that_of_the_sample() -> None:
    scale = math.sqrt(1 / 3) + STD_EPSILON
    assert group_advantages([1.0, 0.0, 1.0, 0.0], ["a"] * 4, std_normalize=True) == [0.5 / scale, -0.5 / scale, 0.5 / scale, -0.5 / scale]


@pytest.mark.parametrize("std_normalize", [True, False])
def test_a_group_without_spread_is_exactly_zero(std_normalize: bool) -> None:
    assert group_advantages([0.1] * 3 + [0.7], ["a", "a", "a", "alone"], std_normalize) == [0.0] * 4


def test_groups_with_spread_are_those_to_keep() -> None:
    assert groups_with_spread([1, 0, 1, 1, 0.5], ["a", "a", "b", "b", "c"]) == {"a"}


def test_a_reward_that_is_not_finite_names_its_prompt() -> None:
    with pytest.raises(ValueError, match="prompt p9"):
        group_advantages([math.nan, 1.0], ["p9", "p9"], std_normalize=False)


def test_the_length_penalty_grows_linearly_to_minus_one() -> None:
    assert [overlong_penalty(n, max_new_toks=100, buffer_toks=20) for n in (0, 80, 85, 90, 100)] == [0.0, 0.0, -0.25, -0.5, -1.0]
    with pytest.raises(ValueError, match=r"overlong_buffer_toks is 101.*max_new_toks 100"):
        overlong_penalty(5, max_new_toks=100, buffer_toks=101)


def test_shaping_adds_the_penalty_only_when_asked() -> None:
    completions = [_completion("a", 0, 2, "stop"), _completion("a", 1, 7, "stop"), _completion("a", 2, 8, "length")]
    penalised = GrpoConfig(overlong=Overlong.penalty, overlong_buffer_toks=4)
    assert shaped_rewards([1.0, 1.0, 0.0], completions, penalised, max_new_toks=8) == [1.0, 0.25, -1.0]
    assert shaped_rewards([1.0, 1.0, 0.0], completions, GrpoConfig(), max_new_toks=8) == [1.0, 1.0, 0.0]


def test_masking_takes_out_cut_completions_only() -> None:
    """An end-of-sequence token as the very last allowed token is not truncation."""
    prompt = Prompt(id="a", token_ids=(1, 2), text="", answer="", source="")
    completions = [_completion("a", 0, 8, "stop"), _completion("a", 1, 8, "length"), _completion("a", 2, 3, "stop")]
    samples = make_samples({"a": prompt}, completions, [1.0, 0.0, 0.0], GrpoConfig(overlong=Overlong.mask, std_normalize=False), 8)
    assert [sample.loss_mask for sample in samples] == [(1,) * 8, (0,) * 8, (1,) * 3]
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.0]
    assert [sample.advantage for sample in samples] == [1 - 1 / 3, -1 / 3, -1 / 3]


def test_penalty_changes_the_advantage_but_not_the_reported_reward() -> None:
    prompt = Prompt(id="a", token_ids=(1,), text="", answer="", source="")
    completions = [_completion("a", 0, 10, "length"), _completion("a", 1, 2, "stop")]
    cfg = GrpoConfig(overlong=Overlong.penalty, overlong_buffer_toks=4, std_normalize=False)
    samples = make_samples({"a": prompt}, completions, [1.0, 1.0], cfg, max_new_toks=10)
    assert [sample.reward for sample in samples] == [1.0, 1.0]
    assert [sample.advantage for sample in samples] == [-0.5, 0.5]
