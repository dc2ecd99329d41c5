"""Records reach everybody who wants them, and the closing numbers are theirs."""

import json
import re
import sys
import types

import pytest

from jetrl_megatron.config import RunConfig
from jetrl_megatron.metrics import STEP_KEYS, Metrics, progress_line
from jetrl_megatron.run.report import close_run, summarise, summary_table
from jetrl_megatron.run.run_dir import RunDir


def step(reward, mismatch, **seconds):
    values = dict.fromkeys(STEP_KEYS, 0.0) | {"reward": reward, "response_toks": 4.5, "token_mult_prob_error": 1.0 + mismatch}
    return values | {"logprob_abs_diff": mismatch / 10, "logprob_abs_diff_max": mismatch, "k3_kl": mismatch / 100, "seconds": seconds}


@pytest.fixture
def finished(tmp_path):
    shown = []
    run_dir = RunDir(tmp_path)
    metrics = Metrics(RunConfig(dir=str(tmp_path), steps=2), run_dir, 0, show=shown.append)
    metrics.log("eval", 0, {"reward": 0.25})
    metrics.log("step", 1, step(0.5, 0.0, rollout=1.0, update=2.0, total=3.5))
    metrics.log("step", 2, step(0.75, 0.02, rollout=3.0, sync=0.5, total=4.0))
    metrics.log("eval", 2, {"reward": 0.625})
    metrics.close()
    return run_dir, shown


def test_progress_lines_say_reward_length_mismatch_and_seconds(finished):
    _, shown = finished
    assert shown[0] == "eval 0/2  reward 0.25"
    assert shown[1] == "step 1/2  reward 0.500  length 4.5  mismatch 0.00e+00 (max 0.00e+00)  |  3.50 s: rollout 1.00  update 2.00"
    assert shown[2] == "step 2/2  reward 0.750  length 4.5  mismatch 2.00e-03 (max 2.00e-02)  |  4.00 s: rollout 3.00  sync 0.50"


def test_a_step_that_drew_ahead_says_how_old_its_tokens_were_and_what_ran_beside_it():
    values = step(0.5, 0.25, draw_wait=0.5, update=2.0, total=2.5, draw=2.25) | {"staleness": 0.75, "staleness_max": 1.0}
    line = progress_line({"kind": "step", "step": 2, **values}, 9)
    assert line.startswith("step 2/9  reward 0.500  length 4.5  mismatch 2.50e-02 (max 2.50e-01)  staleness 0.75  |  2.50 s: ")
    assert line.endswith("2.50 s: update 2.00  draw_wait 0.50  beside them: draw 2.25")
    summary = summarise([{"kind": "step", "step": 1, **step(0.5, 0.0, total=2.5)}, {"kind": "step", "step": 2, **values}], "jetrl", 5.0)
    assert summary["staleness_mean"] == 0.375 and summary["seconds"]["draw"] == 2.25 and summary["seconds"]["total"] == 5.0
    table = summary_table(summary)
    assert re.search(r"^staleness, rollout batches: mean +0\.375$", table, re.MULTILINE)
    assert re.search(r"^seconds draw, beside the others +2\.25 \(45%\)$", table, re.MULTILINE)


def test_closing_writes_the_summary_and_shows_its_path_last(finished):
    run_dir, _ = finished
    shown = []
    assert close_run(run_dir, "jetrl", 12.5, show=shown.append) == run_dir.summary
    assert shown[-1] == str(run_dir.summary)
    summary = json.loads(run_dir.summary.read_text())
    expected = {"arm": "jetrl", "num_steps": 2, "reward_before": 0.25, "reward_after": 0.625, "logprob_abs_diff_max": 0.02, "total_s": 12.5}
    assert {key: summary[key] for key in expected} == expected
    assert summary["logprob_abs_diff_mean"] == pytest.approx(0.001)
    assert summary["seconds"] == {"rollout": 4.0, "update": 2.0, "sync": 0.5, "total": 7.5}
    assert "reward before -> after     0.25 -> 0.625" in shown[0]
    assert "seconds rollout            4.00 (53%)" in shown[0]
    assert run_dir.curves.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run_dir.curves.stat().st_size > 20_000  # four drawn panels, not an empty canvas


def test_json_lines_are_the_records(tmp_path):
    shown = []
    metrics = Metrics(RunConfig(steps=2, tensorboard=False), RunDir(tmp_path), 0, json_lines=True, show=shown.append)
    metrics.log("eval", 0, {"reward": 0.25})
    metrics.close()
    assert [json.loads(line) for line in shown] == [{"kind": "eval", "step": 0, "reward": 0.25}]
    assert not (tmp_path / "tensorboard").exists()


def test_a_run_without_steps_or_evaluation_says_not_measured():
    summary = summarise([], "bf16", 1.0)
    assert (summary["reward_before"], summary["logprob_abs_diff_max"], summary["num_steps"]) == (None, None, 0)
    assert "not measured -> not measured" in summary_table(summary)


def test_a_step_without_its_mismatch_is_a_fault_of_ours(tmp_path):
    metrics = Metrics(RunConfig(tensorboard=False), RunDir(tmp_path), 0)
    with pytest.raises(AssertionError, match=r"missing from the step record: \{'logprob_abs_diff'\}"):
        metrics.log("step", 1, {key: 0.0 for key in STEP_KEYS if key != "logprob_abs_diff"})
    metrics.close()


def test_tensorboard_holds_every_scalar_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunConfig(steps=3)
    for resumed, steps in ((0, (1, 2)), (1, (2, 3))):
        metrics = Metrics(run, RunDir(tmp_path), resumed, show=lambda line: None)
        for number in steps:
            metrics.log("step", number, step(number / 4, 0.0, rollout=1.0, total=2.0))
        metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("step/reward")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [e.value for e in events.Scalars("step/seconds/rollout")] == [1.0, 1.0, 1.0]


def test_wandb_is_an_error_when_asked_for_and_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("jetrl_megatron.metrics.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run.wandb is true, but the package wandb is not installed; install the extra `log`"):
        Metrics(RunConfig(wandb=True), RunDir(tmp_path), 0)


def test_wandb_gets_every_scalar_under_a_stable_id(tmp_path, monkeypatch):
    calls = []

    class FakeRun:
        def log(self, values, step):
            calls.append((step, values["step/reward"], values["step/seconds/total"]))

        def finish(self):
            calls.append("finish")

    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: calls.append((settings["id"], settings["resume"])) or FakeRun()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("jetrl_megatron.metrics.find_spec", lambda name: object())
    metrics = Metrics(RunConfig(wandb=True, tensorboard=False), RunDir(tmp_path), 0, show=lambda line: None)
    metrics.log("step", 1, step(0.5, 0.0, total=2.0))
    metrics.close()
    assert calls == [(tmp_path.name, "allow"), (1, 0.5, 2.0), "finish"]


def test_nested_numbers_of_other_kinds_are_shown():
    assert (
        progress_line({"kind": "eval", "step": 5, "reward": 0.5, "by_set": {"gsm8k": 0.25}}, 9) == "eval 5/9  reward 0.5  by_set/gsm8k 0.25"
    )
