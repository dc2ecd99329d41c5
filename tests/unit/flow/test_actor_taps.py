"""The comparison of operators finds nothing where there is nothing, and names the operator and the layer where there is something."""

import pytest
import torch
from torch import Tensor

from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.config import Arm, PrecisionConfig
from jetrl_megatron.flow import actor_taps
from jetrl_megatron.flow.operators import FINAL_NORM, LAYER_OPERATORS, LOGITS, key
from tests.tiny_models import write_tiny_model
from tests.unit.actor.single_rank import single_rank_actor

NUM_PROMPT, NUM_TOKENS, TEMPERATURE = 20, 31, 0.7


class Recorder:
    """Keeps what passes: the actor plays the engine."""

    def __init__(self, qk_norm: bool) -> None:
        self.outputs: dict[str, Tensor] = {}
        self._qk_norm = qk_norm

    def see(self, layer: int, operator: str, actor: Tensor) -> Tensor:
        self.outputs[operator if layer < 0 else key(layer, operator)] = actor[: NUM_TOKENS - 1].clone()
        return actor

    def has(self, layer: int, operator: str) -> bool:
        return self._qk_norm


def recorded(actor: Actor) -> dict:
    sequence = {"tokens": [1 + i * 7 % 190 for i in range(NUM_TOKENS)], "num_prompt": NUM_PROMPT}
    recorder = Recorder(actor.arch.qk_norm)
    recorder.outputs[LOGITS], logp = actor_taps.forward(actor, sequence, TEMPERATURE, recorder)
    return {**sequence, "logprobs": logp.tolist(), "outputs": recorder.outputs}


def compared(actor: Actor, sequence: dict, forced: bool) -> actor_taps.Differences:
    return actor_taps.compare(actor, [sequence], temperature=TEMPERATURE, forced=forced)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def actor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    hf = write_tiny_model(tmp_path_factory.mktemp("model") / "hf", request.param, num_hidden_layers=2)
    with single_rank_actor(hf, PrecisionConfig(arm=Arm.jetrl)) as built:
        yield built


def differing(found: actor_taps.Differences) -> dict[tuple[str, str], int]:
    return {name: difference.first_layer for name, difference in found.items() if difference.differing}


@pytest.mark.parametrize("forced", [True, False])
def test_an_engine_that_is_the_actor_differs_nowhere(actor, forced):
    found = compared(actor, recorded(actor), forced)
    assert differing(found) == {}
    operators = set(LAYER_OPERATORS) - (set() if actor.arch.qk_norm else {"q_norm", "k_norm"})
    assert {name for name, phase in found if phase == "decode"} == operators | {FINAL_NORM, LOGITS, "logprob"}
    width = actor.arch.num_heads * actor.arch.head_dim
    assert found["q_rope", "prefill"].elements == 2 * NUM_PROMPT * width
    assert found["q_rope", "decode"].elements == 2 * (NUM_TOKENS - 1 - NUM_PROMPT) * width


def test_an_operator_that_differs_is_named_with_its_layer_and_phase(actor):
    sequence = recorded(actor)
    sequence["outputs"]["1.down"][25, 3] += 0.5
    sequence["outputs"]["0.k_rope"][4, 0] += 0.25
    alone = differing(compared(actor, sequence, True))
    # The attention of that layer is judged on the engine's k, so it differs from what the engine recorded, in every later row.
    assert alone.pop(("attention", "prefill")) == 0 and alone.pop(("attention", "decode")) == 0
    # The norm behind the last layer reads the residual stream that the changed row went into.
    assert alone.pop((FINAL_NORM, "decode")) == -1
    assert alone == {("down", "decode"): 1, ("k_rope", "prefill"): 0}
    in_place = differing(compared(actor, sequence, False))
    assert in_place == {("down", "decode"): 1, ("k_rope", "prefill"): 0}


def test_swiglu_is_judged_on_what_the_engine_gave_it(actor):
    sequence = recorded(actor)
    gate_up = sequence["outputs"]["1.gate_up"]
    assert gate_up.shape[1] == 2 * sequence["outputs"]["1.swiglu"].shape[1]
    gate_up[3] *= 2
    alone = compared(actor, sequence, True)
    assert differing(alone) == {("gate_up", "prefill"): 1, ("swiglu", "prefill"): 1}
    features = gate_up.shape[1] // 2
    assert 0.9 * features < alone["swiglu", "prefill"].differing <= features, "one row, and nearly every element of it"
    assert differing(compared(actor, sequence, False)) == {("gate_up", "prefill"): 1}


def test_fused_qkv_goes_apart_and_back(actor):
    grouped = actor_taps._Grouped(actor)
    width = (actor.arch.num_heads + 2 * actor.arch.num_kv_heads) * actor.arch.head_dim
    fused = torch.arange(3 * width).view(3, width)
    apart = grouped.apart(fused)
    assert torch.equal(grouped.fused(apart), fused)
    dim, per_group = actor.arch.head_dim, actor.arch.heads_per_group
    assert torch.equal(apart[:, :dim], fused[:, :dim])
    first_key = fused[:, per_group * dim : (per_group + 1) * dim]
    assert torch.equal(apart[:, actor.arch.num_heads * dim :][:, :dim], first_key)


def test_bits_are_compared_not_values():
    found = actor_taps.Difference()
    found.add(torch.tensor([0.0, 1.0, float("nan")]), torch.tensor([-0.0, 1.0, float("nan")]), 3)
    assert (found.elements, found.differing, found.first_layer) == (3, 1, 3)
    found.add(torch.tensor([2.0]), torch.tensor([float("nan")]), 1)
    assert found.differing == 2 and found.first_layer == 1 and found.largest != found.largest
