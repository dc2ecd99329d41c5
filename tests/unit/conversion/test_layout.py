"""Which layouts are legal (no rank boundary cuts a scale block), and that Megatron-core deals layers out as `stage_layers` says."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from conversion.layout import ParallelLayout, check_layout, fp8_modules, padded_vocab_size, stage_layers, working_tp_degrees
from tests.unit.conversion.shapes import published

# Fail because of ffn / TP, as the table says.
ILLEGAL = [
    ("Qwen2.5-72B", 2),
    ("Qwen2.5-72B", 4),
    ("Qwen2.5-72B", 8),
    ("Qwen2.5-14B", 8),
    ("Qwen3-4B", 8),
]
LEGAL_AT_8 = ["Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen2.5-32B"]


@pytest.mark.parametrize("row_parallel", ["k_complete", "k_split"])
@pytest.mark.parametrize("name, tp", ILLEGAL)
def test_known_illegal_cases_are_refused_with_value_limit_and_way_out(name, tp, row_parallel):
    arch = published(name)
    with pytest.raises(ValueError) as error:
        check_layout(arch, ParallelLayout(tp=tp, row_parallel=row_parallel), fp8=True)
    message = str(error.value)
    works = working_tp_degrees(arch, row_parallel, fp8=True)
    assert f"{arch.ffn_hidden_size} / tp {tp} = {arch.ffn_hidden_size // tp}" in message
    assert "multiple of the FP8 block size 128" in message
    assert message.endswith(f"TP degrees that work: {', '.join(map(str, works))}")
    assert tp not in works and 1 in works
    check_layout(arch, ParallelLayout(tp=tp, row_parallel=row_parallel), fp8=False)  # BF16 needs only divisibility


@pytest.mark.parametrize("name, tp, value", [("Qwen2.5-1.5B", 4, "2 kv heads"), ("Qwen3-32B", 16, "8 kv heads")])
def test_cases_that_kv_heads_rule_out_first(name, tp, value):
    with pytest.raises(ValueError, match=f"{value} are fewer than tp={tp}"):
        check_layout(published(name), ParallelLayout(tp=tp), fp8=True)
    # With kv heads enough the ffn width is what fails, as the table says.
    arch = published(name, num_key_value_heads=published(name).num_heads // (3 if tp == 4 else 1))
    with pytest.raises(ValueError, match=f"{arch.ffn_hidden_size} / tp {tp} = "):
        check_layout(arch, ParallelLayout(tp=tp), fp8=True)


@pytest.mark.parametrize("row_parallel", ["k_complete", "k_split"])
@pytest.mark.parametrize("name", LEGAL_AT_8)
def test_known_legal_cases_hold_up_to_tp8(name, row_parallel):
    for tp in (1, 2, 4, 8):
        check_layout(published(name), ParallelLayout(tp=tp, row_parallel=row_parallel), fp8=True)


def test_fewer_kv_heads_than_ranks_names_both_numbers():
    arch = published("Llama-3.1-8B", num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"2 kv heads are fewer than tp=4 ranks.*TP degrees that work: 1, 2"):
        check_layout(arch, ParallelLayout(tp=4))


def test_qwen25_7b_has_28_heads_and_4_kv_heads():
    assert working_tp_degrees(published("Qwen2.5-7B"), "k_complete", fp8=True) == (1, 2, 4)


def test_k_complete_also_cuts_hidden_size():
    arch = published("Qwen2.5-0.5B", num_attention_heads=8, num_key_value_heads=4, head_dim=128)  # hidden 896 = 7 * 128, ffn 38 * 128
    check_layout(arch, ParallelLayout(tp=2, row_parallel="k_split"), fp8=True)
    with pytest.raises(ValueError, match=r"o_proj rows \(hidden_size\) 896 / tp 2 = 448"):
        check_layout(arch, ParallelLayout(tp=2, row_parallel="k_complete"), fp8=True)


def test_merged_parts_need_whole_blocks_at_tp1_too():
    # SmolLM2 as published: q 576 rows, k and v 192.
    arch = published("Llama-3.2-1B", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
    with pytest.raises(ValueError, match=r"q_proj rows 576 / tp 1 = 576.*TP degrees that work: none"):
        check_layout(arch, ParallelLayout(), fp8=True)
    aligned = published("Llama-3.2-1B", hidden_size=768, num_attention_heads=12, num_key_value_heads=4, intermediate_size=1536)
    assert working_tp_degrees(aligned, "k_complete", fp8=True) == (1, 2)


def test_bf16_layers_make_an_illegal_layout_legal_only_where_they_say_so():
    arch = published("Qwen2.5-72B")
    globs = ("*.mlp.*",)
    check_layout(arch, ParallelLayout(tp=8), fp8=True, bf16_layers=globs)
    with pytest.raises(ValueError, match="gate_proj"):
        check_layout(arch, ParallelLayout(tp=8), fp8=True, bf16_layers=("model.layers.0.mlp.*",))
    modules = fp8_modules(arch, globs)
    assert len(modules) == 4 * arch.num_layers
    assert "model.layers.3.self_attn.o_proj" in modules and "model.layers.3.mlp.up_proj" not in modules


def test_globs_that_match_nothing_or_split_a_merged_layer_are_errors():
    arch = published("Qwen3-0.6B")
    with pytest.raises(ValueError, match="down_porj"):
        fp8_modules(arch, ("*.mlp.down_porj",))
    with pytest.raises(ValueError, match=r"q_proj.*BF16; they run as one GEMM"):
        fp8_modules(arch, ("*.self_attn.q_proj",))
    assert len(fp8_modules(arch, ("lm_head",))) == 7 * arch.num_layers


@pytest.mark.parametrize(
    "layers, pp, vpp, first, last",
    [
        *[(8, 1, 1, None, None), (8, 4, 1, None, None), (8, 2, 2, None, None), (16, 4, 2, None, None), (7, 2, 1, 3, None)],
        *[(7, 3, 1, 3, None), (9, 4, 1, 2, 3), (8, 3, 1, None, 2), (12, 3, 2, 2, 4), (10, 3, 2, 2, None), (5, 2, 1, 2, 3)],
        (10, 4, 2, 4, 2),
    ],
)
def test_layers_are_dealt_out_as_megatron_core_does(layers, pp, vpp, first, last):
    layout = ParallelLayout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
    dealt = stage_layers(published("Qwen3-0.6B", layers=layers), layout)
    assert sorted(n for r in dealt.values() for n in r) == list(range(layers))
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        pipeline_dtype=torch.bfloat16,
    )
    for (p, v), numbers in dealt.items():
        assert numbers.start == get_transformer_layer_offset(config, vp_stage=v if vpp > 1 else None, pp_rank=p)


@pytest.mark.parametrize(
    "layers, options, words",
    [
        (7, {"pp": 2}, "7 layers cannot be dealt over pp=2"),
        (8, {"pp": 2, "vpp": 3}, "needs a positive multiple of 3"),
        (8, {"pp": 2, "first_stage_layers": 3, "last_stage_layers": 4}, "1 layers are left for 0 ranks"),
        (4, {"pp": 2, "first_stage_layers": 4}, "pipeline rank 1 gets 0"),
        (2, {"pp": 4}, "cannot be dealt over pp=4"),
    ],
)
def test_pipelines_that_do_not_fit_are_refused(layers, options, words):
    with pytest.raises(ValueError, match=words):
        check_layout(published("Qwen3-0.6B", layers=layers), ParallelLayout(**options))


@pytest.mark.parametrize("options, words", [({"tp": 0}, "tp is 0"), ({"vpp": 2}, "vpp is 2"), ({"row_parallel": "rows"}, "'rows'")])
def test_layouts_that_are_wrong_by_themselves(options, words):
    with pytest.raises(ValueError, match=words):
        ParallelLayout(**options)


def test_vocabulary_is_padded_once_to_a_multiple_of_divisor_times_tp():
    arch = published("Qwen3-0.6B", vocab=1003)
    assert [padded_vocab_size(arch, tp) for tp in (1, 2, 4)] == [1024, 1024, 1024]
    assert padded_vocab_size(arch, 16) == 2048
    assert padded_vocab_size(published("Qwen3-0.6B", vocab=1024), 4) == 1024  # already padded stays
