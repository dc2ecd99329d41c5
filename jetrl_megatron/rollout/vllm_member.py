"""One server of a pool: its state, and its own way from one state to the next.

Enters: a server that is started or found by its URL, `Published` weights, a way to load them. Leaves: a server that is `ready`, asleep, or
an exception that says it is gone (ServerGone) or holds something else (WeightMismatch). States:

    off -> starting -> [blank ->] ready <-> pushing          any -> starting (died, restarted) -> ... -> lost (restarted too often)
                                  ready -> asleep -> pushing          between `lay_down` and the next push
             pushing -> blank, or asleep again                        refused, or verified to hold something else

Invariant: a server becomes `ready` only by `admit`: verified against what was published, its KV cache awake, its prefix cache emptied. One
that slept holds garbage: its weights are woken, loaded and verified before its KV cache is.
Left out: who may be asked, restarts, and what all servers together hold (vllm_pool.py).
"""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jetrl_megatron.rollout.laps import Laps
from jetrl_megatron.rollout.published import Published
from jetrl_megatron.rollout.vllm_client import EngineClient, ServerGone
from jetrl_megatron.rollout.vllm_server import VllmServer
from jetrl_megatron.rollout.vllm_verify import verify_weights

_LOG = logging.getLogger(__name__)
State = Literal["off", "starting", "blank", "ready", "pushing", "asleep", "lost"]
Load = Callable[[EngineClient, Published], None]
"""Put published weights into one live, paused server."""


@dataclass(kw_only=True)
class Member:
    """One server and what the pool knows of it.

    What is written here is read by other threads of the pool, so that states change under its lock.
    """

    number: int
    server: VllmServer | None
    """None for a server that somebody else started, found by its URL."""
    client: EngineClient | None
    """None before the start of a server of the pool's own."""
    lock: AbstractContextManager[Any] = field(repr=False)
    """The pool's."""
    model_config: dict[str, Any] = field(repr=False)
    """The engines' config.json."""
    push_timeout_s: float
    """The longest that one call of a push may take."""
    state: State = "off"
    restarts: int = 0
    thread: threading.Thread | None = None
    """Brings it back."""
    started_on: Path | None = None
    """The weights that it was started with, until it is verified."""
    problem: str = ""
    """Why it could not be brought back."""
    context: int = 0
    """Tokens of prompt and completion that a server found by its URL takes, 0 before it was asked; the run's own take the model's."""
    holds: int = -1
    """Step of the weights that it was last verified with."""
    laps: Laps = field(default_factory=Laps)
    """Of the last push or restart."""

    def reached(self) -> EngineClient:
        """Return its client; it has been started."""
        assert self.client is not None, self.number
        return self.client

    def become(self, state: State) -> None:
        """Change the state."""
        with self.lock:
            self.state = state

    def boot(self, published: Published) -> None:
        """Start the process, or ask one that somebody else started for the actor's operators; it may not serve yet."""
        if self.server is not None:
            self.client = self.server.start(published.directory, published.has_weights)
            self.started_on = published.directory if published.has_weights else None
        else:
            client = self.reached()
            client.wake(None, self.push_timeout_s)  # whoever had it may have put it to sleep, and what is prepared lies in its memory
            reports = client.rpc("jetrl_prepare", {}, self.push_timeout_s)
            if not all(isinstance(report, dict) and "context_toks" in report for report in reports):
                raise ValueError(f"{client.url} runs another version of jetrl-megatron: install the run's there")
            self.context = min(report["context_toks"] for report in reports)

    def bring(self, published: Published, load: Load, left_out: Callable[[], None]) -> None:
        """Load a live server, unless it was started on these very weights, and admit it.

        left_out: called where `load` is not. Raises ServerGone, and what `load` and `admit` raise: it waits for another push then.
        """
        self.laps = Laps()
        with self.lock:
            verified = self.state == "ready" and self.started_on == published.directory  # it came back a moment ago, on these weights
            slept = self.state == "asleep"
            self.state = "ready" if verified else "pushing"
        if verified:
            left_out()
            return
        try:
            self._fill(published, load, left_out, slept)
            self.admit(published, slept)
        except (ValueError, RuntimeError):
            self.become("asleep" if slept else "blank")
            raise

    def _fill(self, published: Published, load: Load, left_out: Callable[[], None], slept: bool) -> None:
        """Wake the weights of a server that slept, and load them, unless it was started on them."""
        client, awaited = self.reached(), True
        try:
            if slept:
                client.wake("weights", self.push_timeout_s)
            if self.started_on != published.directory:
                client.pause(self.push_timeout_s)
                self.laps.lap("pause")
                awaited = False
                load(client, published)
                self.laps.lap("load")
        finally:
            if awaited:
                left_out()
        self.started_on = None

    def admit(self, published: Published, slept: bool = False) -> None:
        """Verify, wake the KV cache of a server that slept, empty the prefix cache and let the server serve.

        Raises ServerGone, or WeightMismatch naming tensors.
        """
        client, name = self.reached(), f"engine server {self.number}"
        verify_weights(name, client, published, self.model_config, self.push_timeout_s, refresh=True, slept=slept)
        self.laps.lap("verify")
        if slept:
            client.wake("kv_cache", self.push_timeout_s)
        client.reset_prefix_cache()
        client.resume()
        self.laps.lap("admit")
        with self.lock:
            self.state, self.holds = "ready", published.step

    def lay_down(self) -> None:
        """Put it to sleep; a server that does not answer is stopped, to free its memory, and started anew by the next push."""
        with self.lock:
            self.state, self.started_on = "asleep", None
        try:
            self.reached().sleep(self.push_timeout_s)
        except ServerGone as cause:
            _LOG.warning("engine server %d did not go to sleep (%s); the next push starts it anew", self.number, cause)
            if self.server is not None:
                self.server.stop()
