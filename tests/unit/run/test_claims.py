"""What a run began with besides its recipe: a start in its directory with other prompts, tokenizer, stop ids or model is refused."""

import json

import pytest

from jetrl_megatron.config import Recipe, RunConfig
from jetrl_megatron.run.run_dir import claim_data, open_run_dir

MODEL = {"num_layers": 2, "rope_theta": 1e6, "rope_scaling": None}


@pytest.fixture
def recipe(tmp_path):
    return Recipe(run=RunConfig(dir=str(tmp_path / "run"), steps=3))


@pytest.mark.parametrize("key", ["data.train", "data.eval"])
def test_other_prompts_are_refused_once_something_came_of_the_first(recipe, key):
    run_dir = open_run_dir(recipe, [])
    first = {"data.train": (91, "aa"), "data.eval": (9, "bb")}
    other = first | {key: (8, "cc")}
    claim_data(run_dir, other, {}, (2,), MODEL)
    claim_data(run_dir, first, {}, (2,), MODEL)  # nothing was computed yet: a start that failed leaves no claim
    run_dir.records.write_text('{"kind": "eval", "step": 0}\n')
    claim_data(run_dir, first, {}, (2,), MODEL)
    with pytest.raises(ValueError, match=rf"have changed: {key} was .* and is now \{{'prompts': 8, 'fingerprint': 'cc'\}}. Restore"):
        claim_data(run_dir, other, {}, (2,), MODEL)
    run_dir.data.write_text("{")
    with pytest.raises(ValueError, match=r"data.json is not JSON"):
        claim_data(run_dir, first, {}, (2,), MODEL)
    run_dir.data.write_text("[]")
    with pytest.raises(ValueError, match=r"data.json is not a JSON object \(list\); put it back"):
        claim_data(run_dir, first, {}, (2,), MODEL)


def test_another_tokenizer_is_refused_by_its_files_once_something_came_of_the_first(recipe):
    """Prompts may have the same ids, and yet completions another text, and so another reward."""
    run_dir = open_run_dir(recipe, [])
    prompts = {"data.train": (91, "aa")}
    first = {"tokenizer.json": "11", "vocab.json": "22", "special_tokens_map.json": "33"}
    other = {"tokenizer.json": "11", "vocab.json": "23", "added_tokens.json": "44"}
    claim_data(run_dir, prompts, other, (2,), MODEL)
    claim_data(run_dir, prompts, first, (2,), MODEL)  # nothing was computed yet
    run_dir.records.write_text('{"kind": "eval", "step": 0}\n')
    claim_data(run_dir, prompts, first, (2,), MODEL)
    noted = run_dir.data.read_bytes()
    wrong = r"has changed: added_tokens.json is new, special_tokens_map.json is missing, vocab.json is changed\. Restore .*another run.dir"
    with pytest.raises(ValueError, match=wrong):
        claim_data(run_dir, prompts, other, (2,), MODEL)
    assert run_dir.data.read_bytes() == noted
    run_dir.data.write_text(json.dumps({"data.train": {"prompts": 91, "fingerprint": "aa"}}))
    claim_data(run_dir, prompts, other, (2,), MODEL)  # a start that noted no tokenizer: this one is noted
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        claim_data(run_dir, prompts, {"vocab.json": "23", "added_tokens.json": "44"}, (2,), MODEL)


def test_other_stop_ids_are_refused_once_something_came_of_the_first(recipe):
    """generation_config.json was edited under a run: its completions would end elsewhere in the middle of a curve."""
    run_dir = open_run_dir(recipe, [])
    prompts = {"data.train": (91, "aa")}
    claim_data(run_dir, prompts, {}, (2, 7), MODEL)
    claim_data(run_dir, prompts, {}, (2,), MODEL)  # nothing was computed yet
    run_dir.records.write_text('{"kind": "eval", "step": 0}\n')
    claim_data(run_dir, prompts, {}, (2,), MODEL)
    with pytest.raises(
        ValueError, match=r"eos_token_ids of run.dir .* were \[2\] and are now \[2, 7\]\. Set eos_token_id in gen.*another run"
    ):
        claim_data(run_dir, prompts, {}, (2, 7), MODEL)
    run_dir.data.write_text(json.dumps({"data.train": {"prompts": 91, "fingerprint": "aa"}}))
    claim_data(run_dir, prompts, {}, (2, 7), MODEL)  # a start that noted none: these are noted
    with pytest.raises(ValueError, match=r"were \[2, 7\] and are now \[2\]"):
        claim_data(run_dir, prompts, {}, (2,), MODEL)


def test_another_config_of_the_model_is_refused_once_something_came_of_the_first(recipe):
    """Shapes would not fit a checkpoint; a rope_theta would, and change every log-prob from the next step on."""
    run_dir, prompts = open_run_dir(recipe, []), {"data.train": (91, "aa")}
    claim_data(run_dir, prompts, {}, (2,), MODEL | {"rope_theta": 1e4})
    claim_data(run_dir, prompts, {}, (2,), MODEL)  # nothing was computed yet
    run_dir.records.write_text('{"kind": "eval", "step": 0}\n')
    claim_data(run_dir, prompts, {}, (2,), MODEL)
    with pytest.raises(ValueError, match=r"config.json of .* has changed: rope_theta was 1000000.0 and is now 10000.0\. Set these back"):
        claim_data(run_dir, prompts, {}, (2,), MODEL | {"rope_theta": 1e4})
    run_dir.data.write_text(json.dumps({"data.train": {"prompts": 91, "fingerprint": "aa"}}))
    claim_data(run_dir, prompts, {}, (2,), MODEL | {"rope_theta": 1e4})  # a start that noted none: this one is noted
    with pytest.raises(ValueError, match=r"rope_theta was 10000\.0"):
        claim_data(run_dir, prompts, {}, (2,), MODEL)
