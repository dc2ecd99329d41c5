"""Clipping by the global norm: the bits of Megatron's, in place."""

import pytest
import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_megatron.actor.device import megatron_scope
from jetrl_megatron.actor.optimizer import ActorOptimizer
from jetrl_megatron.config import OptimConfig, PrecisionConfig
from tests.unit.actor.single_rank import few_batches, gradients, parameters, single_rank_actor, take_step

CLIP = 0.37


class Watch(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", [CLIP, 1e9, 0.0])
def test_a_clipped_step_has_the_bits_of_megatrons(one_layer_dir, monkeypatch, clip):
    found = {}

    def megatrons(optimizer, norm):
        if clip > 0.0:
            for part in optimizer._parts():
                clip_grad_by_total_norm_fp32(part.get_parameters(), clip, norm)

    for way in ("ours", "megatron's"):
        optim = OptimConfig(clip_grad=clip)
        with monkeypatch.context() as patch, single_rank_actor(one_layer_dir, PrecisionConfig(), optim=optim) as actor:
            if way != "ours":
                patch.setattr(ActorOptimizer, "_clip", megatrons)
            norm = take_step(actor, few_batches(actor))["grad_norm"]
            found[way] = {"": norm, **{f"gradient of {n}": g for n, g in gradients(actor).items()}, **parameters(actor)}
    ours, theirs = found.values()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    scaled = torch.stack([g.norm() for n, g in ours.items() if n.startswith("gradient")]).norm()
    assert CLIP < ours[""] < 1e9 and scaled == pytest.approx(clip if clip == CLIP else ours[""].item(), rel=1e-4)


def test_gradients_are_scaled_where_they_are(one_layer_dir):
    with single_rank_actor(one_layer_dir, PrecisionConfig(), optim=OptimConfig(clip_grad=CLIP)) as actor, megatron_scope(actor.device):
        take_step(actor, few_batches(actor))
        with Watch() as watch:
            actor.optimizer._clip(1.0)
    assert {"aten::_foreach_mul_"} <= watch.names <= {"aten::_foreach_mul_", "aten::detach"}, watch.names
