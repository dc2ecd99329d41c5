"""GRPO on two processes with two real servers that are killed in the middle of a rollout and in the middle of a push."""

import pytest

from tests.dist.ranks import run_ranks
from tests.vllm.grpo_run import STEPS, run


@pytest.mark.dist
def test_killed_servers_lose_nothing_double_nothing_and_serve_the_right_version(tmp_path):
    first, second = run_ranks(run, 2, str(tmp_path / "run"), "jetrl")
    assert first["kills"] == ["rollout", "push"] and first["restarts"] == 2
    for rank in (first, second):
        assert rank["versions"] == [1, 2, 3]
        assert len(set(rank["digests"])) == STEPS, "every step changed the weights"
        for step, drawn in enumerate(rank["drawn"]):
            assert len(drawn) == 16 and len({(prompt, sample) for prompt, sample, _, _ in drawn}) == 16
            assert {v for _, _, _, versions in drawn for v in versions} == {step}
    assert first["drawn"] == second["drawn"] and first["digests"] == second["digests"]
    assert first["version"] == 3 and first["ready"] == [0, 1]
    # Two servers at the start and the one that came back after step 2, each verified by a third party before its first request.
    assert first["first_use"][:2] == [0, 0] and set(first["first_use"][2:]) <= {1, 2}
    assert len(first["first_use"]) == 3
    assert first["directory"] == ["v00000003"]
    # The CPU engine keeps activations in BF16, so the mismatch is small and not zero; it is reported as it is.
    assert all(0.0 < d < 0.1 for d in first["mismatch"])
