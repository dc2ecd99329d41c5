"""GRPO on two processes, two replicas, each with a real server of its own that sleeps while the actor learns.

A CPU releases nothing; the calls, their order and who may serve when are those of GPUs.
"""

import pytest

from jetrl_megatron.rollout.vllm_client import GENERATE
from tests.dist.ranks import run_ranks
from tests.vllm.colocated_run import STEPS, run

WAKE = [
    "/wake_up?tags=weights", "/sleep?level=0&mode=wait", "reload_weights", "jetrl_fingerprints",
    "/wake_up?tags=kv_cache", "/reset_prefix_cache?reset_external=true", "/wake_up?tags=scheduling",
]  # fmt: skip
START = ["jetrl_prepare", "jetrl_fingerprints", "/reset_prefix_cache?reset_external=true", "/wake_up?tags=scheduling"]
SLEEP = ["/sleep?level=2&mode=abort"]


def without_draws(calls: list[str]) -> list[str]:
    """Return a server's calls with each row of completions as one word."""
    kept: list[str] = []
    for call in calls:
        word = "draws" if call == GENERATE else call
        if not (word == "draws" and kept[-1:] == ["draws"]):
            kept.append(word)
    return kept


@pytest.mark.dist
def test_servers_sleep_while_the_actor_learns_and_serve_again_once_verified(tmp_path):
    first, second = run_ranks(run, 2, str(tmp_path / "run"))
    for rank in (first, second):
        assert rank["drawn"] == [[0], [1], [2]] and [v.step for v in rank["versions"]] == [1, 2, 3]
        assert len({v.sha256 for v in rank["versions"]}) == STEPS, "every step changed the weights"
        assert rank["evaluated"] == [4.0] * STEPS
    assert first["asleep"] == [[True, True]] * STEPS and first["silent"] == [True]
    assert first["restarts"] == 1 and first["ready"] == [0, 1]
    *both, came_back = (without_draws(calls) for calls in first["calls"])
    died, stayed = sorted(both, key=len)
    # A rollout and an evaluation follow each other, so that their draws are one row.
    assert stayed == [*START, "draws", *SLEEP, *WAKE, "draws", *SLEEP, *WAKE, "draws", *SLEEP, *WAKE, "draws"]
    assert died == [*START, "draws", *SLEEP, *WAKE, "draws", *SLEEP, WAKE[0]]
    assert came_back == [*START, "draws", *SLEEP, *WAKE, "draws"]
