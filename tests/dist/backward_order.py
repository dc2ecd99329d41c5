"""In which order the backward of linears starts collectives, launches GEMMs and waits.

Only collectives that are started to be waited for later are seen: Megatron's mappings wait where they start.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

from jetrl_megatron.fp8 import linear, linear_bf16
from jetrl_megatron.fp8.backend import ReferenceKernels

NAMES = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "reduce-scatter", "all_reduce": "all-reduce"}


class _Work:
    """A started collective that says when it is waited for."""

    def __init__(self, events: list[str], name: str, work: Any) -> None:
        self.events, self.name, self.work = events, name, work

    def wait(self) -> None:
        self.events.append(f"wait for {self.name}")
        self.work.wait()


@dataclass
class Order:
    """What happened, first to last: "start ...", "dgrad", "wgrad", "wait for ..."."""

    events: list[str] = field(default_factory=list)

    @contextmanager
    def tapped(self) -> Iterator[None]:
        """Write down while open."""
        with ExitStack() as stack:

            def patch(owner: Any, name: str, function: Any) -> None:
                stack.enter_context(mock.patch.object(owner, name, function))

            for name, shown in NAMES.items():
                patch(dist, name, self._collective(shown, getattr(dist, name)))
            name = "allgather_into_tensor_coalesced"
            patch(dist.ProcessGroup, name, self._fp8_gather(getattr(dist.ProcessGroup, name)))
            for name in ("dgrad", "wgrad"):
                patch(ReferenceKernels, name, staticmethod(self._gemm(name, getattr(ReferenceKernels, name))))
            for module in (linear_bf16, linear):
                patch(module, "wgrad_bf16", self._gemm("wgrad", module.wgrad_bf16))
                patch(module, "mm", self._gemm("dgrad", module.mm))
            yield

    def _gemm(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = len(self.events)
            self.events.append(name)
            result = real(*args, **kwargs)
            del self.events[before + 1 :]  # the GEMM that a wgrad calls
            return result

        return call

    def _collective(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if not async_op:
                return real(*args, **kwargs)
            self.events.append(f"start {name}")
            return _Work(self.events, name, real(*args, async_op=True, **kwargs))

        return call

    def _fp8_gather(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, outputs: Any, parts: Any, options: Any) -> Any:
            work = real(group, outputs, parts, options)
            if not options.asyncOp or work is None:
                return work
            self.events.append("start gather")
            return _Work(self.events, "gather", work)

        return call
