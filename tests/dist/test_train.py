"""`train` on every layout and in every arm: two steps of the loop, whose first record must be the single process's.

Before the first update every layout holds the same weights, so completions, rewards and lengths of step 1 are equal. The weights of the
second step differ by what `test_layouts` bounds.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jetrl_megatron.config import Recipe
from jetrl_megatron.load import load_recipe
from jetrl_megatron.run.records import read_records
from tests.dist.ranks import run_ranks
from tests.dist.train_run import train_recipes

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
SMALL = [
    *("run.steps=2", "run.save_every=2", "run.tensorboard=false", "run.export_hf=false", "warm_start.steps=0", "optim.warmup_steps=0"),
    *("rollout.prompts_per_step=6", "rollout.group_size=4", "rollout.max_new_toks=5", "parallel.micro_batch_toks=128", "optim.lr=1e-3"),
    *("reward.function=tests.dist.interrupt.text_reward:reward", "reward.workers=1", "data.max_eval_prompts=5", "eval.samples=2"),
]
ONE_PROCESS = {
    "jetrl": ["precision.arm=jetrl"],
    "bf16": ["precision.arm=bf16"],
    "fp8_rollout": ["precision.arm=fp8_rollout"],
    "epochs": ["grpo.epochs=2", "grpo.minibatches=2", "run.steps=1"],
}
TWO_PROCESSES = {"tp2": ["parallel.tp=2"], "pp2": ["parallel.pp=2"], "dp2": [], "dp2-fp8_rollout": ["precision.arm=fp8_rollout"]}
EQUAL = ("reward", "response_toks", "truncated_share", "zero_advantage_share", "logprob_abs_diff_max", "toks", "lr", "version")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The records of every run, by name."""
    root, found = tmp_path_factory.mktemp("train"), {}
    for num_processes, group in ((1, ONE_PROCESS), (2, TWO_PROCESSES)):
        recipes = [recipe_of(root / name, words) for name, words in group.items()]
        assert run_ranks(train_recipes, num_processes, recipes) == [[0] * len(recipes)] * num_processes
        found |= {name: read_records(root / name / "records.jsonl") for name in group}
    return found


def recipe_of(folder: Path, words: list[str]) -> Recipe:
    """The demo's recipe, smaller, on one rank unless `words` say more."""
    recipe = load_recipe(ROOT / "recipes" / "grpo-tiny-1n2p-tp2pp1-jetrl.yaml", ["parallel.tp=1", *SMALL, *words])
    return replace(recipe, run=replace(recipe.run, dir=str(folder)))


def step(records: dict[str, list[dict[str, Any]]], name: str, number: int) -> dict[str, Any]:
    """One step's record."""
    (found,) = [r for r in records[name] if (r["kind"], r["step"]) == ("step", number)]
    return found


@pytest.mark.parametrize(("name", "reference"), [("tp2", "jetrl"), ("pp2", "jetrl"), ("dp2", "jetrl"), ("dp2-fp8_rollout", "fp8_rollout")])
def test_the_first_step_of_a_layout_is_the_single_processs(records: dict, name: str, reference: str) -> None:
    assert [(r["kind"], r["step"]) for r in records[name]] == [("eval", 0), ("step", 1), ("step", 2), ("eval", 2)]
    first, want = records[name][0], records[reference][0]
    assert first == want, "the evaluation before training"
    first, want = step(records, name, 1), step(records, reference, 1)
    assert {key: first[key] for key in EQUAL} == {key: want[key] for key in EQUAL}
    # Sums over tokens in another order, and the gradient within the bounds of test_layouts.
    for key in ("logprob_abs_diff", "token_mult_prob_error", "k3_kl", "loss", "policy_loss", "entropy", "kl"):
        assert first[key] == pytest.approx(want[key], rel=1e-6, abs=1e-7), key
    assert first["grad_norm"] == pytest.approx(want["grad_norm"], rel=0.02)
    assert 0.0 < first["reward"] < 1.0 and first["toks"] == 24 * first["response_toks"]


@pytest.mark.parametrize("name", ["jetrl", "bf16", "tp2", "pp2", "dp2", "epochs"])
def test_one_flow_has_no_mismatch_in_any_step(records: dict, name: str) -> None:
    steps = [r for r in records[name] if r["kind"] == "step"]
    assert [(r["logprob_abs_diff"], r["logprob_abs_diff_max"], r["k3_kl"]) for r in steps] == [(0.0, 0.0, 0.0)] * len(steps)
    assert [r["token_mult_prob_error"] for r in steps] == [1.0] * len(steps)


@pytest.mark.parametrize("name", ["fp8_rollout", "dp2-fp8_rollout"])
def test_two_flows_have_one_in_every_step(records: dict, name: str) -> None:
    for number in (1, 2):
        record = step(records, name, number)
        assert 1e-4 < record["logprob_abs_diff"] < record["logprob_abs_diff_max"]
        rows = record["mismatch_by_position"]
        assert [row["from"] for row in rows] == [0] and rows[0]["toks"] == record["toks"], "completions of at most 5 tokens lie in one bin"
        assert rows[0]["logprob_abs_diff"] == record["logprob_abs_diff"]
        assert record["k3_kl"] > 0.0 and record["token_mult_prob_error"] > 1.0


def test_the_reference_policy_is_the_start_in_the_same_flow(records: dict) -> None:
    """So the KL is exactly 0 before the first update and above 0 after it."""
    for name in ("jetrl", "bf16", "fp8_rollout", "tp2", "pp2", "dp2"):
        assert step(records, name, 1)["kl"] == 0.0
        assert step(records, name, 2)["kl"] > 0.0


def test_the_arms_are_different_models(records: dict) -> None:
    norms = {step(records, name, 1)["grad_norm"] for name in ONE_PROCESS}
    assert len(norms) == 4


def test_every_epoch_and_minibatch_is_a_step_of_the_optimizer(records: dict) -> None:
    assert step(records, "epochs", 1)["version"] == 4
    assert [step(records, "jetrl", n)["version"] for n in (1, 2)] == [1, 2]
