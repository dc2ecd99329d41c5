"""The recipes directory: complete documentation, minimal differences, names after the grammar."""

import re
from enum import Enum
from functools import cache
from pathlib import Path

import pytest
import yaml

from conversion.architecture import ModelArchitecture
from jetrl_megatron.config import Recipe
from jetrl_megatron.data.sources import parse_source
from jetrl_megatron.layout import check_recipe_layout
from jetrl_megatron.load import _flatten, flat_recipe, load_recipe, schema

RECIPES = Path(__file__).parents[2] / "recipes"
STEM = re.compile(
    r"grpo-(?P<model>[a-z0-9.]+(-[a-z0-9.]+)*)-(?P<n>\d+)n(?P<g>\d+)[gp]-tp(?P<tp>\d+)pp(?P<pp>\d+)-(?P<arm>bf16|fp8_rollout|jetrl)"
)
ALL = sorted(p.stem for p in RECIPES.glob("*.yaml"))
RUNNABLE = [stem for stem in ALL if not stem.startswith("_")]
GIVEN = ["model.path=DIR", "data.train=[FILE]", "data.eval=[FILE]"]


@cache
def own_keys(stem: str) -> dict:
    tree = yaml.safe_load((RECIPES / f"{stem}.yaml").read_text())
    return {key: value for key, (value, _) in _flatten(tree, stem, skip=("defaults",)).items()}


def parent_of(stem: str) -> str | None:
    return yaml.safe_load((RECIPES / f"{stem}.yaml").read_text()).get("defaults")


def must_be_given(stem: str) -> bool:
    parent = parent_of(stem)
    return own_keys(stem).get("model.path") == "???" or (parent is not None and must_be_given(parent))


@cache
def flat(stem: str) -> dict:
    words = GIVEN if must_be_given(stem) else []
    return flat_recipe(load_recipe(RECIPES / f"{stem}.yaml", [*words, "run.dir=d"]))


def test_base_gives_every_key_its_default_with_a_comment():
    base = own_keys("_base")
    assert base == flat_recipe(Recipe())
    lines = (RECIPES / "_base.yaml").read_text().splitlines()
    bare = [line for line in lines if line.strip() and not line.startswith("#") and not re.search(r" # \S", line)]
    assert bare == []


