"""Rollouts drawn beside the update, on two tensor-parallel ranks: order, versions, an exact resume, and ends that do not hang."""

from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_megatron.run.records import read_records
from jetrl_megatron.run.run_dir import RunDir
from jetrl_megatron.run.store import CheckpointStore
from tests.dist.ahead_run import STEPS, run
from tests.dist.ranks import run_ranks
from tests.dist.test_resume import assert_same, outcome

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return run_ranks(run, 2, str(folder)), folder


def test_every_draw_overlaps_an_update_and_has_the_weights_before_it(whole: tuple[list[dict[str, Any]], Path]) -> None:
    """With two minibatches a batch takes two versions; what is learned at step s was drawn with the weights before step s - 1."""
    (first, second), folder = whole
    assert first["ended"] == second["ended"] == 0
    middle = [f"{word}" for s in range(1, STEPS) for word in ("update", "update", f"drawn [{2 * s - 2}]", f"push {2 * s}", *boundary(s))]
    assert first["log"] == ["push 0", "evaluate", *middle, "update", "update", "push 10", "evaluate", "save"]
    assert second["log"] == [word for word in first["log"] if not word.startswith("push")]
    steps = [r for r in read_records(RunDir(folder).records) if r["kind"] == "step"]
    assert [r["version"] for r in steps] == [2, 4, 6, 8, 10]
    assert [(r["staleness"], r["staleness_max"]) for r in steps] == [(0.0, 0.0)] + [(1.0, 1.0)] * 4
    assert ["draw" in r["seconds"] for r in steps] == [True] * 4 + [False]
    assert all({"write", "rest"} == set(r["push_seconds"]) and sum(r["push_seconds"].values()) <= r["seconds"]["sync"] for r in steps)
    assert all(r["grad_norm"] > 0.0 for r in steps) and sum(r["reward_failures"] for r in steps) > 0


def boundary(step: int) -> list[str]:
    return ["evaluate", "save"] if step % 2 == 0 else []


@pytest.mark.parametrize(("trouble", "saved"), [((3, "stop"), 3), ((4, "crash"), 2), ((2, "refused"), None)])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    whole: tuple[list[dict[str, Any]], Path], tmp_path: Path, trouble: tuple[int, str], saved: int | None
) -> None:
    """The rollouts that were drawn ahead are in the checkpoint: the weights that drew them are gone, and others would draw other tokens."""
    folder = tmp_path / "run"
    ends = [rank["ended"] for rank in run_ranks(run, 2, str(folder), trouble)]
    assert ends == {
        "stop": [0, 0],
        "crash": [("RunFailure", "the update failed")] * 2,
        "refused": [("ValueError", "the server refuses")] * 2,
    }[trouble[1]]
    found = CheckpointStore(RunDir(folder).checkpoints, 2).newest_complete()
    assert (found.step if found else None) == saved
    if found is not None:
        state = torch.load(found.rank_dir(0) / "pending_rollouts.pt", weights_only=True)
        assert set(state["versions"].tolist()) == {2 * found.step - 2} and len(state["rewards"]) == 16
        assert not (found.rank_dir(1) / "pending_rollouts.pt").exists()
    assert [rank["ended"] for rank in run_ranks(run, 2, str(folder))] == [0, 0]
    assert_same(outcome(whole[1]), outcome(folder))


def test_servers_without_weights_get_those_that_every_rank_has_learned(tmp_path: Path) -> None:
    """All of them are blank in the middle of the update: nothing is pushed before it has ended on the slower rank, too."""
    folder = tmp_path / "run"
    first, second = run_ranks(run, 2, str(folder), (2, "blank"))
    assert first["ended"] == second["ended"] == 0
    middle = first["log"].index("push 2") + 1
    assert first["log"][middle : middle + 6] == ["update", "update", "push by the draw", "push 4", "drawn [4]", "push 4"]
    assert [word for word in second["log"] if "by the draw" in word] == ["push by the draw"]
    steps = [r for r in read_records(RunDir(folder).records) if r["kind"] == "step"]
    assert [r["staleness"] for r in steps] == [0.0, 1.0, 0.0, 1.0, 1.0]


def test_a_pool_that_is_lost_ends_every_rank_with_its_cause(tmp_path: Path) -> None:
    ends = [rank["ended"] for rank in run_ranks(run, 2, str(tmp_path / "run"), (1, "lost"))]
    assert ends == [("RunFailure", "no engine server is left"), ("RunFailure", "rank 0: no engine server is left")]


def test_a_failed_update_ends_the_draw_beside_it_and_the_run(tmp_path: Path) -> None:
    ends = run_ranks(run, 2, str(tmp_path / "run"), (1, "crash"))
    assert [rank["ended"] for rank in ends] == [("RunFailure", "the update failed")] * 2
    assert [rank["left"] for rank in ends] == [[True], [True]], "it ended with the pool, on both ranks"


def test_a_rank_that_fails_alone_ends_although_its_draw_waits_for_another(tmp_path: Path) -> None:
    """Rank 0 is in a collective of the update then: it ends by itself where the backend sees the closed peer, else the launcher ends it."""
    with pytest.raises(AssertionError, match=r"codes \[(None|1), 1\][\s\S]*RunFailure: the update failed"):
        run_ranks(run, 2, str(tmp_path / "run"), (1, "crash of rank 1"))
