"""config.json -> ModelArchitecture: what wins, what is defaulted, what is refused."""

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from conversion.architecture import ModelArchitecture

BASE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1003,
}


def read(**changes):
    return ModelArchitecture.from_hf_config({**BASE, **changes})


def test_explicit_head_dim_wins_over_hidden_over_heads():
    arch = read(head_dim=32)
    assert (arch.head_dim, arch.q_width, arch.kv_width) == (32, 128, 64)
    assert read().head_dim == 16
    assert read(head_dim=None).head_dim == 16
    assert read(model_type="qwen3").head_dim == 128  # the default of Qwen3Config


@pytest.mark.parametrize("family, bias, norm", [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)])
def test_optional_attention_parameters_follow_the_family(family, bias, norm):
    arch = read(model_type=family)
    assert (arch.qkv_bias, arch.qk_norm) == (bias, norm)


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_agrees_with_the_config_classes_of_transformers(config_class):
    config = config_class(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3, intermediate_size=80)
    arch = ModelArchitecture.from_hf_config(config.to_dict())
    assert (arch.num_layers, arch.hidden_size, arch.ffn_hidden_size) == (3, 64, 80)
    assert arch.head_dim == getattr(config, "head_dim", 16)
    assert arch.vocab_size == config.vocab_size
    assert arch.rope_theta == config.rope_parameters["rope_theta"]
    assert arch.tie_embeddings is config.tie_word_embeddings


def test_missing_kv_heads_are_multi_head_for_llama_and_an_error_elsewhere():
    assert read(num_key_value_heads=None).num_kv_heads == 4
    with pytest.raises(ValueError, match="num_key_value_heads"):
        read(model_type="qwen2", num_key_value_heads=None)


def test_rope_is_read_from_both_generations_of_keys():
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **numbers})
    new = read(rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **numbers})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == {"rope_type": "llama3", **numbers}
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert read(rope_theta=1e6).rope_theta == 1e6
    assert read(rope_scaling={"rope_type": "default"}).rope_scaling is None


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("old", [{**LINEAR, "factor": 4.0}, {"rope_type": "default"}, {**LINEAR, "rope_theta": 1e6}])
def test_ropes_that_contradict_each_other_are_refused(old):
    new = {**LINEAR, "rope_theta": 5e5}
    for same in (LINEAR, {"type": "linear", "factor": 2.0}, new, None, {}):
        assert read(rope_parameters=new, rope_scaling=same) == read(rope_parameters=new)
    with pytest.raises(ValueError, match=r"rope_parameters is .* and rope_scaling is .*contradict each other: keep the one"):
        read(rope_parameters=new, rope_scaling=old)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "mixtral"}, ["mixtral", "llama, qwen2, qwen3"]),
        ({"model_type": "qwen3", "num_experts": 8}, ["num_experts", "8"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"attention_bias": True}, ["attention_bias", "o_proj"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "default, linear, llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"rope_scaling": "linear"}, ["config.json: rope_scaling is 'linear'", "object"]),
        ({"rope_theta": "x"}, ["config.json: rope_theta is 'x'", "number"]),
        ({"rms_norm_eps": "x"}, ["config.json: rms_norm_eps is 'x'", "number"]),
        ({"max_position_embeddings": [1]}, ["config.json: max_position_embeddings is [1]", "number"]),
        ({"layer_types": ["full_attention"]}, ["layer_types names 1 layers", "num_hidden_layers is 2"]),
        ({"layer_types": 3}, ["config.json: layer_types is 3", "list"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
            ["max_window_layers", "4096"],
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
        ({"num_key_value_heads": 3}, ["4", "3"]),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, ["head_dim", "64", "6"]),
    ],
)
def test_refuses_what_would_change_the_model_and_names_it(changes, words):
    with pytest.raises(ValueError) as error:
        read(**changes)
    for word in words:
        assert word in str(error.value)


def test_a_window_that_is_declared_but_off_is_accepted():
    assert read(model_type="qwen2", use_sliding_window=False, sliding_window=131072, max_window_layers=28).num_layers == 2
    assert read(model_type="qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=2).num_layers == 2


def test_missing_and_damaged_config_files(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        ModelArchitecture.from_hf_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ModelArchitecture.from_hf_directory(tmp_path)
