"""Seconds of each phase of a step, measured on the host clock.

Enters: `with phases("rollout"):` around the work. Leaves: `phases.take()`, seconds by name since the last take, plus "total". A phase
entered inside another counts only for the inner one, and all of an evaluation for `eval`, so the named seconds never overlap and never
exceed the total. On a device that works behind the host, `synchronize` is called at both ends of a phase, or the time would land in
whichever phase waits first.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("rollout", "reward", "reference", "logprobs", "update", "quantise", "draw_wait", "sync", "save", "eval")
"""Names, in the order of a step and of every table. rollout: a draw in the foreground. draw_wait: waiting for the one beside the update."""
_WHOLE = "eval"
"""It draws and scores as a step does, and is no part of one."""
BESIDE = "draw"
"""In a step's seconds: of the draw of the next step that ran beside this one. Not a phase: it overlaps them, waiting included."""


class Phases:
    """Adds up seconds by phase.

    clock: seconds, monotonic. synchronize: waits for the device; None on a CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, synchronize: Callable[[], None] | None = None) -> None:
        """Start counting the total."""
        self._clock = clock
        self._synchronize = synchronize
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._mark = self._start = clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count what runs inside for `name`, one of PHASES."""
        assert name in PHASES, (name, PHASES)
        self._lap()
        self._open.append(name)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """Give seconds by phase since the last take and "total", phases of 0 s left out; counting goes on from here."""
        self._lap()
        seconds = {name: self._seconds[name] for name in PHASES if name in self._seconds}
        seconds["total"] = self._mark - self._start
        self._seconds = {}
        self._start = self._mark
        return seconds

    def _lap(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
        now = self._clock()
        if self._open:
            name = _WHOLE if _WHOLE in self._open else self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now
