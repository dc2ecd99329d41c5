"""The optimizer's state on the host: the same updates, checkpoints that fit both ways, and what a CPU is told.

Megatron's hybrid optimizer asks each tensor whether it lies on a GPU. Here a mode answers for it, so that its path runs without one;
nothing is copied between devices then. tests/gpu/test_offload.py has a GPU.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.overrides import TorchFunctionMode

from jetrl_megatron.actor.optimizer import ActorOptimizer
from jetrl_megatron.config import OptimConfig, PrecisionConfig
from tests.unit.actor.single_rank import OPTIM, few_batches, parameters, single_rank_actor, take_step, trained_actor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for a machine without a GPU")
OFFLOADED = replace(OPTIM, offload_fraction=1.0)
HALF = replace(OPTIM, offload_fraction=0.5)
CLIPPED = replace(OPTIM, clip_grad=0.01)


class LooksLikeAGpu(TorchFunctionMode):
    """Every tensor lies on a GPU but those that were pinned or sent to "cpu", and what is made of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.is_cuda.__get__:
            return not hasattr(args[0], "on_host")
        kwargs.pop("pin_memory", None)
        to_host = func is torch.Tensor.pin_memory or (func is torch.Tensor.to and args[1:] == ("cpu",))
        out = args[0].clone() if to_host else func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and (to_host or any(hasattr(a, "on_host") for a in args)):
            out.on_host = True  # type: ignore[attr-defined]
        return out


