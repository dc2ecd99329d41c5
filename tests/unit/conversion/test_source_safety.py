"""A source or a config that changes, errors that leave work behind, and values that were FP8 once."""

import json
import logging

import pytest
from safetensors.torch import save_file

from conversion import convert as convert_module
from conversion.checkpoint import read_manifest
from conversion.convert import Target, convert
from conversion.output import OutputDirectory
from tests.unit.conversion.directories import load, write_bf16, write_fp8
from tests.unit.conversion.test_damage import CONFIG, TP2


@pytest.fixture
def source(tmp_path):
    return write_bf16(tmp_path / "source", CONFIG)


def stopped_before(monkeypatch, name, error):
    """Let a method of the output directory raise."""

    def stop(self, *args):
        raise error

    monkeypatch.setattr(OutputDirectory, name, stop)


def test_a_partial_directory_of_another_config_is_not_resumed(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stopped_before(patch, "carry", OSError("cut here"))
        with pytest.raises(OSError, match="cut here"):
            convert(source, tmp_path / "m", TP2)
    journal = tmp_path / ".m.partial" / "journal.jsonl"
    assert len(journal.read_text().splitlines()) == 3
    (source / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5.0}))
    done_at_start = []
    fill = convert_module._fill
    monkeypatch.setattr(
        convert_module, "_fill", lambda prepared, output, *rest: done_at_start.append(dict(output.done)) or fill(prepared, output, *rest)
    )
    convert(source, tmp_path / "m", TP2)
    assert done_at_start == [{}]


@pytest.mark.parametrize("what", ["weights", "config", "removed"])
def test_a_source_that_changes_while_it_is_read_is_refused(source, tmp_path, monkeypatch, what):
    real = OutputDirectory.carry
    weights, config = source / "model.safetensors", source / "config.json"

    def carry(self, *args):
        if what == "weights":
            save_file({name: tensor * 2 for name, tensor in load(source).items()}, weights)
        elif what == "config":
            config.write_text(json.dumps({**CONFIG, "rope_theta": 5.0}))
        else:
            weights.unlink()
        real(self, *args)

    monkeypatch.setattr(OutputDirectory, "carry", carry)
    named = config if what == "config" else weights
    with pytest.raises(ValueError, match=rf"{named} (changed|was removed) while"):
        convert(source, tmp_path / "m", TP2)
    assert not (tmp_path / "m").exists() and not (tmp_path / ".m.partial").exists()


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_are_refused_before_anything_is_created(source, tmp_path, workers):
    with pytest.raises(ValueError, match=f"workers is {workers}; at least 1"):
        convert(source, tmp_path / "deep" / "m", TP2, workers=workers)
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    "error, kept", [(ValueError("bad"), False), (OSError("full"), True), (MemoryError(), True), (KeyboardInterrupt(), True)]
)
def test_a_partial_directory_stays_only_where_another_run_can_use_it(source, tmp_path, monkeypatch, error, kept):
    stopped_before(monkeypatch, "carry", error)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "m", TP2)
    assert (tmp_path / ".m.partial").exists() == kept


def test_quantising_dequantised_values_warns(tmp_path, source, caplog):
    fp8 = write_fp8(tmp_path / "fp8", CONFIG)
    convert(fp8, tmp_path / "bf16", Target(kind="hf", cast="bf16"))
    convert(tmp_path / "bf16", tmp_path / "ranks", TP2)
    assert read_manifest(tmp_path / "ranks")["dequantised"] is True
    for name in ("bf16", "ranks", "source"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            convert(tmp_path / name, tmp_path / f"{name}-again", Target(kind="hf", cast="fp32"))
        said = [r.getMessage() for r in caplog.records if "was dequantised from FP8" in r.getMessage()]
        assert len(said) == (name != "source"), name
    assert read_manifest(tmp_path / "bf16-again")["dequantised"] is False
