"""The order is the same with and without a stop, wherever the stop falls."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_megatron.data.order import PromptOrder


def _order(num_prompts: int = 6, fingerprint: str = "aaaa", seed: int = 1, shuffle: bool = True) -> PromptOrder:
    return PromptOrder(num_prompts, fingerprint, seed, shuffle)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 6])
def test_a_stop_changes_nothing_also_at_an_epoch_end(stop_after: int) -> None:
    whole = _order()
    steps = [whole.take(2) for _ in range(9)]
    first = _order()
    begun = [first.take(2) for _ in range(stop_after)]
    state = json.loads(json.dumps(first.state_dict()))
    second = _order()
    second.load_state_dict(state)
    assert begun + [second.take(2) for _ in range(9 - stop_after)] == steps


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=2, max_size=12), st.data())
def test_resume_at_any_step_of_any_sizes(num_prompts: int, counts: list[int], data: st.DataObject) -> None:
    stop = data.draw(st.integers(1, len(counts) - 1))
    whole, first, second = (_order(num_prompts) for _ in range(3))
    steps = [whole.take(count) for count in counts]
    begun = [first.take(count) for count in counts[:stop]]
    second.load_state_dict(first.state_dict())
    assert begun + [second.take(count) for count in counts[stop:]] == steps
    flat = [index for step in steps for index in step]
    for start in range(0, len(flat) - num_prompts + 1, num_prompts):
        assert sorted(flat[start : start + num_prompts]) == list(range(num_prompts)), "each epoch takes each prompt once"
    for step in steps:
        assert max(Counter(step).values()) <= -(-len(step) // num_prompts) + (len(step) > num_prompts), step
        if len(step) <= num_prompts:
            assert len(set(step)) == len(step), "no prompt twice in a step"


def test_epochs_are_shuffled_differently_and_by_the_seed() -> None:
    order = _order(num_prompts=50)
    first, second = order.take(50), order.take(50)
    assert first != second and sorted(first) == sorted(second) == list(range(50))
    assert _order(num_prompts=50, seed=2).take(50) != first
    assert _order(num_prompts=50).take(50) == first


def test_without_shuffle_the_file_order_is_kept() -> None:
    order = _order(shuffle=False)
    assert order.take(4) == [0, 1, 2, 3]
    assert order.take(4) == [4, 5, 0, 1]
    assert order.take(4) == [2, 3, 4, 5]
    assert order.epoch == 2


def test_the_end_of_an_epoch_belongs_to_the_next_one() -> None:
    order = _order()
    order.take(6)
    assert order.epoch == 1
    resumed = _order()
    resumed.load_state_dict(order.state_dict())
    assert len(resumed.take(2)) == 2 and resumed.epoch == 1


def test_changed_data_is_detected_and_both_fingerprints_are_said() -> None:
    state = _order(fingerprint="aaaa").state_dict()
    with pytest.raises(ValueError, match=r"6 prompts, fingerprint aaaa, now there are 7, fingerprint bbbb; restore the data"):
        _order(num_prompts=7, fingerprint="bbbb").load_state_dict(state)
    with pytest.raises(ValueError, match=r"aaaa.*cccc"):
        _order(fingerprint="cccc").load_state_dict(state)
    with pytest.raises(ValueError, match=r"run.seed is 2, the checkpoint was written with 1"):
        _order(seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"data.shuffle is False"):
        _order(shuffle=False).load_state_dict(state)


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="no prompts"):
        _order(num_prompts=0)