@contextmanager
def gpu_look() -> Iterator[None]:
    event = SimpleNamespace(synchronize=lambda: None, wait=lambda stream: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
    fakes = {"current_stream": lambda *_: stream, "Stream": lambda *_: stream, "stream": lambda _: nullcontext()}
    with mock.patch.multiple(torch.cuda, **fakes), LooksLikeAGpu():
        yield


@contextmanager
def optimizer_on_a_gpu() -> Iterator[None]:
    """The optimizer alone: the model picks its kernels by where a tensor lies, too."""
    with ExitStack() as patches:
        for name in ("__init__", "step", "load_state_dict"):
            real = getattr(ActorOptimizer, name)

            def looking(*args: Any, real: Any = real) -> Any:
                with gpu_look():
                    return real(*args)

            patches.enter_context(mock.patch.object(ActorOptimizer, name, looking))
        yield


@contextmanager
def trained(hf_dir: Any, optim: OptimConfig, steps: int, state: Any = None) -> Iterator[Any]:
    """`trained_actor`, whose optimizer takes its place for a GPU where it offloads."""
    place = optimizer_on_a_gpu() if optim.offload_fraction else nullcontext()
    with place, trained_actor(hf_dir, optim, steps, state) as actor:
        yield actor


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("base", [OPTIM, CLIPPED], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_three_steps_with_the_state_on_the_host_are_three_steps(one_layer_dir, base, fraction):
    with trained(one_layer_dir, base, 3) as actor:
        want = parameters(actor)
    with trained(one_layer_dir, replace(base, offload_fraction=fraction), 3) as actor:
        (part,) = actor.optimizer._parts()
        adam = part.optimizer
        assert isinstance(adam, HybridDeviceOptimizer) and len(adam.cpu_optimizers) > 0
        assert (adam.gpu_optimizer is None) == (fraction == 1.0)
        on_host = sum(p.numel() for o in adam.cpu_optimizers for group in o.param_groups for p in group["params"])
        assert on_host >= fraction * sum(p.numel() for p in actor.chunks[0].parameters())
        got = parameters(actor)
    # torch's fused AdamW rounds a master's last place otherwise than its other one.
    assert sum(int((want[n] != got[n]).sum()) for n in want) <= 1e-5 * sum(t.numel() for t in want.values())


def on_the_gpu(adam: HybridDeviceOptimizer) -> list[torch.Tensor]:
    """What the optimizer of the GPU's share keeps of its parameters."""
    entries = adam.gpu_optimizer.state.values() if adam.gpu_optimizer is not None else []
    return [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize(
    ("first", "second"),
    [(OPTIM, OFFLOADED), (OFFLOADED, OPTIM), (OFFLOADED, OFFLOADED), (HALF, OFFLOADED), (HALF, HALF), (OPTIM, HALF)],
)
def test_a_checkpoint_of_one_kind_goes_on_as_the_other(one_layer_dir, first, second):
    with trained(one_layer_dir, first, 2) as actor:
        state = actor.state_dict()
        before = parameters(actor)
        take_step(actor, few_batches(actor))
        want, moved = parameters(actor), actor.optimizer.state_dict()
    with trained(one_layer_dir, second, 0, state) as actor:
        assert same(parameters(actor), before), "the BF16 parameters are the masters', rounded"
        again = actor.optimizer.state_dict()
        for old, new in zip(state["optimizer"]["shards"][0]["groups"], again["shards"][0]["groups"], strict=True):
            for a, b in zip(old["params"], new["params"], strict=True):
                assert a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
        if second.offload_fraction:
            kept = on_the_gpu(actor.optimizer._parts()[0].optimizer)
            assert (len(kept) > 0) == (second is HALF) and not any(hasattr(t, "on_host") for t in kept)
        take_step(actor, few_batches(actor))
        got = parameters(actor)
    assert not same(before, want) and moved["shards"]
    assert sum(int((want[n] != got[n]).sum()) for n in want) <= 1e-5 * sum(t.numel() for t in want.values())
    if first.offload_fraction == second.offload_fraction:
        assert same(want, got)


class CountsByGroup(torch.optim.Optimizer):
    """AdamW with one step counter a group, as Transformer Engine's and Apex's have."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 1.0 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
                root = (state["exp_avg_sq"] / (1.0 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                p.mul_(1.0 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1.0 - beta1 ** group["step"]))


def counting_by_group(yes: bool) -> Any:
    """Megatron with another Adam, as where Transformer Engine is installed."""
    stack = ExitStack()
    if yes:
        for name in ("megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer"):
            stack.enter_context(mock.patch(f"{name}.Adam", CountsByGroup))
        stack.enter_context(mock.patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False))
    return stack


def counters(state: dict[str, Any]) -> set[float]:
    return {float(entry["step"]) for group in state["shards"][0]["groups"] for entry in group["params"]}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((HALF, True), (HALF, True)),
        ((OPTIM, True), (HALF, True)),
        ((OPTIM, False), (HALF, True)),
        ((HALF, True), (OPTIM, False)),
        ((OPTIM, True), (OFFLOADED, False)),
    ],
)
def test_steps_are_counted_on_whether_by_parameter_or_by_group(one_layer_dir, first, second):
    with counting_by_group(first[1]), trained(one_layer_dir, first[0], 2) as actor:
        state = actor.state_dict()
        for _ in range(2):
            take_step(actor, few_batches(actor))
        want = parameters(actor)
    with counting_by_group(second[1]), trained(one_layer_dir, second[0], 2, state) as actor:
        got = parameters(actor)
        again = actor.optimizer.state_dict()
        adams = getattr(actor.optimizer._parts()[0].optimizer, "sub_optimizers", [actor.optimizer._parts()[0].optimizer])
        assert any(isinstance(adam, CountsByGroup) for adam in adams) == second[1]
    assert counters(state["optimizer"]) == {2.0} and counters(again) == {4.0}
    assert sum(int((want[n] != got[n]).sum()) for n in want) <= 1e-4 * sum(t.numel() for t in want.values())


@pytest.mark.parametrize("optim", [OPTIM, HALF, OFFLOADED])
@pytest.mark.parametrize("by_group", [False, True])
def test_a_state_without_moments_takes_those_away_that_are_there(one_layer_dir, optim, by_group):
    with counting_by_group(by_group), trained(one_layer_dir, optim, 0) as actor:
        start, runs = actor.state_dict(), []
        for _ in range(2):
            actor.load_state_dict(start)
            for _ in range(2):
                take_step(actor, few_batches(actor))
            runs.append(parameters(actor))
            assert counters(actor.optimizer.state_dict()) == {2.0}
    assert same(*runs)


def test_a_counter_that_an_older_checkpoint_has_beside_a_groups_entries_is_found(one_layer_dir):
    with counting_by_group(True), trained(one_layer_dir, OPTIM, 2) as actor:
        state = actor.state_dict()
    for group in state["optimizer"]["shards"][0]["groups"]:
        (group["step"],) = {int(entry.pop("step")) for entry in group["params"]}
    for by_group in (True, False):
        with counting_by_group(by_group), trained(one_layer_dir, HALF, 1, state) as actor:
            assert counters(actor.optimizer.state_dict()) == {3.0}


def test_a_cpu_refuses_to_offload(one_layer_dir):
    refused = pytest.raises(ValueError, match=r"optim.offload_fraction is 1.0, but the actor runs on a CPU")
    with refused, single_rank_actor(one_layer_dir, PrecisionConfig(), optim=OFFLOADED):
        pass
    with pytest.raises(ValueError, match=r"optim.offload_fraction is 1.5; it must lie in \[0.0, 1.0\]"):
        OptimConfig(offload_fraction=1.5)
