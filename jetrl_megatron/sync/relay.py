"""One stream of messages to several takers, in step: what rank 0 collects from all ranks goes to every server before the next is made.

Enters: on one thread messages, on each server's thread a function that takes one. Leaves: every message taken once by every taker that
lives. Invariant: `give` returns when nobody reads the message any more. A taker that fails is out, and the rest goes on; who does not come
says so with `leave`.
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
        self._missing, self._takers, self._owed = expected, 0, 0
        self._message: Message | None = None
        self._given, self._over = 0, False

    def give(self, message: Message) -> None:
        """Hand a message to every taker, once all have come, and wait until all are through with it."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing <= 0)
            self._message, self._owed = message, self._takers
            self._given += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._owed == 0)

    def end(self) -> None:
        """Say that no message follows."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

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
            seen = self._given
            self._changed.notify_all()
        while self._has_next(seen):
            seen += 1
            assert self._message is not None
            through = False
            try:
                take(self._message)
                through = True
            finally:
                self._settle(stays=through)

    def _has_next(self, seen: int) -> bool:
        """Wait for the message behind number `seen`; returns False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._given > seen or self._over)
            return self._given > seen

    def _settle(self, stays: bool) -> None:
        with self._changed:
            self._owed -= 1
            self._takers -= 0 if stays else 1
            self._changed.notify_all()
