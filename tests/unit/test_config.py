"""A recipe that is wrong fails with the key, the value, what is allowed, where it was written and the way out."""

import pytest

from jetrl_megatron.config import Arm, PrecisionConfig, Recipe, ScaleFormat, WgradGranularity
from jetrl_megatron.load import dump_recipe, flat_recipe, load_recipe, schema

DEFAULTS = "precision: {arm: jetrl}"
"""A recipe that changes nothing."""


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return write


def test_order_is_defaults_then_parents_then_recipe_then_command_line(write):
    write("root", "run: {steps: 1, seed: 1, save_every: 1}\noptim: {lr: 1e-3}")
    write("parent", "defaults: root\nrun: {steps: 2, seed: 2}")
    recipe = load_recipe(write("child", "defaults: parent.yaml\nrun: {steps: 3}"), ["optim.lr=5e-7", "run.keep_last=9"])
    assert (recipe.run.steps, recipe.run.seed, recipe.run.save_every, recipe.run.keep_last) == (3, 2, 1, 9)
    assert recipe.optim.lr == 5e-7
    assert recipe.grpo == Recipe().grpo


def test_types_arrive_as_the_dataclasses_say(write):
    words = [
        "data.train=[gsm8k:train,mawps@x.jsonl]",
        "precision.rollout_scale_format=ue8m0",
        "precision.wgrad_granularity=blocks",
        "data.plain_template={question} =",
        "run.dir=5",
    ]
    recipe = load_recipe(write("r", "precision: {arm: bf16}"), words)
    assert recipe.data.train == ("gsm8k:train", "mawps@x.jsonl")
    assert recipe.precision.arm is Arm.bf16
    assert recipe.precision.rollout_scale_format is ScaleFormat.ue8m0
    assert recipe.precision.wgrad_granularity is WgradGranularity.blocks
    assert recipe.data.plain_template == "{question} ="
    assert recipe.run.dir == "5"
    assert load_recipe(write("s", DEFAULTS), ['data.plain_template="{question}\\n"']).data.plain_template == "{question}\n"


