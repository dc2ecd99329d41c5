"""The tables: complete in both directions against transformers' own models, and errors that list names."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from conversion.architecture import ModelArchitecture
from conversion.layout import ParallelLayout
from conversion.names import check_names, chunk_rules, hf_shapes
from conversion.shards import megatron_tensors
from tests.tiny_models import tiny_config


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tables_name_every_weight_of_the_hugging_face_model_with_its_shape(family, tied):
    config = tiny_config(family, tie_word_embeddings=tied, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert hf_shapes(ModelArchitecture.from_hf_config(config.to_dict())) == expected


@pytest.mark.parametrize("pp, vpp", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_canonical_tensor_stands_in_exactly_one_rule(family, pp, vpp):
    arch = ModelArchitecture.from_hf_config(tiny_config(family, tie_word_embeddings=False).to_dict())
    sources = [(piece.hf, piece.rows[0]) for stored in megatron_tensors(arch, ParallelLayout(pp=pp, vpp=vpp)) for piece in stored.pieces]
    assert len(sources) == len(set(sources))
    assert {name for name, _ in sources} == set(hf_shapes(arch))


def test_tied_head_has_a_parameter_only_where_the_embedding_is_on_another_stage():
    arch = ModelArchitecture.from_hf_config(tiny_config("llama").to_dict())
    assert arch.tie_embeddings
    assert [r.megatron for r in chunk_rules(arch, range(1), True, True)][-1] == "decoder.final_layernorm.weight"
    last = list(chunk_rules(arch, range(3, 4), False, True))[-1]
    assert (last.megatron, last.hf) == ("output_layer.weight", ("model.embed_tokens.weight",))


def test_layer_numbers_are_local_to_the_chunk():
    arch = ModelArchitecture.from_hf_config(tiny_config("qwen3").to_dict())
    rule = next(iter(chunk_rules(arch, range(2, 4), False, False)))
    assert (rule.megatron, rule.hf) == ("decoder.layers.0.input_layernorm.weight", ("model.layers.2.input_layernorm.weight",))


def test_missing_and_spare_names_are_listed_and_buffers_ignored():
    check_names("here", ["a", "b"], ["a", "b", "model.layers.0.self_attn.rotary_emb.inv_freq"])
    with pytest.raises(ValueError, match=r"here: .*1 missing: b; 2 not used: c, d"):
        check_names("here", ["a", "b"], ["a", "c", "d"])
