"""`train` on two processes with two real servers that draw beside the update, one of which dies in the middle of both."""

import pytest

from jetrl_megatron.run.records import read_records
from jetrl_megatron.run.run_dir import RunDir
from tests.dist.ranks import run_ranks
from tests.vllm.ahead_run import STEPS, run


@pytest.mark.dist
def test_draws_overlap_updates_with_the_weights_before_them(tmp_path):
    first, second = run_ranks(run, 2, str(tmp_path / "run"))
    assert first["code"] == second["code"] == 0 and first["restarts"] == 1
    assert first["drawn"] == second["drawn"] and len(first["drawn"]) == STEPS - 1
    for step, drawn in enumerate(first["drawn"], start=1):
        assert len({(prompt, sample) for prompt, sample, _ in drawn}) == len(drawn) == 16
        assert {v for _, _, versions in drawn for v in versions} == {step - 1}, "drawn beside the update that makes version `step`"
    assert first["held"] == list(range(STEPS)), "verified on the servers behind each update, before its push"
    for step in range(1, STEPS):
        began, ended = first["learned"][step - 1]
        times = [(start, end) for at, start, end in first["requests"] if at == step]
        assert len(times) == 16
        drew = (min(start for start, _ in times), max(end for _, end in times))
        print(f"step {step}: learned for {ended - began:.2f} s, drew for {drew[1] - drew[0]:.2f} s from {drew[0] - began:+.2f} s on")
        assert drew[0] < ended and drew[1] > began
    steps = [r for r in read_records(RunDir(tmp_path / "run").records) if r["kind"] == "step"]
    assert [r["version"] for r in steps] == [1, 2, 3, 4]
    assert [(r["staleness"], r["staleness_max"]) for r in steps] == [(0.0, 0.0)] + [(1.0, 1.0)] * 3
    # The same flow on both sides but for the engine's kernels; from step 2 on one update lies between, too.
    assert 0.0 < steps[0]["logprob_abs_diff"] < 0.1
    assert all(steps[0]["logprob_abs_diff"] < r["logprob_abs_diff"] < 1.0 for r in steps[1:])
    assert ["draw" in r["seconds"] for r in steps] == [True] * 3 + [False]
    assert all({"write", "load", "verify", "rest"} <= set(r["push_seconds"]) for r in steps)
    assert all(sum(r["push_seconds"].values()) <= r["seconds"]["sync"] for r in steps)
