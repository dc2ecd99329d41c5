"""The bench on a tiny checkpoint: what its record says, and that it stops where a conversion changes a byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conversion import bench as module
from conversion.bench import bench
from conversion.cli import main

GB = 0.01
"""The widths are cut to a sixteenth at this size; each conversion takes about a second, most of it to start Python."""


_MAIN = "import os, sys; os.sync = lambda: None; from conversion.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    """Do not wait for what other programs have not written yet."""
    monkeypatch.setattr(os, "sync", lambda: None)


def test_the_record_has_what_the_docstring_promises(tmp_path):
    # A process of its own: a child's peak counts what its parent held when it started it, and a test process may hold much.
    command = [sys.executable, "-c", _MAIN, "bench", str(tmp_path / "d"), "--gb", str(GB), "--rounds", "1", "--json"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    steps = ("cp", "cp_without_sync", "to_megatron_tp4", "to_hf")
    measured = {f"{name}{end}" for name in steps for end in ("_s", "_rounds_s")}
    compared = {f"{name}{end}" for name in steps[2:] for end in ("_bytes_per_s", "_speed_over_cp", "_peak_bytes")}
    assert record.keys() == {"checkpoint_bytes", "rounds", "largest_tensor_bytes", "peak_bound_bytes", *measured, *compared}
    assert abs(record["checkpoint_bytes"] - GB * 1e9) < 2e6  # half a layer of 1.7 MB, and headers
    assert record["peak_bound_bytes"] == 2 * record["largest_tensor_bytes"] + 500_000_000
    for name in steps[2:]:
        assert 0 < record[f"{name}_peak_bytes"] < record["peak_bound_bytes"]
        assert record[f"{name}_s"] == record[f"{name}_rounds_s"][0] > 0
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda back: flip_last_byte(back / "model.safetensors"), "model.safetensors differs after"),
        (lambda back: (back / "config.json").unlink(), "holds config.json, model.safetensors, but after .* there is model.safetensors$"),
    ],
    ids=["a byte", "a file"],
)
def test_it_stops_where_what_comes_back_differs(tmp_path, monkeypatch, damage, words):
    real = module._timed

    def timed(command):
        result = real(command)
        if "to-hf" in command:
            damage(tmp_path / "d" / "back")
        return result

    monkeypatch.setattr(module, "_timed", timed)
    with pytest.raises(RuntimeError, match=words):
        bench(tmp_path / "d", GB, rounds=1)
    assert not (tmp_path / "d").exists()


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("gb", ["0", "-1", "0.001", "nan", "inf"])
def test_a_size_that_cannot_be_measured_is_refused(tmp_path, capsys, gb):
    assert main(["bench", str(tmp_path / "d"), "--gb", gb]) == 2
    assert "the smallest model that is measured" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_a_full_disk_promises_no_resumption(tmp_path, capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(module, "write_random", full)
    assert main(["bench", str(tmp_path / "d"), "--gb", str(GB)]) == 2
    err = capsys.readouterr().err
    assert "No space left on device" in err and "goes on where it stopped" not in err
