import math

import pytest
import torch

from jetrl_megatron.grpo.mismatch import BIN_EDGES, MismatchSums, mismatch_sums


def sums_of(rollout: torch.Tensor, train: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor | None = None) -> MismatchSums:
    """Where no positions are given, those of one long completion."""
    return mismatch_sums(rollout, train, mask, torch.arange(mask.numel()) if positions is None else positions)


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
    assert sums_of(ROLLOUT, TRAIN, MASK).metrics() == pytest.approx(_expected(DIFFS), rel=1e-12)


def test_sums_add_up_to_the_whole() -> None:
    parts = sums_of(ROLLOUT[:2], TRAIN[:2], MASK[:2]) + sums_of(ROLLOUT[2:], TRAIN[2:], MASK[2:])
    assert parts.metrics() == pytest.approx(_expected(DIFFS), rel=1e-12)


def test_equal_logprobs_are_exactly_zero() -> None:
    metrics = sums_of(TRAIN[:4], TRAIN[:4], MASK[:4]).metrics()
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
    metrics = sums_of(rollout, train, torch.ones(10_000)).metrics()
    assert metrics["logprob_abs_diff"] == pytest.approx(2.0**-20, rel=1e-9)
    assert metrics["k3_kl"] == pytest.approx(2.0**-41, rel=1e-3)


def test_nothing_masked_in_is_no_mismatch() -> None:
    assert sums_of(ROLLOUT, TRAIN, torch.zeros(5)).metrics()["token_mult_prob_error"] == 1.0
    assert sums_of(ROLLOUT[:0], TRAIN[:0], MASK[:0]).metrics()["logprob_abs_diff"] == 0.0


def test_bins_hold_their_positions() -> None:
    rows = sums_of(ROLLOUT, TRAIN, MASK, torch.tensor([0, BIN_EDGES[1] - 1, BIN_EDGES[1], 10**6, 0])).by_position()
    assert [(row["from"], row["toks"]) for row in rows] == [(0, 2), (BIN_EDGES[1], 1), (BIN_EDGES[-1], 1)]
    assert [row["logprob_abs_diff"] for row in rows] == [0.125, 1.0, 1.0]
    assert [row["k3_kl"] for row in rows] == pytest.approx([_expected(d)["k3_kl"] for d in (DIFFS[:2], DIFFS[2:3], DIFFS[3:])], rel=1e-12)
    assert sums_of(ROLLOUT, TRAIN, torch.zeros(5)).by_position() == []