BAD = {
    "optim.lrr=3": r"unknown key 'optim.lrr' \(value 3\); did you mean optim.lr",
    "lr=3": r"unknown key 'lr' .*optim.lr or warm_start.lr",
    "foo.bar=3": r"unknown key 'foo'.*sections are: run, model, .*_base.yaml",
    "optim.lr=fast": r"optim.lr is 'fast' \(str\); it must be a number",
    "optim.lr=null": r"optim.lr is None .*must be a number",
    "run.steps=1.5": r"run.steps is 1.5 .*must be a whole number",
    "run.steps=true": r"run.steps is True .*must be a whole number",
    "run.wandb=maybe": r"run.wandb is 'maybe' .*must be true or false",
    "optim=3": r"optim is a section.*optim.lr, optim.min_lr",
    "optim.lr.x=3": r"optim.lr is \{'x': 3\} .*must be a number",
    "precision.arm=jet": r"precision.arm is 'jet' .*must be one of bf16, fp8_rollout, jetrl",
    "precision.wgrad_granularity=rows": r"wgrad_granularity is 'rows' .*must be one of groups, blocks",
    "parallel.recompute=selective": r"recompute is 'selective' .*must be one of none, fc1, full",
    "precision.rollout_scale_format=x": r"must be one of fp32, ue8m0 or null",
    "data.train=gsm8k": r"data.train is 'gsm8k' .*write data.train=\[a,b\]",
    "data.train=[null]": r"data.train is \[None\]; it must be a list of text",
    "data.train={a: b}": r"data.train is \{'a': 'b'\}; it must be a list of text; write data.train=\[a,b\]",
    "precision.bf16_layers={a: b}": r"bf16_layers is \{'a': 'b'\}; it must be a list of text",
    "data.train=[a, {b: c}]": r"must be a list of text",
    "data.train=[a": r"value '\[a' is not valid YAML",
    "run.steps=???": r"run.steps has no value .*add run.steps=VALUE",
    "run.dir=${oc.env:HOME}": r"\$\{\.\.\.\} is not expanded",
    "steps": r"'steps' is not key=value",
    "parallel.tp=0": r"parallel.tp is 0; it must be at least 1",
    "parallel.vpp=2": r"parallel.vpp is 2 but parallel.pp is 1",
    "optim.min_lr=1": r"optim.min_lr is 1.0, above optim.lr 1e-06; lower it",
    "optim.beta1=1.0": r"optim.beta1 is 1.0; it must lie in \[0, 1\)",
    "rollout.top_p=0.9": r"rollout.top_p is 0.9 .*use top_p=1.0",
    "rollout.temperature=.nan": r"rollout.temperature is nan",
    "rollout.temperature=1e-40": r"rollout.temperature is 1e-40; it must lie in \[0.01, 100.0\]: training needs sampling",
    "rollout.temperature=0": r"rollout.temperature is 0.0; it must lie in \[0.01, 100.0\]: training needs sampling",
    "eval.temperature=1e-40": r"eval.temperature is 1e-40; it must lie in \[0.01, 100.0\]: 0 is greedy",
    "eval.temperature=1e9": r"eval.temperature is 1000000000.0; it must lie in",
    "rollout.max_staleness=1": r"rollout.max_staleness is 1 and rollout.engine is local: .* set rollout.engine=vllm_pool, or",
    "rollout.max_staleness=2": r"rollout.max_staleness is 2; it must lie in \[0, 1\]: one batch is drawn ahead",
    "rollout.max_staleness=-1": r"rollout.max_staleness is -1; it must lie in",
    "rollout.group_size=1": r"rollout.group_size is 1; it must be at least 2: .* always 0 and nothing is learned",
    "grpo.dynamic_max_rounds=64": r"grpo.dynamic_max_rounds is 64; it must lie in \[1, 63\]: a step has 64 seeds",
    "optim.lr=.inf": r"optim.lr is inf; it must be a finite number",
    "reward.timeout_s=.inf": r"reward.timeout_s is inf; it must be at most 86400.0",
    "rollout.vllm.push_timeout_s=.inf": r"rollout.vllm.push_timeout_s is inf; it must be a finite number",
    "grpo.icepop_high=.inf": r"grpo.icepop_high is inf; it must be a finite number",
    "run.seed=18446744073709551616": r"run.seed is 18446744073709551616; it must lie in \[0, 9223372036854775807\]",
    "run.seed=-1": r"run.seed is -1; it must lie in",
    "model.synthetic.init_std=-0.02": r"model.synthetic.init_std is -0.02; it must lie in \(0, 1\]",
    "model.synthetic.init_std=.nan": r"model.synthetic.init_std is nan; it must lie in",
    "rollout.prompts_per_step=0": r"rollout.prompts_per_step is 0",
    "grpo.minibatches=5": r"rollout.prompts_per_step is 32 and grpo.minibatches is 5",
    "grpo.overlong=penalty": r"overlong_buffer_toks is 0; give the number of tokens",
    "grpo.icepop_low=1.5": r"must enclose 1",
    "reward.function=mine": r"reward.function is 'mine'; it must be math or package.module:function",
    "reward.timeout_s=0": r"reward.timeout_s is 0.0; it must be above 0",
    "data.plain_template=Q": r"data.plain_template is 'Q'; it must contain \{question\}",
    "model.synthetic.num_heads=3": r"num_heads is 3 and model.synthetic.num_kv_heads is 2",
    "model.synthetic.family=gpt2": r"must be one of llama, qwen2, qwen3",
    "run.grace_s=0": r"run.grace_s is 0.0; it must be above 0",
    "run.grace_s=86401": r"run.grace_s is 86401.0; it must be at most 86400.0",
    "reward.timeout_s=1e10": r"reward.timeout_s is 10000000000.0; it must be at most 86400.0",
    "reward.memory_mb=2147483649": r"reward.memory_mb is 2147483649; it must lie in \[64, 2147483648\]",
    "precision.attention_backward=cudnn": r"run.deterministic is true; set run.deterministic=false, or use flash2",
    "optim.eps=1e-50": r"optim.eps is 1e-50; it must be at least 1e-30",
    "model.synthetic.num_layers=100000000": r"model.synthetic.num_layers is 100000000; it must lie in \[1, 1000\]",
    "model.synthetic.ffn_hidden_size=1048577": r"model.synthetic.ffn_hidden_size is 1048577; it must lie in \[1, 1048576\]",
    "grpo.overlong_buffer_toks=-5": r"grpo.overlong_buffer_toks is -5; it must be at least 0",
    "eval.top_p=0": r"eval.top_p is 0.0; it must lie in \(0, 1\]",
}


@pytest.mark.parametrize("word", BAD)
def test_bad_override_is_explained_and_names_the_command_line(write, word):
    with pytest.raises(ValueError, match=BAD[word]) as error:
        load_recipe(write("r", DEFAULTS), [word])
    assert "command line" in str(error.value)
    assert word in str(error.value)


def test_drawing_ahead_needs_servers_and_one_draw_a_step(write):
    path = write("r", DEFAULTS)
    assert load_recipe(path, ["rollout.max_staleness=1", "rollout.engine=vllm_pool"]).rollout.max_staleness == 1
    with pytest.raises(
        ValueError, match=r"max_staleness is 1 and rollout.engine is vllm_colocated: only servers with weights of their own"
    ):
        load_recipe(path, ["rollout.max_staleness=1", "rollout.engine=vllm_colocated"])
    words = ["rollout.max_staleness=1", "rollout.engine=vllm_pool", "grpo.dynamic_sampling=true"]
    with pytest.raises(ValueError, match=r"grpo.dynamic_sampling is true: .* set grpo.dynamic_sampling=false, or rollout.max_staleness=0"):
        load_recipe(path, words)


