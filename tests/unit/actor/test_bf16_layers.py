"""`precision.bf16_layers` keeps linears BF16 on both sides, by whole merged layers."""

from contextlib import ExitStack

import pytest
import torch

from jetrl_megatron.actor.linears import FlowLinear
from jetrl_megatron.config import Arm, PrecisionConfig
from jetrl_megatron.fp8 import bf16_linear
from tests.unit.actor.single_rank import completion_logprobs, few_batches, few_samples, single_rank_actor

FUSED = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
EVERY = {f"decoder.layers.{i}.{m}" for i in (0, 1) for m in FUSED}


def bf16_linears(actor, side):
    """Names of the linears whose output is, bit for bit, the BF16 product of their input and parameter."""
    found = set()
    with ExitStack() as hooks, torch.no_grad():
        for module in actor.chunks[0].modules():
            if isinstance(module, FlowLinear):

                def check(module, args, output):
                    if torch.equal(output[0].squeeze(1), bf16_linear(args[0].squeeze(1), module.weight)):
                        found.add(module.flow_name)

                hooks.callback(module.register_forward_hook(check).remove)
        with actor.sides.use(side), actor.sides.in_bf16_steps():
            actor.logprobs(few_batches(actor))
    return found


@pytest.mark.parametrize(
    ("globs", "bf16"),
    [
        ((), set()),
        (("model.layers.1.mlp.down_proj",), {"decoder.layers.1.mlp.linear_fc2"}),
        (("*.mlp.gate_proj", "*.mlp.up_proj"), {n for n in EVERY if "fc1" in n}),
        (("model.layers.0.*", "*.o_proj"), {n for n in EVERY if ".0." in n or "proj" in n}),
        (("*",), EVERY),
    ],
    ids=["none", "one linear", "a merged layer", "globs over layers", "all"],
)
def test_named_layers_run_bf16_on_both_sides_and_no_other(qwen3_dir, globs, bf16):
    with single_rank_actor(qwen3_dir, PrecisionConfig(bf16_layers=globs)) as actor:
        assert bf16_linears(actor, "train") == bf16_linears(actor, "rollout") == bf16
        (cache,) = actor.sides.caches.values()
        assert set(cache.names) == EVERY - bf16


def test_the_arms_by_side(qwen3_dir):
    for arm, train, rollout in ((Arm.bf16, EVERY, EVERY), (Arm.fp8_rollout, EVERY, set()), (Arm.jetrl, set(), set())):
        with single_rank_actor(qwen3_dir, PrecisionConfig(arm=arm)) as actor:
            assert (bf16_linears(actor, "train"), bf16_linears(actor, "rollout")) == (train, rollout)


def test_all_layers_taken_out_is_the_bf16_arm(qwen3_dir):
    found = []
    for precision in (PrecisionConfig(bf16_layers=("*",)), PrecisionConfig(arm=Arm.bf16), PrecisionConfig()):
        with single_rank_actor(qwen3_dir, precision) as actor:
            found.append(completion_logprobs(actor, few_samples(actor)))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("glob", "message"),
    [
        ("*.q_proj", r"k_proj, .*v_proj are FP8 but model.layers.0.self_attn.q_proj BF16; they run as one GEMM"),
        ("model.layers.1.mlp.up_proj", r"model.layers.1.mlp.gate_proj are FP8 but model.layers.1.mlp.up_proj BF16"),
        ("*.down", r"'\*.down' matches no linear"),
    ],
)
def test_a_glob_that_splits_a_merged_layer_or_matches_nothing_is_refused(qwen3_dir, glob, message):
    with pytest.raises(ValueError, match=message), single_rank_actor(qwen3_dir, PrecisionConfig(bf16_layers=(glob,))):
        pass
