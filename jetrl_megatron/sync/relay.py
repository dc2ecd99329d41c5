"""One stream of messages to several takers: while they read one, rank 0 makes the next, and no more than that.

Enters: on one thread messages, on each server's thread a function that takes one. Leaves: every message taken once by every taker that
lives. Invariant: when `give` returns nobody reads any message but the one it was given, and when `end` returns nobody reads at all. No
message is read before all takers have come; who does not come says so with `leave`. A taker that fails is out, and the rest goes on.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Relay(Generic[Message]):
    """Between one giver and `expected` takers."""

    def __init__(self, expected: int) -> None:
        """Wait for nobody yet."""
        self._changed = threading.Condition()
        self._missing, self._takers, self._through = expected, 0, 0
        """Takers that have not come, that have come and live, and that are through with the last message."""
        self._message: Message | None = None
        self._given, self._over = 0, False

    def give(self, message: Message) -> None:
        """Wait until all takers are through with the message before, and hand them this one."""
        with self._changed:
            self._changed.wait_for(self._all_through)
            self._message, self._through = message, 0
            self._given += 1
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until all takers have come and are through with what was given."""
        with self._changed:
            self._changed.wait_for(self._all_through)

    def end(self) -> None:
        """Say that no message follows, and wait for those who read; what nobody has begun to read by then is withdrawn."""
        with self._changed:
            self._over = True
            if self._missing > 0:
                self._given = 0
            self._changed.notify_all()
            self._changed.wait_for(self._all_through)

    def _all_through(self) -> bool:
        return self._given == 0 or (self._missing <= 0 and self._through >= self._takers)

    def leave(self) -> None:
        """Say that one taker that is expected does not come."""
        with self._changed:
            self._missing -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Say that no further taker comes."""
        with self._changed:
            self._missing = 0
            self._changed.notify_all()

    def follow(self, take: Callable[[Message], object]) -> None:
        """Take every message until the end; raises what `take` raises."""
        with self._changed:
            self._missing -= 1
            self._takers += 1
            self._changed.notify_all()
        seen = 0
        while self._has_next(seen):
            seen += 1
            assert self._message is not None
            stays = False
            try:
                take(self._message)
                stays = True
            finally:
                self._leave_message(stays)

    def _has_next(self, seen: int) -> bool:
        """Wait for the message behind number `seen`; returns False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: (self._missing <= 0 and self._given > seen) or self._over)
            return self._given > seen

    def _leave_message(self, stays: bool) -> None:
        with self._changed:
            self._through += 1 if stays else 0
            self._takers -= 0 if stays else 1
            self._changed.notify_all()
