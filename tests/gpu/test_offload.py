"""The optimizer's state on the host, for real: the same updates, checkpoints that fit both ways, and where the bytes lie."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.hopper import NEEDS_HOPPER
from tests.tiny_models import write_tiny_model
from tests.unit.actor.single_rank import OPTIM, few_batches, parameters, take_step, trained_actor

pytestmark = [*NEEDS_HOPPER]
OFFLOADED, HALF, CLIPPED = replace(OPTIM, offload_fraction=1.0), replace(OPTIM, offload_fraction=0.5), replace(OPTIM, clip_grad=0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "hf", "qwen3", num_hidden_layers=2)


def state_on(actor: Any, kind: str) -> int:
    """Bytes of masters and moments on `kind` of device."""
    adams = [adam for part in actor.optimizer._parts() for adam in getattr(part.optimizer, "sub_optimizers", [part.optimizer])]
    masters = [p for adam in adams for group in adam.param_groups for p in group["params"]]
    moments = [
        v for adam in adams for entry in adam.state.values() for v in entry.values() if isinstance(v, torch.Tensor) and v.numel() > 1
    ]
    unique = {t.data_ptr(): t for t in [*masters, *moments]}.values()
    return sum(t.nbytes for t in unique if t.device.type == kind)


def close(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> bool:
    """Whether no more than one parameter in a thousand was rounded otherwise: AdamW on the host is another kernel."""
    return sum(int((want[n] != got[n]).sum()) for n in want) <= 1e-3 * sum(t.numel() for t in want.values())


@pytest.mark.parametrize("base", [OPTIM, CLIPPED], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_one_step_with_the_state_on_the_host_is_one_step(model, base, fraction):
    with trained_actor(model, base, 0) as actor:
        before = parameters(actor)
        take_step(actor, few_batches(actor))
        want, whole = parameters(actor), state_on(actor, "cuda")
    with trained_actor(model, replace(base, offload_fraction=fraction), 1) as actor:
        on_host, on_gpu = state_on(actor, "cpu"), state_on(actor, "cuda")
        got = parameters(actor)
    assert close(want, got) and not close(before, want)
    assert on_host + on_gpu >= 0.99 * whole and on_host >= 0.99 * fraction * whole and (on_gpu == 0) == (fraction == 1.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [(OPTIM, OFFLOADED), (OFFLOADED, OPTIM), (OFFLOADED, OFFLOADED), (HALF, OFFLOADED), (HALF, HALF), (OPTIM, HALF)],
)
def test_a_checkpoint_of_one_kind_goes_on_as_the_other(model, first, second):
    with trained_actor(model, first, 2) as actor:
        state, before = actor.state_dict(), parameters(actor)
        take_step(actor, few_batches(actor))
        want = parameters(actor)
    with trained_actor(model, second, 0, state) as actor:
        assert all(torch.equal(before[n], t) for n, t in parameters(actor).items()), "the BF16 parameters are the masters', rounded"
        take_step(actor, few_batches(actor))
        assert close(want, parameters(actor))
