"""Which recipe an evaluation runs under: the run's own, with the words that it reads and no others."""

from pathlib import Path

import pytest

from jetrl_megatron.config import Arm, Engine
from jetrl_megatron.evaluate import recipe_for


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with an export, as far as a recipe is concerned."""
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text("model: {path: m, tokenizer: t}\nparallel: {tp: 2}\ndata: {train: [a.jsonl]}\n")
    return tmp_path / "run"


def test_words_that_change_an_evaluation_are_applied(run: Path, tmp_path: Path) -> None:
    words = ["precision.arm=bf16", "eval.samples=3", "data.instruction=x", "rollout.max_new_toks=5", "run.seed=8", "reward.timeout_s=2"]
    recipe = recipe_for(run, "b.jsonl", words, tmp_path)
    found = (recipe.precision.arm, recipe.eval.samples, recipe.data.instruction, recipe.rollout.max_new_toks, recipe.run.seed)
    assert (*found, recipe.reward.timeout_s) == (Arm.bf16, 3, "x", 5, 8, 2.0)
    assert (recipe.data.train, recipe.data.eval) == ((), ("b.jsonl",))
    assert (recipe.parallel.tp, recipe.model.path) == (1, str(run / "hf"))


def test_a_run_that_drew_ahead_is_evaluated_with_the_embedded_engine(run: Path, tmp_path: Path) -> None:
    own = run / "recipe.yaml"
    own.write_text(own.read_text() + "rollout: {engine: vllm_pool, max_staleness: 1}\n")
    rollout = recipe_for(run, "b", [], tmp_path).rollout
    assert (rollout.engine, rollout.max_staleness) == (Engine.local, 0)


def test_the_tokenizer_is_the_exports_unless_a_word_names_another(run: Path, tmp_path: Path) -> None:
    assert recipe_for(run, "b", [], tmp_path).model.tokenizer == ""
    assert recipe_for(run, "b", ["model.tokenizer=other"], tmp_path).model.tokenizer == "other"


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("model.path=elsewhere", "the weights are those of"),
        ("model.synthetic.num_layers=2", "the weights are those of"),
        ("parallel.tp=2", "one process"),
        ("parallel.micro_batch_toks=256", "one process"),
        ("rollout.engine=vllm_pool", "the embedded engine"),
        ("rollout.temperature=0.5", "the embedded engine"),
        ("run.dir=there", "one process"),
        ("data.eval=[c.jsonl]", "name the data with --data"),
        ("data.train=[c.jsonl]", "an evaluation trains on nothing"),
        ("data.max_prompts=5", "data.max_eval_prompts"),
    ],
)
def test_words_that_would_change_nothing_are_refused(run: Path, tmp_path: Path, word: str, why: str) -> None:
    with pytest.raises(
        ValueError, match=rf"command line: jetrl eval does not read {word.split('=')[0]}: .*{why}.* It reads data\.\*, eval"
    ):
        recipe_for(run, "b.jsonl", [word], tmp_path)


def test_a_run_whose_recipe_was_emptied_is_refused(run: Path, tmp_path: Path) -> None:
    (run / "recipe.yaml").write_text("")
    with pytest.raises(ValueError, match=r"recipe.yaml is empty"):
        recipe_for(run, "b.jsonl", [], tmp_path)
