"""What `bench rollout` and `bench sync` measure without weight files: a directory that says which model, and an actor that draws it."""

import argparse
import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from jetrl_megatron.actor.actor import randomize_parameters
from jetrl_megatron.bench import engine_arms, sync
from jetrl_megatron.bench.engine_arms import _model_without_weights, _worker_command, parser, run_arms
from jetrl_megatron.data.tokenizer import load_tokenizer

TINY = "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml"


def named(model=None, layers=None, recipe=TINY):
    return argparse.Namespace(recipe=recipe, model=model, layers=layers)


def test_a_named_shape_is_written_without_weights(tmp_path):
    (word,) = _model_without_weights(named("qwen3-8b", 3), [], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert word == f"model.path={tmp_path / 'model'}" and not list(tmp_path.rglob("*.safetensors"))
    wanted = {
        "architectures": ["Qwen3ForCausalLM"],  # without it vLLM takes another implementation of the model
        "dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 3,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert load_tokenizer(tmp_path / "model").eos_token_id == config["eos_token_id"]


def test_the_recipes_own_synthetic_shape_keeps_the_tokenizers_vocabulary(tmp_path):
    _model_without_weights(named(), ["model.synthetic.hidden_size=384"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["hidden_size"] == 384 and config["vocab_size"] == len(load_tokenizer(tmp_path / "model"))


def test_given_weights_are_used_and_not_mixed_with_a_shape(tmp_path):
    assert _model_without_weights(named(), [f"model.path={tmp_path}"], tmp_path / "model") == []
    with pytest.raises(ValueError, match=r"--model qwen3-8b draws random weights, and model.path is"):
        _model_without_weights(named("qwen3-8b"), [f"model.path={tmp_path}"], tmp_path / "model")


def test_a_worker_reads_the_command_that_it_was_started_with_whatever_the_last_option_takes():
    options = parser("sync", "")
    for argv in ([TINY, "--arms", "jetrl", "bf16"], [TINY, "parallel.tp=1", "--nproc", "1"]):
        command = _worker_command("sync", argv, "bf16:/tmp/bf16.json", ["model.path=/tmp/model"])
        args, rest = options.parse_known_args(command[5:])
        assert args.worker == "bf16:/tmp/bf16.json" and args.random_weights and "model.path=/tmp/model" in [*args.overrides, *rest]
    args, rest = options.parse_known_args(_worker_command("sync", [TINY], "bf16:/tmp/x", [])[5:])
    assert not args.random_weights and not rest


@pytest.mark.parametrize("words", [["--layers", "0", "--model", "qwen3-8b"], ["--layers", "2"], ["--pushes", "0"]])
def test_options_that_make_no_sense_end_before_anything_starts(words):
    with pytest.raises(SystemExit):
        sync.main([TINY, *words])


def test_drawn_parameters_are_finite_equal_in_equal_shapes_and_neutral_where_they_are_vectors():
    chunk = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 256), "b": torch.nn.Linear(64, 256, bias=False), "norm": torch.nn.RMSNorm(64)})
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.fill_(float("nan"))
    randomize_parameters(chunk)
    a, b = chunk["a"], chunk["b"]
    assert torch.equal(a.weight, b.weight) and 0.015 < float(a.weight.detach().std()) < 0.025
    assert not a.bias.any() and bool((chunk["norm"].weight == 1).all())


def test_what_an_arm_measured_is_written_before_the_next_arm_starts(tmp_path, monkeypatch):
    started = []

    def launch(command, num_processes, grace_s, *, resumes):
        assert not resumes
        arm, _, out = command[command.index("--worker") + 1].partition(":")
        started.append(arm)
        if arm == "bf16":
            return 3
        Path(out).write_text(json.dumps({"push_s": 0.5}))
        return 0

    monkeypatch.setattr(engine_arms, "launch", launch)
    argv = [TINY, "parallel.tp=1", "--nproc", "1", "--arms", "jetrl", "bf16", "--json", str(tmp_path / "out.jsonl")]
    assert run_arms("sync", parser("sync", "text"), argv, lambda session, args: {}) == 3
    (record,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert started == ["jetrl", "bf16"] and (record["arm"], record["push_s"]) == ("jetrl", 0.5)


@pytest.mark.parametrize(("code", "with_log"), [(3, True), (3, False), (0, True)])
def test_the_logs_of_an_arm_that_failed_outlive_its_folder(tmp_path, monkeypatch, capsys, code, with_log):
    folders = []

    def launch(command, *rest, **options):
        out = Path(command[command.index("--worker") + 1].partition(":")[2])
        folders.append(out.parent)
        if with_log:
            (out.with_suffix("") / "engines").mkdir(parents=True)
            (out.with_suffix("") / "engines" / "server0-start1.log").write_text("out of memory")
        return code

    monkeypatch.setattr(engine_arms, "launch", launch)
    monkeypatch.setattr(engine_arms.tempfile, "tempdir", str(tmp_path))
    argv = [TINY, "parallel.tp=1", "--nproc", "1", "--arms", "jetrl"]
    assert run_arms("sync", parser("sync", "text"), argv, lambda session, args: {}) == (code or 1)
    said = capsys.readouterr().err
    kept = sorted(tmp_path.rglob("*.log"))
    assert not folders[0].exists() and len(kept) == (code != 0 and with_log)
    if kept:
        assert f"arm jetrl left without a result; its engines' logs are in {kept[0].parent}\n" in said
        assert kept[0].read_text() == "out of memory"
    else:
        assert ("arm jetrl was stopped and has no result\n" if code == 0 else "arm jetrl left without a result\n") in said


def test_an_arm_whose_logs_have_no_room_is_told_of_all_the_same(tmp_path, monkeypatch, capsys):
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "server0-start1.log").write_text("no room")

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(engine_arms.shutil, "copytree", full)
    monkeypatch.setattr(engine_arms.tempfile, "tempdir", str(tmp_path))
    engine_arms._say_why("jetrl", 1, tmp_path / "engines")
    said = capsys.readouterr().err
    assert said.startswith("error: arm jetrl left without a result; its engines' logs are gone") and "No space left" in said
    assert [path.name for path in tmp_path.iterdir()] == ["engines"]


def test_every_arm_is_prepared_before_the_first_starts(monkeypatch):
    done = []
    monkeypatch.setattr(engine_arms, "launch", lambda command, *rest, **options: done.append("launched") or 3)
    argv = [TINY, "parallel.tp=1", "--nproc", "1", "--arms", "bf16", "jetrl"]

    def prepare(recipes, args):
        done.extend(recipe.precision.arm.value for recipe in recipes)

    assert run_arms("sync", parser("sync", "text"), argv, lambda session, args: {}, prepare) == 3
    assert done == ["bf16", "jetrl", "launched"]


def test_a_file_that_cannot_be_written_is_said_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_arms, "launch", lambda *args: pytest.fail("it was started"))
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "x.jsonl"
    with pytest.raises(ValueError, match=rf"--json {out} cannot be written \(.*name another file"):
        run_arms("sync", parser("sync", "text"), [TINY, "--json", str(out)], lambda session, args: {})


def test_a_worker_says_what_a_user_got_wrong_without_a_traceback(tmp_path):
    command = _worker_command("rollout", [TINY, "precision.backend=deepgemm", "parallel.tp=1"], f"jetrl:{tmp_path / 'x'}", [])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | alone, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "jetrl (rank 0): precision.backend deepgemm cannot run on cpu" in done.stderr
