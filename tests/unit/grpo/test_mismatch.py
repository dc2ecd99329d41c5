import math

import pytest
import torch

from jetrl_megatron.grpo.mismatch import mismatch_by_position, mismatch_sums, position_table


def _expected(diffs: list[float]) -> dict[str, float]:
    count = len(diffs)
    return {
        "logprob_abs_diff": sum(abs(d) for d in diffs) / count,
        "logprob_abs_diff_max": max(abs(d) for d in diffs),
        "token_mult_prob_error": sum(math.exp(abs(d)) for d in diffs) / count,
        "k3_kl": sum(math.exp(-d) - 1 + d for d in diffs) / count,
        "outside_share": sum(abs(d) > math.log(2) for d in diffs) / count,
    }


ROLLOUT = torch.tensor([-1.0, -2.0, -0.5, -4.0, 9.0])
TRAIN = torch.tensor([-1.25, -2.0, -1.5, -3.0, math.nan])
MASK = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
DIFFS = [0.25, 0.0, 1.0, -1.0]


def test_the_metrics_by_hand() -> None:
    assert mismatch_sums(ROLLOUT, TRAIN, MASK).metrics() == pytest.approx(_expected(DIFFS), rel=1e-12)


def test_sums_add_up_to_the_whole() -> None:
    parts = mismatch_sums(ROLLOUT[:2], TRAIN[:2], MASK[:2]) + mismatch_sums(ROLLOUT[2:], TRAIN[2:], MASK[2:])
    assert parts.metrics() == pytest.approx(_expected(DIFFS), rel=1e-12)


def test_equal_logprobs_are_exactly_zero() -> None:
    metrics = mismatch_sums(TRAIN[:4], TRAIN[:4], MASK[:4]).metrics()
    assert metrics == {
        "logprob_abs_diff": 0.0,
        "logprob_abs_diff_max": 0.0,
        "token_mult_prob_error": 1.0,
        "k3_kl": 0.0,
        "outside_share": 0.0,
    }


def test_small_differences_do_not_drown() -> None:
    rollout = torch.full((10_000,), -1.0)
    train = rollout - 2.0**-20
    metrics = mismatch_sums(rollout, train, torch.ones(10_000)).metrics()
    assert metrics["logprob_abs_diff"] == pytest.approx(2.0**-20, rel=1e-9)
    assert metrics["k3_kl"] == pytest.approx(2.0**-41, rel=1e-3)


def test_nothing_masked_in_is_no_mismatch() -> None:
    assert mismatch_sums(ROLLOUT, TRAIN, torch.zeros(5)).metrics()["token_mult_prob_error"] == 1.0
    assert mismatch_sums(ROLLOUT[:0], TRAIN[:0], MASK[:0]).metrics()["logprob_abs_diff"] == 0.0


def test_bins_hold_their_positions() -> None:
    positions = torch.tensor([0, 1, 2, 7, 0])
    sums = mismatch_by_position(ROLLOUT, TRAIN, MASK, positions, edges=(0, 2, 5))
    rows = position_table(sums, edges=(0, 2, 5))
    assert [(row["from"], row["toks"]) for row in rows] == [(0, 2.0), (2, 1.0), (5, 1.0)]
    assert [row["logprob_abs_diff"] for row in rows] == [0.125, 1.0, 1.0]
    assert sums.sum(dim=0)[0] == 4.0
    with pytest.raises(ValueError, match="bin edges"):
        mismatch_by_position(ROLLOUT, TRAIN, MASK, positions, edges=(1, 2))
