"""Rollout log-probs against the training forward's, by arm: exactly 0 where both sides run one flow, above 0 where they do not."""

import pytest

from jetrl_megatron.config import Arm, ScaleFormat
from jetrl_megatron.contracts import SamplingParams
from tests.tiny_models import write_tiny_model
from tests.unit.actor.single_rank import few_batches, take_step
from tests.unit.rollout.drawing import actor_of, differences, draw, prompt

PROMPTS = [prompt(n) for n in (3, 40, 17)]
PARAMS = SamplingParams(max_new_toks=8)

SAME = [
    {"arm": Arm.jetrl},
    {"arm": Arm.bf16},
    {"arm": Arm.jetrl, "scale_format": ScaleFormat.ue8m0},
    {"arm": Arm.jetrl, "scale_format": ScaleFormat.ue8m0, "rollout_scale_format": ScaleFormat.ue8m0},
    {"arm": Arm.jetrl, "bf16_layers": ("*.mlp.down_proj", "model.layers.0.self_attn.*")},
]
DIFFERENT = [
    {"arm": Arm.fp8_rollout},
    {"arm": Arm.jetrl, "rollout_scale_format": ScaleFormat.ue8m0},
    {"arm": Arm.jetrl, "scale_format": ScaleFormat.ue8m0, "rollout_scale_format": ScaleFormat.fp32},
]


def by_step(hf_dir, precision):
    """Differences before the first and after the second optimizer step, and the completions' versions."""
    with actor_of(hf_dir, **precision) as actor:
        found = []
        for _ in range(2):
            completions = draw(actor, PROMPTS, PARAMS)
            found.append((differences(actor, PROMPTS, completions), {v for c in completions for v in c.versions}))
            take_step(actor, few_batches(actor))
        return found


@pytest.mark.parametrize("precision", SAME, ids=lambda p: "-".join(getattr(v, "name", "layers") for v in p.values()))
def test_one_flow_on_both_sides_is_exactly_0_apart_at_every_version(qwen3_dir, precision):
    (first, versions), (second, later) = by_step(qwen3_dir, precision)
    assert first.numel() == second.numel() == 24
    assert first.max() == second.max() == 0.0
    assert (versions, later) == ({0}, {1})


@pytest.mark.parametrize("precision", DIFFERENT, ids=lambda p: "-".join(getattr(v, "name", "layers") for v in p.values()))
def test_two_flows_differ_and_the_number_shows_it(qwen3_dir, precision):
    for difference, _ in by_step(qwen3_dir, precision):
        assert 1e-3 < difference.mean() < 0.3
        assert (difference > 0).sum() >= 22


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_other_families_are_exactly_0_apart_too(tmp_path, family):
    """head_dim 64, where q, k and v are quantised apart from the fused order, and biases."""
    hf_dir = write_tiny_model(tmp_path / "hf", family, num_hidden_layers=2)
    for difference, _ in by_step(hf_dir, {"arm": Arm.jetrl}):
        assert difference.max() == 0.0


def test_temperature_is_on_both_sides(qwen3_dir):
    """The engine's log-probs at 0.6 are the actor's own only where the recipe says 0.6 too."""
    with actor_of(qwen3_dir) as actor:
        cold = SamplingParams(max_new_toks=6, temperature=0.6)
        assert differences(actor, PROMPTS, draw(actor, PROMPTS, cold)).mean() > 0.1, "the actor speaks of temperature 1.0"
        actor._steps._temperature = 0.6
        assert differences(actor, PROMPTS, draw(actor, PROMPTS, cold)).max() == 0.0
