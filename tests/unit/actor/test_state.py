"""Weights, masters, moments and FP8 bytes: where they start, when they change, what a resume brings back."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from jetrl_megatron.config import Arm, Decay, OptimConfig, PrecisionConfig
from jetrl_megatron.fp8.quantize import quantize_weight
from tests.unit.actor.single_rank import completion_logprobs, few_batches, few_samples, parameters, single_rank_actor, take_step

JETRL = PrecisionConfig()
CURVE = OptimConfig(lr=1e-3, warmup_steps=2, decay=Decay.cosine, min_lr=1e-5, weight_decay=0.1)


def masters(actor):
    """FP32 master of each parameter by Megatron name; one rank holds every master whole."""
    names = {id(p): n for n, p in actor.chunks[0].named_parameters()}
    found = {}
    for part in actor.optimizer._parts():
        for models, shards in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            found |= {names[id(m)]: s.detach().clone().view(m.shape) for m, s in zip(models, shards, strict=True)}
    assert found.keys() == set(names.values())
    return found


def test_masters_start_as_the_bf16_source_exactly(qwen3_dir):
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        found = masters(actor)
    (file,) = qwen3_dir.glob("*.safetensors")
    source = load_file(file)
    for i in (0, 1):
        assert torch.equal(found[f"decoder.layers.{i}.mlp.linear_fc2.weight"], source[f"model.layers.{i}.mlp.down_proj.weight"].float())
        gate_up = torch.cat([source[f"model.layers.{i}.mlp.{m}_proj.weight"] for m in ("gate", "up")]).float()
        assert torch.equal(found[f"decoder.layers.{i}.mlp.linear_fc1.weight"], gate_up)
    assert torch.equal(found["output_layer.weight"][:203], source["lm_head.weight"].float())
    assert all(m.dtype is torch.float32 for m in found.values())


def test_masters_move_where_bf16_cannot_see_it_and_survive_a_resume(qwen3_dir):
    """With lr 1e-7 the BF16 parameters stand still for several steps, so masters rebuilt from them would lose the steps."""
    optim = OptimConfig(lr=1e-7)
    with single_rank_actor(qwen3_dir, JETRL, optim=optim) as actor:
        before = parameters(actor)
        take_step(actor, few_batches(actor))
        state, after, moved = actor.state_dict(), parameters(actor), masters(actor)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    still = (before[name] == after[name]).float().mean()
    assert still > 0.9 and (moved[name] != after[name].float()).float().mean() > 0.9
    with single_rank_actor(qwen3_dir, JETRL, optim=optim) as actor:
        actor.load_state_dict(state)
        resumed = masters(actor)
    assert all(torch.equal(moved[n], resumed[n]) for n in moved)


def test_one_step_after_a_resume_equals_the_uninterrupted_step_bit_for_bit(qwen3_dir):
    with single_rank_actor(qwen3_dir, JETRL, optim=CURVE) as actor:
        batches = few_batches(actor)
        for _ in range(2):
            take_step(actor, batches)
        state, digest = actor.state_dict(), actor.weights_digest()
        norms = [float(take_step(actor, batches)["grad_norm"])]
        whole, whole_masters, whole_digest, lr = actor.state_dict(), masters(actor), actor.weights_digest(), actor.optimizer.lr
    assert digest != whole_digest
    with single_rank_actor(qwen3_dir, JETRL, optim=CURVE) as actor:
        fresh = actor.weights_digest()
        actor.load_state_dict(state)
        assert actor.version == 2 and actor.weights_digest() == digest != fresh
        norms.append(float(take_step(actor, batches)["grad_norm"]))
        resumed = actor.state_dict()
        assert (actor.version, actor.weights_digest(), actor.optimizer.lr) == (3, whole_digest, lr)
        assert all(torch.equal(m, whole_masters[n]) for n, m in masters(actor).items())
    assert norms[0] == norms[1]
    assert 0 < lr < 1e-3
    for a, b in zip(whole["parameters"], resumed["parameters"], strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
    assert_same(whole["optimizer"], resumed["optimizer"])


def assert_same(a, b):
    """Equal trees, tensors bit for bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def test_a_state_of_another_layout_is_refused(qwen3_dir, one_layer_dir):
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        take_step(actor, few_batches(actor))
        state = actor.state_dict()
    with single_rank_actor(one_layer_dir, JETRL) as actor, pytest.raises(ValueError, match=r"not in the model \['decoder.layers.1"):
        actor.load_state_dict(state)


def test_bytes_are_those_of_the_bf16_parameter_and_change_with_it(qwen3_dir):
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        (cache,) = actor.sides.caches.values()
        versions, digests = [actor.version], [actor.weights_digest()]
        for _ in range(2):
            take_step(actor, few_batches(actor))
            versions.append(actor.version)
            digests.append(actor.weights_digest())
            for name in cache.names:
                weight = dict(actor.chunks[0].named_parameters())[f"{name}.weight"].detach()
                assert cache.get(name).w.same_bytes(quantize_weight(weight)[0]), "quantised from the BF16 parameter, not from the master"
    assert versions == [0, 1, 2] and len(set(digests)) == 3


@pytest.mark.parametrize("name", ["decoder.layers.1.self_attention.linear_qkv", "decoder.layers.0.mlp.linear_fc2"])
def test_a_weight_that_changed_since_it_was_quantised_is_never_used(qwen3_dir, name):
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        before = completion_logprobs(actor, few_samples(actor))
        with torch.no_grad():
            actor.chunks[0].get_submodule(name).weight[0, 0] += 0.5
        with pytest.raises(RuntimeError, match=rf"weight '{name}' was modified after the last refresh"):
            completion_logprobs(actor, few_samples(actor))
        with pytest.raises(RuntimeError, match="was modified after the last refresh"):
            actor.weights_digest()
        actor.sides.refresh()
        assert completion_logprobs(actor, few_samples(actor)) != before


def test_the_optimizer_leaves_no_moment_at_which_old_bytes_could_be_served(qwen3_dir, monkeypatch):
    """Megatron writes parameters through flat buffers, which torch does not count: `train_step` declares them stale itself."""
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        monkeypatch.setattr(actor.sides, "refresh", lambda: None)
        take_step(actor, few_batches(actor))
        with pytest.raises(RuntimeError, match="was modified after the last refresh"):
            actor.logprobs(few_batches(actor))


def test_bf16_arm_names_its_weights_by_their_own_bytes(qwen3_dir):
    with single_rank_actor(qwen3_dir, replace(JETRL, arm=Arm.bf16)) as actor:
        assert actor.sides.caches == {}
        before = actor.weights_digest()
        take_step(actor, few_batches(actor))
        assert before != actor.weights_digest() and len(before) == 64
