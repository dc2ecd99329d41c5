"""A run with a tokenizer of its own, exported, then `jetrl eval` on the export: the tokenizer, the numbers and the order of the checks."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jetrl_megatron.data.tokenizer import build_char_tokenizer, load_tokenizer
from jetrl_megatron.load import load_recipe
from jetrl_megatron.run.records import read_records
from tests.dist.ranks import run_ranks
from tests.dist.train_run import train_recipes
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
ALPHABET = "0123456789max(,)=?"
HELD_OUT = "arithmetic-max-1digit-hedged:test"
WORDS = [
    *("parallel.tp=1", "run.steps=1", "run.tensorboard=false", "warm_start.steps=0", "parallel.micro_batch_toks=128"),
    *("rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_toks=4", "reward.function=tests.dist.test_eval:code_points"),
    *("reward.workers=1", "data.max_eval_prompts=4", "eval.samples=2"),
]


def code_points(text: str, answer: str) -> float:
    """A reward that another tokenizer would change."""
    return sum(map(ord, text)) % 101 / 100


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run directory; beside the weights lies another tokenizer, with other ids for the same characters."""
    root = tmp_path_factory.mktemp("eval")
    model, own = write_tiny_model(root / "model", "qwen3", num_hidden_layers=1), root / "own_tokenizer"
    build_char_tokenizer(model, ALPHABET)
    (model / "merges.txt").write_text("of the other tokenizer")
    build_char_tokenizer(own, ALPHABET[::-1] + "bcdefghijkl")
    recipe = load_recipe(ROOT / "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml", [*WORDS, f"model.path={model}", f"model.tokenizer={own}"])
    recipe = replace(recipe, run=replace(recipe.run, dir=str(root / "run")))
    assert run_ranks(train_recipes, 1, [recipe]) == [[0]]
    return root / "run"


def evaluate(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "jetrl_megatron.cli", "eval", str(run), "--json", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_the_export_carries_the_tokenizer_of_the_run_and_nothing_of_the_other(run: Path) -> None:
    own = run.parent / "own_tokenizer"
    names = {p.name for p in own.iterdir()}
    assert {name: (run / "hf" / name).read_bytes() for name in names} == {name: (own / name).read_bytes() for name in names}
    assert not (run / "hf" / "merges.txt").exists()
    assert load_tokenizer(run / "hf").encode("7)") == load_tokenizer(own).encode("7)") != load_tokenizer(run.parent / "model").encode("7)")


def test_an_evaluation_of_the_run_repeats_its_own_last_one_for_every_source(run: Path) -> None:
    last = read_records(run / "records.jsonl")[-1]
    assert (last["kind"], last["step"]) == ("eval", 1)
    done = evaluate(run, "--data", HELD_OUT, "--data", "arithmetic-max-1digit:test")
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert {key: first[key] for key in ("reward", "pass@1", "response_toks")} == {key: last[key] for key in ("reward", "pass@1", "response_toks")}
    assert (first["data"], second["data"]) == (HELD_OUT, "arithmetic-max-1digit:test")
    assert first["reward"] != second["reward"], "prompt ids differ, so the draws do"


def test_a_wrong_second_source_is_found_before_the_first_is_evaluated(run: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    done = evaluate(run, "--data", HELD_OUT, "--data", str(broken))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "broken.jsonl:1: not JSON" in done.stderr and "Traceback" not in done.stderr
