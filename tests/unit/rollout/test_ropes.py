"""Prompts of different lengths in one batch are each what they are alone, for every supported rope."""

import pytest

from jetrl_megatron.contracts import SamplingParams
from tests.tiny_models import write_tiny_model
from tests.unit.rollout.drawing import actor_of, differences, draw, prompt

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {**LLAMA3, "rope_theta": 10000.0},
}
PARAMS = SamplingParams(max_new_toks=8, stop_token_ids=tuple(range(0, 203, 12)))


@pytest.mark.parametrize("rope", ROPES)
def test_a_short_and_a_long_prompt_together_are_each_alone(tmp_path, rope):
    hf_dir = write_tiny_model(tmp_path / "hf", "llama", num_hidden_layers=2, rope_parameters=ROPES[rope])
    prompts = [prompt(3), prompt(40)]
    with actor_of(hf_dir) as actor:
        together = draw(actor, prompts, PARAMS, group=2)
        alone = [c for p in prompts for c in draw(actor, [p], PARAMS, group=2)]
        assert together == alone
        assert differences(actor, prompts, together).max() == 0.0
        # The training forward packs all four into one micro-batch; each alone gives the same numbers.
        assert all(differences(actor, prompts, [c]).max() == 0.0 for c in together)


def test_ropes_are_three_models(tmp_path):
    """Otherwise the test above would say nothing about scaling."""
    found = []
    for rope, parameters in ROPES.items():
        hf_dir = write_tiny_model(tmp_path / rope, "llama", num_hidden_layers=2, rope_parameters=parameters)
        with actor_of(hf_dir) as actor:
            found.append(draw(actor, [prompt(40)], PARAMS)[0].logprobs[0])
    assert len(set(found)) == 3
