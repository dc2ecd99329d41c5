"""The MLP: the bits of fc1, SwiGLU and fc2 one by one, h in FP8 alone where fc2 takes it; the steps are there to be hooked if asked for."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch

from jetrl_megatron.actor.mlp import FlowMLP
from jetrl_megatron.config import Arm, LinearPrecision, ParallelConfig, PrecisionConfig, Recompute, SavedActivation
from jetrl_megatron.fp8 import QuantizedInput
from jetrl_megatron.fp8.swiglu import swiglu, swiglu_backward
from tests.unit.actor.single_rank import few_batches, single_rank_actor, take_step

BF16 = LinearPrecision.bf16
ARMS = {
    "jetrl": PrecisionConfig(),
    "bf16": PrecisionConfig(arm=Arm.bf16),
    "fp8_rollout": PrecisionConfig(arm=Arm.fp8_rollout),
    "bf16 fc1 only": PrecisionConfig(bf16_layers=("*.gate_proj", "*.up_proj")),
    "bf16 backward": PrecisionConfig(saved_activation=SavedActivation.bf16, dgrad=BF16, wgrad=BF16),
}


def hidden(toks: int = 40) -> torch.Tensor:
    return torch.randn(toks, 1, 256, generator=torch.Generator().manual_seed(5)).bfloat16()


def mlp_of(actor) -> FlowMLP:
    mlp = actor.chunks[0].decoder.layers[0].mlp
    assert type(mlp) is FlowMLP and [n for n, _ in mlp.named_parameters()] == ["linear_fc1.weight", "linear_fc2.weight"]
    return mlp


@pytest.mark.parametrize("name", ARMS)
def test_the_mlp_is_its_three_steps_with_one_gradient_of_swiglu(one_layer_dir, name):
    with single_rank_actor(one_layer_dir, ARMS[name]) as actor:
        mlp, grads = mlp_of(actor), {}
        for way in ("steps", "mlp"):
            x = hidden().to(actor.device).requires_grad_()
            for p in mlp.parameters():
                p.main_grad.zero_()
            if way == "steps":
                gate_up = mlp.linear_fc1(x)[0]
                h = swiglu(gate_up.flatten(0, 1)).view(*gate_up.shape[:-1], -1).requires_grad_()
                y = mlp.linear_fc2(h)[0]
                y.backward(hidden().to(actor.device))
                gate_up.backward(swiglu_backward(h.grad.flatten(0, 1), gate_up.flatten(0, 1)).view(gate_up.shape))
            else:
                y, bias = mlp(x)
                assert bias is None
                y.backward(hidden().to(actor.device))
            grads[way] = [y, x.grad, *(p.main_grad.clone() for p in mlp.parameters())]
        assert all(torch.equal(*pair) for pair in zip(grads["steps"], grads["mlp"], strict=True))
        assert all(g.abs().max() > 0 for g in grads["mlp"])
        with torch.no_grad():
            assert torch.equal(mlp(hidden().to(actor.device))[0], grads["mlp"][0])


def test_without_gradients_hooks_see_both_sides_of_swiglu_and_gate_up_is_freed_before_fc2(one_layer_dir):
    with single_rank_actor(one_layer_dir, ARMS["jetrl"]) as actor:
        mlp, seen = mlp_of(actor), {}

        def behind_fc1(module, args, output):
            seen["gate_up"], seen["alive"] = output[0].clone(), weakref.ref(output[0])

        def before_fc2(module, args):
            gc.collect()
            assert seen["alive"]() is None, "gate and up are still held while fc2 runs"
            seen["h"] = args[0].clone()

        handles = [mlp.linear_fc1.register_forward_hook(behind_fc1), mlp.linear_fc2.register_forward_pre_hook(before_fc2)]
        with torch.no_grad(), actor.sides.in_bf16_steps():
            mlp(hidden().to(actor.device))
        for handle in handles:
            handle.remove()
        assert seen["gate_up"].shape == (40, 1, 1024) and seen["h"].shape == (40, 1, 512)
        assert torch.equal(seen["h"].flatten(0, 1), swiglu(seen["gate_up"].flatten(0, 1)))


@pytest.mark.parametrize("name", ARMS)
def test_what_passes_from_the_norms_and_from_swiglu_is_fp8_where_the_linear_behind_takes_it(one_layer_dir, name):
    with single_rank_actor(one_layer_dir, ARMS[name]) as actor:
        layer, found = actor.chunks[0].decoder.layers[0], {}
        linears = {"qkv": layer.self_attention.linear_qkv, "fc1": layer.mlp.linear_fc1, "fc2": layer.mlp.linear_fc2}
        for key, linear in linears.items():
            linear.register_forward_pre_hook(lambda m, args, key=key: found.update({key: isinstance(args[0], QuantizedInput)}))
        take_step(actor, few_batches(actor))
        fp8 = name in ("jetrl", "bf16 fc1 only")
        assert found == {"qkv": fp8, "fc1": name == "jetrl", "fc2": name == "jetrl"}, "in training"
        actor.logprobs(few_batches(actor))
        fp8 |= name == "bf16 backward"
        assert found == {"qkv": fp8, "fc1": fp8 and name != "bf16 fc1 only", "fc2": fp8 and name != "bf16 fc1 only"}, "no gradients"


def test_steps_in_bf16_within_such_steps_leave_them_so(one_layer_dir):
    with single_rank_actor(one_layer_dir, ARMS["jetrl"]) as actor:
        found = []
        mlp_of(actor).linear_fc2.register_forward_pre_hook(lambda m, args: found.append(isinstance(args[0], QuantizedInput)))
        with actor.sides.in_bf16_steps():
            with actor.sides.in_bf16_steps():
                actor.logprobs(few_batches(actor))
            actor.logprobs(few_batches(actor))
        actor.logprobs(few_batches(actor))
        assert found == [False, False, True]


def test_recompute_wants_no_columns_in_its_first_forward(one_layer_dir):
    for recompute, columns in ((Recompute.none, [True]), (Recompute.full, [False, True])):
        with single_rank_actor(one_layer_dir, ARMS["jetrl"], ParallelConfig(recompute=recompute)) as actor:
            found = []
            mlp_of(actor).linear_fc2.register_forward_pre_hook(lambda m, args, found=found: found.append(args[0].operands[1] is not None))
            take_step(actor, few_batches(actor))
            assert found == columns


@pytest.mark.parametrize("recompute", list(Recompute))
def test_quantised_in_front_of_the_linear_or_in_it_a_step_has_the_same_gradients(one_layer_dir, recompute):
    grads = []
    for stepwise in (False, True):
        with single_rank_actor(one_layer_dir, ARMS["jetrl"], ParallelConfig(recompute=recompute)) as actor:
            with actor.sides.in_bf16_steps() if stepwise else nullcontext():
                take_step(actor, few_batches(actor))
            grads.append([p.main_grad.clone() for p in actor.chunks[0].parameters()] + [p.clone() for p in actor.chunks[0].parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True)) and all(g.abs().max() > 0 for g in grads[0])


def test_frozen_layers_and_zero_tokens(one_layer_dir):
    with single_rank_actor(one_layer_dir, ARMS["jetrl"]) as actor:
        mlp = mlp_of(actor)
        want = mlp(hidden().to(actor.device))[0].detach()
        mlp.requires_grad_(False)
        frozen = mlp(hidden().to(actor.device))[0]
        assert frozen.grad_fn is None and torch.equal(frozen, want)
        mlp.requires_grad_(True)
        x = hidden(0).to(actor.device).requires_grad_()
        y = mlp(x)[0]
        y.backward(torch.ones_like(y))
        assert y.shape == (0, 1, 256) and x.grad.shape == x.shape
        assert all(torch.count_nonzero(p.main_grad) == 0 for p in mlp.parameters())
