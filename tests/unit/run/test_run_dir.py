"""A run directory belongs to one run; what it ran on is written before step 0."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jetrl_megatron.config import Arm, AttentionKernel, Decay, Recipe, RunConfig, WgradGranularity
from jetrl_megatron.load import load_recipe
from jetrl_megatron.run.environment import chosen_variables, describe_environment
from jetrl_megatron.run.run_dir import differing_keys, open_run_dir

MODEL = {"num_layers": 2, "rope_theta": 1e6, "rope_scaling": None}


@pytest.fixture
def recipe(tmp_path):
    return Recipe(run=RunConfig(dir=str(tmp_path / "run"), steps=3))


def test_recipe_and_environment_are_on_disk_when_it_opens(recipe, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    run_dir = open_run_dir(recipe, ["jetrl", "train", "r.yaml"], device="cpu")
    assert load_recipe(run_dir.recipe) == recipe
    (line,) = [json.loads(text) for text in run_dir.environment.read_text().splitlines()]
    assert (line["argv"], line["seed"], line["device"]) == (["jetrl", "train", "r.yaml"], 1234, "cpu")
    assert line["variables"]["NCCL_DEBUG"] == "INFO"
    assert {"torch", "megatron-core", "transformers", "omegaconf", "numpy"} <= set(line["packages"])
    assert "sesame" not in run_dir.environment.read_text()


def test_a_longer_run_reopens_and_the_start_is_added(recipe):
    open_run_dir(recipe, ["first"]).lock.close()
    longer = replace(recipe, run=replace(recipe.run, steps=30, save_every=2, tensorboard=False))
    run_dir = open_run_dir(longer, ["second"])
    assert load_recipe(run_dir.recipe).run.steps == 30
    assert [json.loads(text)["argv"] for text in run_dir.environment.read_text().splitlines()] == [["first"], ["second"]]


def test_another_recipe_is_refused_by_its_keys_and_nothing_is_written(recipe):
    first = open_run_dir(recipe, [])
    first.lock.close()
    first.records.write_text('{"kind": "step", "step": 1}\n')
    before = {p: p.read_bytes() for p in first.path.iterdir() if p.name != "run.lock"}
    other = replace(recipe, precision=replace(recipe.precision, arm=Arm.bf16), optim=replace(recipe.optim, lr=1e-3))
    assert differing_keys(recipe, other) == {"precision.arm": ("jetrl", "bf16"), "optim.lr": (1e-6, 1e-3)}
    with pytest.raises(
        ValueError, match=r"precision.arm was 'jetrl' and is now 'bf16'; optim.lr was 1e-06 and is now 0.001.*another run.dir"
    ):
        open_run_dir(other, [])
    assert {p: p.read_bytes() for p in first.path.iterdir() if p.name != "run.lock"} == before


def test_a_recipe_from_before_wgrad_granularity_was_a_key_is_one_of_groups(recipe):
    """Its default is another by now: read with it, the run would go on with another dW in the middle of a curve."""
    first = open_run_dir(recipe, [])
    first.lock.close()
    first.records.write_text('{"kind": "step", "step": 1}\n')
    kept = [line for line in first.recipe.read_text().splitlines() if "wgrad_granularity" not in line]
    first.recipe.write_text("\n".join(kept) + "\n")
    wrong = rf"precision.wgrad_granularity was 'groups' and is now 'blocks'\. Set these back and name run.dir={first.path},"
    with pytest.raises(ValueError, match=wrong):
        open_run_dir(recipe, [])
    groups = replace(recipe, precision=replace(recipe.precision, wgrad_granularity=WgradGranularity.groups))
    for _ in range(2):  # the second time its recipe.yaml has the key
        open_run_dir(groups, []).lock.close()
    assert load_recipe(first.recipe) == groups


def test_a_start_that_failed_its_checks_does_not_claim_the_directory(recipe):
    first = open_run_dir(recipe, [])
    first.lock.close()
    first.initial_model.mkdir()
    mended = replace(recipe, optim=replace(recipe.optim, lr=1e-3))
    again = open_run_dir(mended, [])
    assert load_recipe(again.recipe) == mended
    assert not first.initial_model.exists(), "it was made from the other recipe"


FLASH2 = {"precision.attention": "flash2", "precision.backend": "deepgemm"}
FLASH3 = FLASH2 | {"precision.attention": "flash3"}


def attention_of(recipe, kernel):
    return replace(recipe, precision=replace(recipe.precision, attention=AttentionKernel(kernel)))


def kernels_of_lines(run_dir):
    return [json.loads(line).get("kernels") for line in run_dir.environment.read_text().splitlines()]


def test_other_kernels_than_the_records_were_computed_with_are_refused(recipe):
    """vLLM was installed under a run: `auto` would choose another kernel, in the middle of a curve."""
    first = open_run_dir(recipe, [], kernels=FLASH3)
    first.lock.close()
    first = open_run_dir(recipe, [], kernels=FLASH2)  # nothing was computed yet: only this start counts
    first.lock.close()
    first.records.write_text('{"kind": "step", "step": 1}\n')
    message = (
        rf"run.dir {first.path} was computed with other kernels: precision.attention ran flash2 and would now run flash3. "
        rf"Go on with precision.attention=flash2 run.dir={first.path} where that can run, or start anew with another run.dir"
    )
    for wanted in (recipe, attention_of(recipe, "flash3")):
        with pytest.raises(ValueError, match=message):
            open_run_dir(wanted, [], kernels=FLASH3)
    assert kernels_of_lines(first) == [FLASH3, FLASH2], "a start that is refused leaves no line"
    for wanted in (attention_of(recipe, "flash2"), recipe):
        again = open_run_dir(wanted, [], kernels=FLASH2)
        again.lock.close()
        assert load_recipe(again.recipe) == wanted
    assert kernels_of_lines(first) == [FLASH3, FLASH2, FLASH2, FLASH2]
    with pytest.raises(ValueError, match=r"precision.backend ran deepgemm and would now run reference\. .* precision.backend=deepgemm run"):
        open_run_dir(recipe, [], kernels=FLASH2 | {"precision.backend": "reference"})


def test_a_run_from_before_backwards_were_noted_goes_on_with_flash2(recipe):
    first = open_run_dir(recipe, [], kernels=FLASH3)
    first.lock.close()
    first.records.write_text('{"kind": "step", "step": 1}\n')
    backward = "precision.attention_backward"
    with pytest.raises(ValueError, match=rf"{backward} ran flash2 and would now run cudnn. Go on with {backward}=flash2"):
        open_run_dir(recipe, [], kernels=FLASH3 | {backward: "cudnn"})
    open_run_dir(recipe, [], kernels=FLASH3 | {backward: "flash2"}).lock.close()


def test_starts_that_noted_no_kernels_are_compared_by_their_recipe(recipe):
    first = open_run_dir(recipe, [])
    first.lock.close()
    lines = [{k: v for k, v in json.loads(text).items() if k != "kernels"} for text in first.environment.read_text().splitlines()]
    first.environment.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first.records.write_text('{"kind": "step", "step": 1}\n')
    with pytest.raises(ValueError, match=r"precision.attention was 'auto' and is now 'flash2'"):
        open_run_dir(attention_of(recipe, "flash2"), [], kernels=FLASH2)
    open_run_dir(recipe, [], kernels=FLASH2).lock.close()
    assert kernels_of_lines(first) == [None, FLASH2]
    with pytest.raises(ValueError, match="other kernels"):
        open_run_dir(recipe, [], kernels=FLASH3)
    with first.environment.open("a") as file:
        file.write('{"half a li')
    with pytest.raises(ValueError, match=r"line 3 of .*environment.jsonl is not JSON .*mend or remove that line"):
        open_run_dir(recipe, [], kernels=FLASH2)


def test_a_directory_that_is_no_run_is_refused(recipe):
    path = Path(recipe.run.dir)
    path.mkdir()
    (path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match=r"holds thesis.tex and no recipe.yaml"):
        open_run_dir(recipe, [])
    assert sorted(p.name for p in path.iterdir()) == ["thesis.tex"]


def test_length_is_fixed_where_the_learning_rate_decays_over_it(recipe):
    longer = replace(recipe, run=replace(recipe.run, steps=9))
    linear = replace(recipe.optim, decay=Decay.linear)
    assert differing_keys(recipe, longer) == {}
    assert differing_keys(replace(recipe, optim=linear), replace(longer, optim=linear)) == {"run.steps": (3, 9)}
    explicit = replace(linear, decay_steps=3)
    assert differing_keys(replace(recipe, optim=explicit), replace(longer, optim=explicit)) == {}


def test_other_ranks_write_nothing(recipe):
    assert open_run_dir(recipe, [], rank=1).path == Path(recipe.run.dir)
    assert not Path(recipe.run.dir).exists()


@pytest.mark.parametrize("place", ["a file/run", "/proc/no such place/run"])
def test_a_place_that_cannot_be_written_is_said(recipe, tmp_path, place):
    (tmp_path / "a file").write_text("")
    path = tmp_path / place
    with pytest.raises(ValueError, match=rf"run.dir {path} cannot be written \(.*set another run.dir"):
        open_run_dir(replace(recipe, run=replace(recipe.run, dir=str(path))), [])


@pytest.mark.parametrize("name", ["environment.jsonl", "run.lock", "recipe.yaml.part"])
def test_a_file_of_the_run_that_cannot_be_written_is_said(recipe, name):
    (Path(recipe.run.dir) / name).mkdir(parents=True)
    (Path(recipe.run.dir) / "recipe.yaml").touch()
    with pytest.raises(ValueError, match=rf"cannot be written \(Is a directory: .*{name}\); set another run.dir"):
        open_run_dir(recipe, [])


def test_an_emptied_recipe_of_a_run_is_said(recipe):
    first = open_run_dir(recipe, [])
    first.lock.close()
    first.records.write_text('{"kind": "step", "step": 1}\n')
    first.recipe.write_text("")
    with pytest.raises(ValueError, match=r"recipe.yaml is empty; .* put its content back, or remove that run directory"):
        open_run_dir(recipe, [])


HOLD = """
import sys
from jetrl_megatron.config import Recipe, RunConfig
from jetrl_megatron.run.run_dir import open_run_dir
held = open_run_dir(Recipe(run=RunConfig(dir=sys.argv[1], steps=3)), [])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_in_use_is_refused_until_its_process_is_gone(recipe, monkeypatch):
    monkeypatch.setattr("jetrl_megatron.run.run_dir._LOCK_WAIT_S", 0.1)
    command = [sys.executable, "-c", HOLD, recipe.run.dir]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"in use by process {process.pid}; wait for it"):
        open_run_dir(recipe, [])
    process.kill()
    process.communicate()
    assert open_run_dir(recipe, []).lock is not None


def test_variables_are_chosen_and_hold_no_secret():
    given = {
        "HOME": "/h",
        "OMP_NUM_THREADS": "1",
        "VLLM_API_KEY": "x",
        "NCCL_token": "x",
        "CUDA_VISIBLE_DEVICES": "0",
        "WANDB_API_KEY": "x",
    }
    assert chosen_variables(given) == {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"}


def test_commit_is_recorded_from_a_checkout():
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert describe_environment([], 0, "cpu")["git"]["commit"] == commit
