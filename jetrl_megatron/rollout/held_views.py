"""Where the rectangles of an engine rank lie in its model: views of its parameters, kept from one push to the next.

Enters: vLLM's model, and the dimensions that the actor sends. Leaves: a view of any rectangle of the plan (published.py).
To find them takes a walk over all modules and some operations of torch a rectangle, in a push while everybody waits; to see that they are
right still takes one look at each link from the model down to a parameter, and at each parameter's memory and layout.
Invariant: what `KeptViews.of` returns are views of what the model computes with now, whatever was kept.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from conversion.architecture import ModelArchitecture
from jetrl_megatron.rollout.compat_weights import keeps_addresses
from jetrl_megatron.rollout.published import EnginePlans, HeldRectangle, rectangle


class HeldViews:
    """The views of one model, as one engine rank holds it.

    model: vLLM's. arch: its dimensions, as the actor reads them. tp, rank: the engine's. plans: kept from one model to the next.
    Raises ValueError where a parameter is missing, and as `EnginePlans.of` does.
    """

    def __init__(self, model: torch.nn.Module, arch: ModelArchitecture, tp: int, rank: int, plans: EnginePlans | None = None) -> None:
        """Find every parameter; a rectangle of it when it is asked for."""
        self.model, self.arch, self.fp8 = model, arch, fp8_linears(model)
        self.plan = (plans or EnginePlans()).of(arch, tp, self.fp8)[rank]
        self.modules: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
        """Each under each of its names."""
        self._asked = tp, rank
        self.parameters = {name: self._find(*name) for name in dict.fromkeys((p.module, p.parameter) for p in self.plan.places)}
        """By module and name in it."""
        self._views: dict[str, Tensor] = {}
        self._links = list(_links(self.modules))
        self._seen = [(self.modules[m], name, p, p.detach()) for (m, name), p in self.parameters.items()]

    def view(self, place: HeldRectangle) -> Tensor:
        """Return a rectangle of the plan where its parameter holds it."""
        found = self._views.get(place.key)
        if found is None:
            found = rectangle(self.parameters[place.module, place.parameter].detach(), place.rows_held, place.cols_held)
            self._views[place.key] = found
        return found

    def current(self, model: torch.nn.Module, arch: ModelArchitecture, tp: int, rank: int) -> bool:
        """Tell whether the views are those of this model as it is now."""
        return (
            model is self.model
            and self.arch == arch
            and self._asked == (tp, rank)
            and all(parent._modules.get(name) is child for parent, name, child in self._links)
            and all(module._parameters.get(name) is p and same_elements(p, seen) for module, name, p, seen in self._seen)
        )

    def _find(self, module: str, name: str) -> Tensor:
        parameter: Tensor | None = self.modules[module]._parameters.get(name) if module in self.modules else None
        if parameter is None:
            raise ValueError(f"the engine's model has no {module}.{name}, and the actor's has: their config.json differ")
        return parameter


class KeptViews:
    """The views that were asked for last, found anew where the model changed.

    They are kept where parameters stay where they are; elsewhere they would hold the memory of parameters that the model has no more.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._plans = EnginePlans()
        self._held: HeldViews | None = None

    def of(self, model: torch.nn.Module, arch: ModelArchitecture, tp: int, rank: int) -> HeldViews:
        """Return the views of this model as it is now; raises ValueError as `HeldViews` does."""
        kept, self._held = self._held, None
        held = kept if kept is not None and kept.current(model, arch, tp, rank) else HeldViews(model, arch, tp, rank, self._plans)
        if keeps_addresses(model):
            self._held = held
        return held


def fp8_linears(model: torch.nn.Module) -> frozenset[str]:
    """Return the Hugging Face module names of the linears whose weights the engine holds as FP8 codes."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    found = set()
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.float8_e4m3fn:
            module = name.removesuffix(".weight")
            stem, _, last = module.rpartition(".")
            found |= {f"{stem}.{part}" for part in parts.get(last, (last,))}
    return frozenset(found)


def same_elements(x: Tensor, y: Tensor) -> bool:
    """Tell whether two tensors are the same memory, read in the same way: more than an address, which a transpose shares."""
    return x.is_set_to(y) and x.dtype is y.dtype


def _links(modules: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield, for each module but the first, what holds it, its name there and itself."""
    for name, module in modules.items():
        if name:
            parent, _, last = name.rpartition(".")
            yield modules[parent], last, module
