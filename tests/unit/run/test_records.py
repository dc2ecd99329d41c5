"""One line a step, whatever interrupts the run."""

import json

import pytest

from jetrl_megatron.run.phases import Phases
from jetrl_megatron.run.records import RecordFile, read_records


def write(path, steps, resumed=0):
    file = RecordFile(path, resumed)
    for step in steps:
        file.append("step", step, {"reward": step / 10})
    file.close()


def test_resume_drops_later_steps_so_none_is_there_twice(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, [1, 2, 3, 4])
    write(path, [3, 4, 5], resumed=2)
    assert [(r["step"], r["reward"]) for r in read_records(path)] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5)]


def test_line_cut_by_a_kill_is_dropped_and_an_unreadable_one_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, [1, 2])
    with path.open("a") as file:
        file.write('{"kind": "step", "step": 3, "rew')
    assert [r["step"] for r in read_records(path)] == [1, 2]
    write(path, [3], resumed=2)
    assert [r["step"] for r in read_records(path)] == [1, 2, 3]
    path.write_text(path.read_text().replace('"step": 2', '"step" 2'))
    with pytest.raises(ValueError, match=r"records\.jsonl line 2 is not a record"):
        read_records(path)


def test_records_of_an_earlier_start_are_known_and_not_written_again(tmp_path):
    path = tmp_path / "records.jsonl"
    file = RecordFile(path, 0)
    assert file.append("eval", 0, {"reward": 0.5}) == {"kind": "eval", "step": 0, "reward": 0.5}
    file.close()
    again = RecordFile(path, 0)
    assert again.has("eval", 0)
    assert not again.has("step", 0)
    with pytest.raises(AssertionError, match="already in"):
        again.append("eval", 0, {})


def test_line_is_on_disk_before_append_returns(tmp_path):
    path = tmp_path / "records.jsonl"
    file = RecordFile(path, 0)
    file.append("step", 1, {"x": 1})
    assert json.loads(path.read_text()) == {"kind": "step", "step": 1, "x": 1}
    file.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_record_is_json_to_every_reader_or_an_error(tmp_path, value):
    file = RecordFile(tmp_path / "records.jsonl", 0)
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.append("step", 1, {"seconds": {"total": value}})
    file.close()
    assert (tmp_path / "records.jsonl").read_text() == ""


def test_phases_never_overlap_and_a_take_starts_anew():
    now = [0.0]
    phases = Phases(clock=lambda: now[0])

    def spend(seconds):
        now[0] += seconds

    with phases("rollout"):
        spend(3.0)
        with phases("quantise"):
            spend(0.5)
        spend(1.0)
    spend(0.25)
    with phases("rollout"):
        spend(1.0)
    assert phases.take() == {"rollout": 5.0, "quantise": 0.5, "total": 5.75}
    with pytest.raises(ZeroDivisionError), phases("save"):
        spend(2.0)
        1 / 0  # noqa: B018
    assert phases.take() == {"save": 2.0, "total": 2.0}
    with pytest.raises(AssertionError), phases("no such phase"):
        pass


def test_all_of_an_evaluation_is_one_phase():
    now = [0.0]
    phases = Phases(clock=lambda: now[0])
    with phases("eval"):
        now[0] += 1.0
        with phases("rollout"):
            now[0] += 2.0
        with phases("reward"):
            now[0] += 4.0
    with phases("rollout"):
        now[0] += 8.0
    assert phases.take() == {"rollout": 8.0, "eval": 7.0, "total": 15.0}


def test_phases_wait_for_the_device_at_both_ends():
    now, calls = [0.0], []

    def wait():
        calls.append(now[0])
        now[0] += 1.0 if len(calls) == 2 else 0.0  # the device is a second behind when the phase ends

    phases = Phases(clock=lambda: now[0], synchronize=wait)
    with phases("update"):
        now[0] += 0.5
    assert phases.take() == {"update": 1.5, "total": 1.5}
    assert calls == [0.0, 0.5, 1.5]
