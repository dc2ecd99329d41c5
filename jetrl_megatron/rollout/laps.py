"""Seconds of the parts of a weight push, on the host's clock and without waiting for a device.

Enters: `lap(part)` at the end of each part. Leaves: `seconds` by part. Nothing is synchronised for it: a part ends where the push waits
anyway, for the sums of the hashes or for a server's answer, so that work on a device counts where it is waited for.
"""

import time
from collections.abc import Callable, Iterable, Mapping

PARTS = ("write", "boot", "join", "pause", "load", "verify", "admit", "rest")
"""In the order of a push, on rank 0. write: gather, hash and write all tensors (disk). boot: start servers and wait for those that come
back. join: a new NCCL group. Of the server that took longest: pause: wake for the weights, where it slept, and let requests end. load: on
the actor's side of nccl and ipc, gather, send and hash. verify: refresh what the engine derives, hash, wait for the last of the actor's
hashes, compare. admit: wake the KV cache, where it slept, empty the prefix cache, resume. rest: what is left of the whole."""


class Laps:
    """Adds up seconds by part. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin the first lap."""
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self._start = self._mark = clock()

    def lap(self, part: str) -> None:
        """Count the time since the last lap for `part`, one of PARTS."""
        assert part in PARTS, (part, PARTS)
        now = self._clock()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._mark
        self._mark = now

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add parts that were counted elsewhere since the beginning."""
        for part, value in seconds.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + value

    def with_rest(self) -> dict[str, float]:
        """Return parts in their order, with what they leave of the time since the beginning as `rest`."""
        rest_s = self._clock() - self._start - sum(self.seconds.values())
        return {part: self.seconds[part] for part in PARTS if part in self.seconds} | {"rest": rest_s}


def slowest(laps: Iterable[Laps]) -> dict[str, float]:
    """Return the parts of the one whose parts add up to most: the others were waited for in that time too."""
    return max((one.seconds for one in laps), key=lambda seconds: sum(seconds.values()), default={})
