import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_megatron.grpo.packing import plan_micro_batches, split_minibatches


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.integers(1, 4), st.sampled_from([128, 256]))
def test_every_sequence_is_placed_once_and_every_rank_has_as_many_micro_batches(lengths: list[int], num_dp: int, pad: int) -> None:
    plan = plan_micro_batches(lengths, num_dp, micro_batch_toks=500, pad_multiple=pad)
    assert len(plan.indices) == num_dp
    assert {len(rank) for rank in plan.indices} == {plan.num_micro_batches}
    assert sorted(i for rank in plan.indices for micro in rank for i in micro) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in micro) for rank in plan.indices for micro in rank]
    assert max(loads) <= 500
    assert plan.length % pad == 0 and 0 <= plan.length - max(loads) < pad
    assert plan == plan_micro_batches(lengths, num_dp, micro_batch_toks=500, pad_multiple=pad)


def test_tokens_are_balanced() -> None:
    plan = plan_micro_batches([100, 90, 80, 70, 60, 50, 40, 30], num_dp=2, micro_batch_toks=300, pad_multiple=1)
    assert [[sum([100, 90, 80, 70, 60, 50, 40, 30][i] for i in micro) for micro in rank] for rank in plan.indices] == [[260], [260]]


def test_a_rank_without_a_sequence_gets_padding() -> None:
    plan = plan_micro_batches([10], num_dp=3, micro_batch_toks=128, pad_multiple=128)
    assert plan.indices == (((0,),), ((),), ((),))
    assert plan.length == 128


def test_a_sequence_that_does_not_fit_names_its_length_and_the_keys() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 has 129 tokens.*micro_batch_toks 128; raise.*max_new_toks"):
        plan_micro_batches([5, 129], num_dp=1, micro_batch_toks=128, pad_multiple=128)
    with pytest.raises(ValueError, match="no sequences"):
        plan_micro_batches([], num_dp=1, micro_batch_toks=128, pad_multiple=128)


def test_minibatches_are_consecutive_and_even() -> None:
    assert split_minibatches(7, 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert split_minibatches(4, 1) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"grpo.minibatches is 5 .* 4 samples"):
        split_minibatches(4, 5)
