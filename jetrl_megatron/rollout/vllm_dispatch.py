"""Requests over several servers: each goes to the least loaded server that may serve, and comes back exactly once.

Enters: indexed requests and a view of the servers. Leaves: one result for each index. A request whose server is gone is sent again, to
whichever server may serve then, a bounded number of times; a result that arrives is kept and its request is never sent again. A server is
given no more than `slots` requests at a time, so that late requests go to the servers that are free: a few long completions then hold up
one slot each, not a queue behind them.
Left out: what a request is, and how a dead server comes back (vllm_pool.py).
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.vllm_client import ServerGone

Item = TypeVar("Item")
Result = TypeVar("Result")
_LOOK_AGAIN_S = 0.2


class Servers(Protocol):
    """What the dispatcher sees of a pool."""

    def ready(self) -> list[int]:
        """Return the servers that may serve now. Raises RunFailure when none is left and none is coming back."""
        ...

    def gone(self, server: int, cause: ServerGone) -> None:
        """Hear that a request to `server` failed."""
        ...


@dataclass(kw_only=True)
class DispatchCounts:
    """What happened in one `dispatch`."""

    sent: dict[int, int] = field(default_factory=dict)
    """Requests by server, repeats included."""
    repeated: int = 0


class Dispatcher(Generic[Item, Result]):
    """One batch of requests.

    items: what to send, by index. send: (server, item) -> result, called from threads. servers: the pool. slots: requests that one server
    takes at a time. max_repeats: how often one request may be sent again.
    """

    def __init__(
        self, items: Sequence[Item], send: Callable[[int, Item], Result], servers: Servers, *, slots: int, max_repeats: int
    ) -> None:
        """Send nothing yet."""
        self._items, self._send, self._servers = items, send, servers
        self._slots, self._max_repeats = slots, max_repeats
        self._waiting = deque(range(len(items)))
        self._attempts = [0] * len(items)
        self._results: dict[int, Result] = {}
        self._in_flight: dict[int, int] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self.counts = DispatchCounts()

    def run(self) -> list[Result]:
        """Send everything and return the results by index.

        Raises the ValueError of a refused request, or RunFailure naming the last cause where a request failed too often.
        """
        num = len(self._items)
        threads = ThreadPoolExecutor(max_workers=min(num, 1024) or 1, thread_name_prefix="rollout")
        with self._changed:
            while len(self._results) < num and self._error is None:
                server = self._choose() if self._waiting else None
                if server is None:
                    self._changed.wait(_LOOK_AGAIN_S)
                    continue
                index = self._waiting.popleft()
                self._in_flight[server] = self._in_flight.get(server, 0) + 1
                self.counts.sent[server] = self.counts.sent.get(server, 0) + 1
                threads.submit(self._send, server, self._items[index]).add_done_callback(partial(self._done, server, index))
        threads.shutdown(wait=self._error is None, cancel_futures=True)
        if self._error is not None:
            raise self._error
        return [self._results[index] for index in range(num)]

    def _choose(self) -> int | None:
        """Return the ready server with the fewest requests in flight, None where all are full or none is ready."""
        try:
            ready = self._servers.ready()
        except RuntimeError as error:
            self._error = error
            return None
        free = [(self._in_flight.get(s, 0), s) for s in ready if self._in_flight.get(s, 0) < self._slots]
        return min(free)[1] if free else None

    def _done(self, server: int, index: int, sent: Future[Result]) -> None:
        """Put away the result of one request, or put the request back."""
        if sent.cancelled():
            return
        error = sent.exception()
        if isinstance(error, ServerGone):
            self._servers.gone(server, error)
        with self._changed:
            self._in_flight[server] -= 1
            if error is None:
                self._keep(index, sent.result())
            elif isinstance(error, ServerGone):
                self._put_back(index, error)
            else:
                self._error = error
            self._changed.notify()

    def _keep(self, index: int, result: Result) -> None:
        assert index not in self._results, f"request {index} was answered twice"
        self._results[index] = result

    def _put_back(self, index: int, cause: ServerGone) -> None:
        self._attempts[index] += 1
        self.counts.repeated += 1
        if self._attempts[index] > self._max_repeats:
            self._error = RunFailure(f"request {index} failed {self._attempts[index]} times, last: {cause}")
        self._waiting.appendleft(index)