def test_bad_file_is_named(write):
    parent = write("parent", "run: {stepz: 3}")
    with pytest.raises(ValueError, match=rf"{parent}: unknown key 'run.stepz' \(value 3\); did you mean run.steps"):
        load_recipe(write("child", "defaults: parent"))
    parent = write("parent", "parallel: {tp: -1}")
    with pytest.raises(ValueError, match=rf"{parent}: parallel.tp is -1"):
        load_recipe(write("child", "defaults: parent\nrun: {steps: 3}"))


UNREADABLE = {
    "empty": (b"", r"r.yaml is empty; a recipe says at least `defaults: _base`.* recipe.yaml of a run"),
    "comments only": (b"# nothing\n", r"r.yaml is empty"),
    "latin-1": ("run: {dir: café}".encode("latin-1"), r"r.yaml is not UTF-8 text \(byte 14: .*save it as UTF-8"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_is_no_recipe_is_explained(tmp_path, name):
    content, message = UNREADABLE[name]
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


def test_a_directory_is_no_recipe(write, tmp_path):
    with pytest.raises(ValueError, match=rf"recipe {tmp_path} is a directory; name a YAML file, for example {tmp_path}/NAME.yaml"):
        load_recipe(tmp_path)
    write("recipe", DEFAULTS)
    write("a", DEFAULTS)
    with pytest.raises(ValueError, match=rf"for example {tmp_path}/recipe.yaml"):
        load_recipe(tmp_path)


def test_value_that_must_be_given_is_an_error_until_it_is(write):
    parent = write("parent", "model: {path: '???'}\ndata: {train: ['???']}")
    child = write("child", "defaults: parent")
    with pytest.raises(ValueError, match=rf"{parent}: model.path has no value.*add model.path=VALUE"):
        load_recipe(child)
    with pytest.raises(ValueError, match=r"data.train has no value.*add data.train=\[NAME_OR_FILE\]"):
        load_recipe(child, ["model.path=m"])
    assert load_recipe(child, ["model.path=m", "data.train=[a]"]).data.train == ("a",)


def test_chain_faults(write):
    a = write("a", "defaults: b")
    with pytest.raises(ValueError, match=r"defaults names 'b', but .*b.yaml does not exist"):
        load_recipe(a)
    write("b", "defaults: a")
    with pytest.raises(ValueError, match=r"closes a circle \(a.yaml -> b.yaml -> a.yaml\)"):
        load_recipe(a)
    with pytest.raises(ValueError, match=r"must be the name of one recipe"):
        load_recipe(write("c", "defaults: [a, b]"))
    with pytest.raises(ValueError, match=r"holds a list"):
        load_recipe(write("d", "[1, 2]"))
    with pytest.raises(ValueError, match=r"d2.yaml is not valid YAML"):
        load_recipe(write("d2", "run: {steps: 1, steps: 2}"))
    with pytest.raises(FileNotFoundError, match=r"aa.yaml does not exist; did you mean .*a.yaml"):
        load_recipe(a.with_name("aa.yaml"))


def test_a_link_to_nothing_is_named_as_one(tmp_path):
    (tmp_path / "r.yaml").symlink_to("gone.yaml")
    with pytest.raises(FileNotFoundError, match=r"r.yaml is a link to gone.yaml, which does not exist; mend the link$"):
        load_recipe(tmp_path / "r.yaml")


def test_dump_reads_back_equal_and_holds_every_key(write, tmp_path):
    recipe = load_recipe(write("r", DEFAULTS), ["data.train=[a,b]", "optim.lr=3e-7", "precision.arm=bf16", "data.instruction=a: b\n#"])
    dumped = write("dumped", dump_recipe(recipe))
    assert load_recipe(dumped) == recipe
    assert list(flat_recipe(recipe)) == list(schema())
    assert flat_recipe(recipe)["precision.arm"] == "bf16"


def test_run_directories_differ_where_runs_do(write):
    path = write("grpo-x-1n1g-tp1pp1-jetrl", DEFAULTS)

    def run_dir(*words):
        return load_recipe(path, list(words)).run.dir

    assert run_dir() == "runs/grpo-x-1n1g-tp1pp1-jetrl"
    assert run_dir("precision.arm=bf16") == "runs/grpo-x-1n1g-tp1pp1-bf16"
    assert run_dir("run.steps=7", "run.save_every=3") == run_dir()  # a longer run is the same run
    assert run_dir("run.seed=2") == "runs/grpo-x-1n1g-tp1pp1-jetrl+run.seed=2"
    assert run_dir("data.train=[/a/b.jsonl]") == "runs/grpo-x-1n1g-tp1pp1-jetrl+data.train=_a_b.jsonl"
    assert run_dir("run.dir=here") == "here"


def test_precision_sides_of_each_arm():
    sides = {}
    for arm in Arm:
        precision = PrecisionConfig(arm=arm)
        sides[arm.value] = (precision.train_linear.value, precision.rollout_linear.value)
    assert sides == {"bf16": ("bf16", "bf16"), "fp8_rollout": ("bf16", "fp8"), "jetrl": ("fp8", "fp8")}