def test_base_names_every_word_that_may_be_chosen():
    lines = {}
    section = []
    for line in (RECIPES / "_base.yaml").read_text().splitlines():
        match = re.match(r"( *)(\w+):", line)
        if match:
            section = [*section[: len(match[1]) // 2], match[2]]
            lines[".".join(section)] = line
    missing = []
    for key, hint in schema().items():
        enums = [t for t in (hint, *getattr(hint, "__args__", ())) if isinstance(t, type) and issubclass(t, Enum)]
        missing += [f"{key}: {m.name}" for enum in enums for m in enum if not re.search(rf"\b{m.name}\b", lines[key])]
    assert missing == []


@pytest.mark.parametrize("stem", ALL)
def test_recipe_holds_only_what_differs_from_its_parent(stem):
    if stem == "_base":
        assert parent_of(stem) is None
        return
    parent = flat(parent_of(stem))
    own = own_keys(stem)
    assert [key for key, value in own.items() if parent[key] == value] == []
    assert own, f"{stem} differs in nothing from its parent"


@pytest.mark.parametrize("stem", RUNNABLE)
def test_name_says_what_the_recipe_does(stem):
    match = STEM.fullmatch(stem)
    assert match, stem
    recipe = flat(stem)
    assert (recipe["parallel.tp"], recipe["parallel.pp"]) == (int(match["tp"]), int(match["pp"]))
    assert recipe["precision.arm"] == match["arm"]
    assert int(match["n"]) * int(match["g"]) % (int(match["tp"]) * int(match["pp"])) == 0


def test_arms_of_one_run_differ_in_one_key():
    families = {stem.rsplit("-", 1)[0] for stem in RUNNABLE}
    for family in families:
        recipes = {stem: flat(stem) for stem in RUNNABLE if stem.rsplit("-", 1)[0] == family}
        reference = recipes[f"{family}-jetrl"]
        for stem, recipe in recipes.items():
            differing = [key for key in recipe if recipe[key] != reference[key]]
            assert differing == ([] if stem.endswith("-jetrl") else ["precision.arm"]), stem


def test_a_sequence_of_the_largest_size_fits_a_micro_batch():
    for stem in RUNNABLE:
        recipe = flat(stem)
        assert recipe["data.max_prompt_toks"] + recipe["rollout.max_new_toks"] <= recipe["parallel.micro_batch_toks"], stem


def test_paper_settings():
    recipe = flat("grpo-qwen3-8b-1n8g-tp1pp1-jetrl")
    keys = ("optim.lr", "grpo.kl_coef", "rollout.prompts_per_step", "rollout.group_size", "rollout.max_new_toks")
    assert [recipe[key] for key in keys] == [1e-6, 1e-3, 256, 4, 8192]
    recipe = flat("grpo-qwen3-8b-deepmath-1n8g-tp1pp1-jetrl")
    assert [recipe[key] for key in keys] == [1e-6, 1e-3, 256, 16, 16384]


@pytest.mark.parametrize("stem", [stem for stem in RUNNABLE if stem.endswith("-jetrl") and "smollm2" not in stem])
def test_every_data_set_is_known_by_its_name(stem):
    recipe = flat(stem)
    assert [parse_source(name, evaluating=False).path for name in recipe["data.train"]] == [None] * len(recipe["data.train"])
    assert [parse_source(name, evaluating=True).split for name in recipe["data.eval"]] != []


PUBLISHED = {  # layers, hidden, query heads, kv heads, ffn: from each model's config.json; head_dim is 128
    "Qwen3-8B-Base": ("qwen3", 36, 4096, 32, 8, 12288),
    "Qwen3-14B-Base": ("qwen3", 40, 5120, 40, 8, 17408),
    "Qwen3-32B": ("qwen3", 64, 5120, 64, 8, 25600),
    "Qwen2.5-7B": ("qwen2", 28, 3584, 28, 4, 18944),
    "Llama-3.1-8B": ("llama", 32, 4096, 32, 8, 14336),
    "Llama-3.1-70B": ("llama", 80, 8192, 64, 8, 28672),
}


def published(path: str) -> ModelArchitecture:
    family, layers, hidden, heads, kv_heads, ffn = PUBLISHED[Path(path).name]
    config = {"model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    config |= {"num_key_value_heads": kv_heads, "head_dim": 128, "intermediate_size": ffn, "vocab_size": 1000}
    return ModelArchitecture.from_hf_config(config)


@pytest.mark.parametrize("stem", [stem for stem in RUNNABLE if "smollm2" not in stem])
def test_layout_is_legal_for_the_model(stem, monkeypatch):
    monkeypatch.setattr(ModelArchitecture, "from_hf_directory", staticmethod(published))
    check_recipe_layout(load_recipe(RECIPES / f"{stem}.yaml"))


def test_an_illegal_layout_names_the_keys_the_limit_and_what_works():
    tiny = RECIPES / "grpo-tiny-1n2p-tp2pp1-jetrl.yaml"
    message = r"parallel.tp=4, .*precision.arm=jetrl with model.synthetic: tp=4 is illegal .*TP degrees that work: 1, 2$"
    with pytest.raises(ValueError, match=message):
        check_recipe_layout(load_recipe(tiny, ["parallel.tp=4"]))
    with pytest.raises(ValueError, match=r"parallel.pp=4.*2 layers"):
        check_recipe_layout(load_recipe(tiny, ["parallel.pp=4"]))
    with pytest.raises(ValueError, match=r"nowhere/config.json does not exist"):
        check_recipe_layout(load_recipe(tiny, ["model.path=nowhere"]))
