"""How commands end beside success: interrupted, with nobody reading, with a full stdout, with a failed benchmark; and their help."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conversion import bench, cli
from conversion.convert import Target, convert
from conversion.layout import ParallelLayout, check_layout_of, fp8_modules
from tests.unit.conversion.directories import load, write_bf16, write_fp8
from tests.unit.conversion.shapes import published
from tests.unit.conversion.test_damage import CONFIG


def run(words, **options):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.run([sys.executable, "-m", "conversion", *map(str, words)], env=env, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("words", [["to-megatron", "{source}", "{out}", "--tp", "1"], ["verify", "{source}"]], ids=["convert", "verify"])
def test_ctrl_c_is_one_line_and_130(tmp_path, monkeypatch, capsys, words):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "open_checkpoint", interrupt)
    monkeypatch.setattr(cli, "check_manifest", interrupt)
    assert cli.main([w.format(source=tmp_path, out=tmp_path / "out") for w in words]) == 130
    assert capsys.readouterr().err == "interrupted" + ("; the same command goes on where it stopped\n" if "--tp" in words else "\n")


def test_nobody_reads(tmp_path):
    source = write_bf16(tmp_path / "source", CONFIG)
    read, write = os.pipe()
    os.close(read)
    done = run(["to-megatron", source, tmp_path / "m", "--tp", "2", "--dry-run"], stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_stdout_is_not_a_full_target(tmp_path):
    source = write_bf16(tmp_path / "source", CONFIG)
    with open("/dev/full", "w") as full:
        done = run(["to-megatron", source, tmp_path / "m", "--tp", "2", "--json"], stdout=full)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "nothing was put" not in done.stderr and (tmp_path / "m").is_dir()


def test_a_benchmark_that_fails(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("cp failed with\nexit code 3")

    monkeypatch.setattr(bench, "bench", fail)
    assert cli.main(["bench", str(tmp_path / "b")]) == 1
    assert capsys.readouterr().err == "error: cp failed with exit code 3\n"


@pytest.mark.parametrize("command", ["to-megatron", "reshard", "to-hf", "verify", "bench"])
def test_every_option_has_a_help_and_exit_codes_are_told(command, capsys):
    parser = cli.build_parser()._subparsers._group_actions[0].choices[command]
    assert not [action.dest for action in parser._actions if not action.help]
    assert " ".join(cli.EXIT_CODES.split()) in " ".join(parser.format_help().split())
    assert ("--hf-config" in parser.format_help()) == (command in ("reshard", "to-hf", "verify"))


def test_a_nan_code_is_refused(tmp_path):
    source = write_fp8(tmp_path / "source", CONFIG)
    tensors, name = load(source), "model.layers.1.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}: the FP8 weight holds NaN codes"):
        convert(source, tmp_path / "out", Target(kind="hf", cast="bf16"))
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "moved", Target(kind="megatron", layout=ParallelLayout(tp=2)))  # bytes move as they are


def test_bf16_layers_are_advised_only_where_they_help():
    narrow = published("Llama-3.1-8B", num_key_value_heads=1, head_dim=64)
    with pytest.raises(ValueError, match=r"none in FP8; keep .*--bf16-layer, or precision\.bf16_layers of a recipe"):
        check_layout_of(narrow, ParallelLayout(), fp8_modules(narrow))
    whole = published("Llama-3.1-8B")
    with pytest.raises(ValueError, match=r"TP degrees that work: 1, 2, 4, 8$"):
        check_layout_of(whole, ParallelLayout(tp=3), fp8_modules(whole))
