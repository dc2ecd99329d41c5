"""Every precision switch trains, does what its name says and leaves the forward alone."""

from itertools import product

import pytest
import torch

from jetrl_megatron.config import GradFormat, LinearPrecision, PrecisionConfig, SavedActivation, ScaleFormat, WgradGranularity
from tests.unit.actor.single_rank import completion_logprobs, distance, few_batches, few_samples, gradients, single_rank_actor, take_step

FP8, BF16 = LinearPrecision.fp8, LinearPrecision.bf16
SWITCHES = list(product(SavedActivation, (FP8, BF16), (FP8, BF16), GradFormat, ScaleFormat))
LAST_LINEAR = "decoder.layers.0.mlp.linear_fc2.weight"

DISTANCE = {  # of the gradient from the BF16 backward's, one layer, measured; by dgrad, wgrad and the format of dY
    (FP8, FP8, GradFormat.e4m3): 0.062,
    (FP8, FP8, GradFormat.e5m2): 0.095,
    (FP8, BF16, GradFormat.e4m3): 0.058,
    (FP8, BF16, GradFormat.e5m2): 0.086,
    (BF16, FP8, GradFormat.e4m3): 0.028,
    (BF16, FP8, GradFormat.e5m2): 0.042,
    (BF16, BF16, GradFormat.e4m3): 0.019,  # what is left is the FP8 copy of X
    (BF16, BF16, GradFormat.e5m2): 0.019,
}


def forward_and_backward(hf_dir, precision):
    """Log-probs, gradients and weight digests before and after a step."""
    with single_rank_actor(hf_dir, precision) as actor:
        logprobs = completion_logprobs(actor, few_samples(actor))
        before = actor.weights_digest()
        take_step(actor, few_batches(actor))
        return logprobs, gradients(actor), before, actor.weights_digest()


@pytest.fixture(scope="module")
def bf16_backward(one_layer_dir):
    """The reference of each scale format: the same forward, with a backward in BF16."""
    switches = {"saved_activation": SavedActivation.bf16, "dgrad": BF16, "wgrad": BF16}
    return {f: forward_and_backward(one_layer_dir, PrecisionConfig(scale_format=f, **switches)) for f in ScaleFormat}


@pytest.fixture(scope="module")
def gradients_by_switch():
    """Filled by `test_switch_trains`, read by the tests behind it."""
    return {}


@pytest.mark.parametrize(("saved", "dgrad", "wgrad", "grad_format", "scale_format"), SWITCHES, ids=lambda member: member.name)
def test_switch_trains(one_layer_dir, bf16_backward, gradients_by_switch, saved, dgrad, wgrad, grad_format, scale_format):
    precision = PrecisionConfig(saved_activation=saved, dgrad=dgrad, wgrad=wgrad, grad_format=grad_format, scale_format=scale_format)
    logprobs, grads, before, after = forward_and_backward(one_layer_dir, precision)
    want_logprobs, want, want_before, _ = bf16_backward[scale_format]
    assert logprobs == want_logprobs, "the backward's switches must not touch the forward"
    assert before == want_before != after
    gradients_by_switch[saved, dgrad, wgrad, grad_format, scale_format] = grads

    others = {n: g for n, g in grads.items() if "linear" not in n}
    if dgrad is BF16:
        assert all(torch.equal(g, want[n]) for n, g in others.items()), "dX is BF16: only weight gradients may differ"
    if wgrad is BF16 and saved is SavedActivation.bf16:
        assert torch.equal(grads[LAST_LINEAR], want[LAST_LINEAR]), "the last linear gets dY from BF16 operators and keeps X in BF16"
    found = distance(want, grads)
    if (saved, dgrad, wgrad) == (SavedActivation.bf16, BF16, BF16):
        assert found == 0.0
    else:
        assert found == pytest.approx(DISTANCE[dgrad, wgrad, grad_format], rel=0.2)


def test_the_dual_copy_holds_the_bytes_that_the_bf16_activation_gives(gradients_by_switch):
    """fp8_dual is bf16 saved later; fp8_requant rounds twice, which shows (with FP32 scales)."""
    assert len(gradients_by_switch) == len(SWITCHES)
    for dgrad, grad_format, scale_format in product((FP8, BF16), GradFormat, ScaleFormat):
        rest = (dgrad, FP8, grad_format, scale_format)
        dual, requant, bf16 = (gradients_by_switch[s, *rest] for s in SavedActivation)
        assert all(torch.equal(dual[n], bf16[n]) for n in dual)
        if scale_format is ScaleFormat.fp32:
            assert distance(bf16, requant) > 0.01


def test_the_two_scale_formats_are_two_models(bf16_backward):
    (fp32, grads, digest, _), (ue8m0, other, other_digest, _) = (bf16_backward[f] for f in (ScaleFormat.fp32, ScaleFormat.ue8m0))
    difference = sum(abs(x - y) for a, b in zip(fp32, ue8m0, strict=True) for x, y in zip(a, b, strict=True)) / sum(map(len, fp32))
    assert 1e-3 < difference < 0.2
    assert digest != other_digest
    assert 0.01 < distance(grads, other) < 0.3


@pytest.mark.parametrize("saved", SavedActivation)
def test_wgrad_in_groups_is_finer_on_x_and_changes_nothing_else(one_layer_dir, bf16_backward, gradients_by_switch, saved):
    precision = PrecisionConfig(saved_activation=saved, wgrad_granularity=WgradGranularity.groups)
    logprobs, grads, _, _ = forward_and_backward(one_layer_dir, precision)
    want_logprobs, exact, _, _ = bf16_backward[ScaleFormat.fp32]
    blocks = gradients_by_switch[saved, FP8, FP8, GradFormat.e4m3, ScaleFormat.fp32]
    assert logprobs == want_logprobs
    for name, grad in grads.items():
        weight_of_linear = "linear" in name and name.endswith("weight") and grad.dim() == 2
        assert torch.equal(grad, blocks[name]) != weight_of_linear, name
    assert distance(exact, grads) == pytest.approx(DISTANCE[FP8, FP8, GradFormat.e4m3], rel=0.25)
