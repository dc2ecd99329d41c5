"""The command line: words, exit codes, and how many processes a recipe needs."""

import errno
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jetrl_megatron import cli
from jetrl_megatron.config import ParallelConfig, Recipe
from jetrl_megatron.failure import RunFailure

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = str(RECIPES / "grpo-tiny-1n2p-tp2pp1-jetrl.yaml")


@pytest.fixture
def worker(monkeypatch):
    """Make this process look like rank 1 and record what the run gets."""
    got = {}
    module = types.ModuleType("jetrl_megatron.train")

    def train(recipe, argv, json_lines):
        got.update(recipe=recipe, argv=argv, json_lines=json_lines)
        return got.get("code", 0)

    module.train = train
    monkeypatch.setitem(sys.modules, "jetrl_megatron.train", module)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return got


def test_a_worker_runs_the_recipe_with_its_overrides_wherever_they_stand(worker):
    assert cli.main(["train", TINY, "run.steps=7", "--json", "optim.lr=3e-4"]) == 0
    assert (worker["recipe"].run.steps, worker["recipe"].optim.lr, worker["json_lines"]) == (7, 3e-4, True)
    assert worker["argv"] == ["jetrl", "train", TINY, "run.steps=7", "--json", "optim.lr=3e-4"]


def test_the_runs_own_code_is_passed_on(worker):
    worker["code"] = 1
    assert cli.main(["train", TINY]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", TINY, "run.stepz=7"], "unknown key 'run.stepz'"),
        (["train", "nowhere.yaml"], "recipe nowhere.yaml does not exist"),
        (["train", TINY, "parallel.tp=0"], "parallel.tp is 0"),
        (["train", TINY, "parallel.tp=4"], "TP degrees that work: 1, 2"),
        (["train", str(RECIPES)], f"recipe {RECIPES} is a directory; name a YAML file"),
    ],
)
def test_a_bad_recipe_is_two_and_one_line(capsys, words, message):
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["fly"], ["train"], ["train", TINY, "--fast"], ["train", TINY, "seven"], ["eval", "DIR"]])
def test_a_bad_command_line_is_two(words):
    with pytest.raises(SystemExit) as stop:
        sys.exit(cli.main(words))
    assert stop.value.code == 2


def test_a_library_error_keeps_its_traceback(worker, monkeypatch):
    def broken(recipe, argv, json_lines):
        int("seven")

    sys.modules["jetrl_megatron.train"].train = broken
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["train", TINY])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RunFailure("all samples failed"), "all samples failed"),
        (RuntimeError("[gloo/pair.cc:538] Connection closed by peer [127.0.0.1]:7"), "another rank has left; what it said says why"),
        (
            OSError(errno.ENOSPC, "No space left", "d/actor.pt"),
            "cannot write d/actor.pt: No space left; free space there, or .* run.dir .*",
        ),
        (OSError(errno.EDQUOT, "Quota exceeded"), "cannot write a file of the run: Quota exceeded; free space .*"),
        (OSError(errno.EROFS, "Read-only", "d"), "cannot write d: Read-only; .*"),
        (OSError(errno.ENOSPC, "No space left", "a", None, "copy"), "cannot write copy: No space left; .*"),
    ],
    ids=str,
)
def test_a_run_that_cannot_go_on_is_one_line_and_one(worker, capsys, error, line):
    def fail(recipe, argv, json_lines):
        raise error

    sys.modules["jetrl_megatron.train"].train = fail
    assert cli.main(["train", TINY]) == 1
    assert re.fullmatch(rf"jetrl \(rank 1\): {line}\n", capsys.readouterr().err)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.EIO, "Input/output error")], ids=str)
def test_a_fault_keeps_its_traceback(worker, error):
    def fail(recipe, argv, json_lines):
        raise error

    sys.modules["jetrl_megatron.train"].train = fail
    with pytest.raises(type(error)):
        cli.main(["train", TINY])


def test_number_of_processes(monkeypatch):
    recipe = Recipe(parallel=ParallelConfig(tp=2, pp=2))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert cli.count_processes(recipe, None) == 4
    assert cli.count_processes(recipe, 8) == 8
    with pytest.raises(ValueError, match=r"6 processes \(--nproc\) do not divide .* 2 \* 2 = 4; use --nproc with a multiple of 4"):
        cli.count_processes(recipe, 6)
    assert cli.count_processes(recipe, 64) == 64
    with pytest.raises(ValueError, match=r"68 processes on a machine without GPUs; at most 64 .* torchrun"):
        cli.count_processes(recipe, 68)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert cli.count_processes(recipe, None) == 8
    with pytest.raises(ValueError, match="16 processes need as many GPUs and this machine has 8"):
        cli.count_processes(recipe, 16)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(ValueError, match=r"3 processes \(one for each GPU\)"):
        cli.count_processes(recipe, None)


def test_the_command_line_starts_without_torch():
    code = "import sys, jetrl_megatron.cli; print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False False\n"


def test_wandb_that_is_missing_is_said_before_a_process_starts(monkeypatch, capsys):
    monkeypatch.setattr("jetrl_megatron.metrics.find_spec", lambda name: None)
    monkeypatch.setattr(cli, "launch", lambda *a: pytest.fail("launched"))
    assert cli.main(["train", TINY, "run.wandb=true"]) == 2
    assert "wandb is not installed" in capsys.readouterr().err


def test_bench_gets_its_own_words(monkeypatch):
    got = []
    module = types.ModuleType("jetrl_megatron.bench.__main__")
    module.main = lambda words: got.extend(words) or 0
    monkeypatch.setitem(sys.modules, "jetrl_megatron.bench", types.ModuleType("jetrl_megatron.bench"))
    monkeypatch.setitem(sys.modules, "jetrl_megatron.bench.__main__", module)
    assert cli.main(["bench", "quant", "--json", "x.jsonl"]) == 0
    assert got == ["quant", "--json", "x.jsonl"]


def test_bench_without_a_name_says_which_there_are(capsys):
    from jetrl_megatron.bench.__main__ import COMMANDS

    for words, code in ((["bench", "--help"], 0), (["bench"], 2), (["bench", "nothing"], 2)):
        assert cli.main(words) == code
        said = capsys.readouterr()
        assert all(f"  {name} " in (said.err if code else said.out) for name in COMMANDS)
