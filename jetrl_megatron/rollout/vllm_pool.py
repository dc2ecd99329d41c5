"""N engine servers as one: who may serve, with which weights, and how one that died comes back.

Enters: `Published` weights and a way to load them into one live server. Leaves: completions, each from a server that has reported the
fingerprints of the pool's version. States of a server:

    off -> starting -> [blank ->] ready <-> pushing          any -> starting (died, restarted) -> ... -> lost (restarted too often)
                                  ready -> asleep -> pushing          between `rest` and the next push, where servers share the actor's GPUs

Invariants: only `ready` servers are given requests; a server becomes `ready` only by verification against the pool's current `Published`,
after its prefix cache was emptied; the version moves when every server that is not `lost` is `ready` with it. A restarted server starts on
the published directory, so it holds the current weights before its first request; where no weights lie on disk it stays `blank` until the
next push. A server that slept holds garbage: a push wakes it for its weights, loads and verifies them, and only then wakes its KV cache.
One process of the run owns the pool (global rank 0).
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.laps import Laps, slowest
from jetrl_megatron.rollout.published import Published
from jetrl_megatron.rollout.vllm_client import Drawn, EngineClient, ServerGone
from jetrl_megatron.rollout.vllm_server import VllmServer
from jetrl_megatron.rollout.vllm_verify import verify_weights

_LOG = logging.getLogger(__name__)
State = Literal["off", "starting", "blank", "ready", "pushing", "asleep", "lost"]
Load = Callable[[EngineClient, Published], None]
"""Put published weights into one live, paused server."""


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """How patient a pool is."""

    request_timeout_s: float
    push_timeout_s: float
    max_restarts: int
    """Of one server, over the whole run."""


@dataclass(kw_only=True)
class _Member:
    """One server and what the pool knows of it."""

    number: int
    server: VllmServer | None
    """None for a server that somebody else started, found by its URL."""
    client: EngineClient | None
    state: State = "off"
    restarts: int = 0
    thread: threading.Thread | None = None
    started_on: Path | None = None
    """The weights that it was started with, until it is verified."""
    problem: str = ""
    laps: Laps = field(default_factory=Laps)


@dataclass(kw_only=True)
class PoolCounts:
    """What happened since the pool began, and how long the last push took."""

    restarts: int = 0
    push_s: dict[str, float] = field(default_factory=dict)
    """Of the last push, by part (laps.PARTS)."""


class ServerPool:
    """The servers of a run.

    servers: not yet started. clients: of servers found by URL. model_config: the engines' config.json. limits: see PoolLimits.
    """

    def __init__(
        self, servers: Sequence[VllmServer], clients: Sequence[EngineClient], model_config: dict[str, Any], limits: PoolLimits
    ) -> None:
        """Start nothing yet: the first `update` does."""
        members: list[tuple[VllmServer | None, EngineClient | None]] = [(server, None) for server in servers]
        members += [(None, client) for client in clients]
        assert members, "a pool needs a server"
        self._members = [_Member(number=i, server=s, client=c) for i, (s, c) in enumerate(members)]
        self._config, self._limits = model_config, limits
        self._lock, self.counts = threading.RLock(), PoolCounts()
        self._published: Published | None = None
        self._version, self._closed = -1, False

    @property
    def version(self) -> int:
        """Step of the weights that every ready server holds; -1 before the first push."""
        return self._version

    def ready(self) -> list[int]:
        """Return the servers that may serve; raises RunFailure with the causes where all are lost, or where the pool was closed."""
        with self._lock:
            if self._closed:
                raise RunFailure("the engine servers were stopped")
            if all(m.state == "lost" for m in self._members):
                raise RunFailure("no engine server is left: " + "; ".join(f"server {m.number}: {m.problem}" for m in self._members))
            return [m.number for m in self._members if m.state == "ready"]

    def blank(self) -> bool:
        """Tell whether a server waits for weights that only a push by the actor can bring."""
        with self._lock:
            return any(m.state == "blank" for m in self._members)

    def asleep(self) -> bool:
        """Tell whether `rest` was called and no push has come since."""
        with self._lock:
            return any(m.state == "asleep" for m in self._members)

    def complete(self, number: int, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Drawn:
        """Draw one completion on one server; see `EngineClient.complete`."""
        client = self._members[number].client
        assert client is not None, number
        return client.complete(prompt_ids, params, seed, self._limits.request_timeout_s)

    def gone(self, number: int, cause: ServerGone) -> None:
        """Hear that a request failed: a server that does not answer is restarted, in the background."""
        member = self._members[number]
        with self._lock:
            if self._closed or member.state != "ready" or member.client is None:
                return
            if member.client.healthy():
                _LOG.warning("engine server %d failed a request and lives: %s", number, cause)
                return
            _LOG.warning("engine server %d is gone (%s); it is restarted", number, cause)
            self._restart(member)

    def start(self, published: Published) -> list[EngineClient]:
        """Start the servers that do not run yet and wait for those that are coming back; returns the live ones, not yet verified."""
        with self._lock:
            self._published = published
        self._each(lambda m: m.state == "off", lambda m: self._guarded(m, lambda: self._boot(m, published)))
        with self._lock:
            for member in self._members:
                member.state = "blank" if member.state == "off" else member.state
        self._await_restarts()
        return [m.client for m in self._members if m.state != "lost" and m.client is not None]

    def update(self, published: Published, load: Load, left_out: Callable[[], None] = lambda: None) -> None:
        """Bring every server to `published`, verified; only then the pool's version is its version.

        load: called in one thread a server, at the same time. left_out: called for each server of `start` that is gone before its load, for
        a `load` that waits for the others. A server that dies on the way is restarted on the published directory. Raises WeightMismatch
        naming tensors, or RunFailure where no server is left.
        """
        laps = Laps()
        live = [m for m in self._members if m.state != "lost"]
        self.start(published)
        laps.lap("boot")
        for _ in [m for m in live if m.state == "lost"]:
            left_out()
        self._each(lambda m: m.state != "lost", lambda m: self._guarded(m, lambda: self._bring(m, published, load, left_out)))
        self._await_restarts()
        laps.add(slowest(self._members[number].laps for number in self.ready()))
        self._version, self.counts.push_s = published.version.step, laps.seconds

    def rest(self) -> None:
        """Put every server to sleep: none answers until the next `update` has verified it.

        One that is coming back comes back first. One that does not answer is stopped, to free its memory; the next push starts it anew.
        """
        self._await_restarts()
        self._each(lambda m: m.state in ("ready", "blank"), self._lay_down)

    def _lay_down(self, member: _Member) -> None:
        client = member.client
        assert client is not None, member.number
        with self._lock:
            member.state, member.started_on = "asleep", None
        try:
            client.sleep(self._limits.push_timeout_s)
        except ServerGone as cause:
            _LOG.warning("engine server %d did not go to sleep (%s); the next push starts it anew", member.number, cause)
            if member.server is not None:
                member.server.stop()

    def _each(self, chosen: Callable[[_Member], bool], work: Callable[[_Member], None]) -> None:
        """Do something with several members at the same time; raises what the first of them raised."""
        members = [m for m in self._members if chosen(m)]
        with ThreadPoolExecutor(max_workers=len(members) or 1, thread_name_prefix="pool") as threads:
            for future in [threads.submit(work, member) for member in members]:
                future.result()

    def _guarded(self, member: _Member, work: Callable[[], None]) -> None:
        """Do something with one server; one that is gone then is restarted in the background."""
        try:
            work()
        except ServerGone as cause:
            _LOG.warning("engine server %d is gone in the middle of a push (%s); it is restarted", member.number, cause)
            with self._lock:
                self._restart(member)

    def _boot(self, member: _Member, published: Published) -> None:
        """Start one server's process, or ask one that somebody else started for the actor's operators; it may not serve yet."""
        if member.server is not None:
            member.client = member.server.start(published.directory, published.has_weights)
            member.started_on = published.directory if published.has_weights else None
        elif member.client is not None:
            member.client.rpc("jetrl_prepare", {}, self._limits.push_timeout_s)

    def _bring(self, member: _Member, published: Published, load: Load, left_out: Callable[[], None]) -> None:
        """Load one live server, unless it was started on these very weights, and verify it."""
        client, awaited, member.laps = member.client, True, Laps()
        assert client is not None, member.number
        try:
            with self._lock:
                if member.state == "ready" and member.started_on == published.directory:
                    return  # it came back a moment ago, on these weights, and is verified
                slept = member.state == "asleep"
                member.state = "pushing"
            if slept:
                client.wake("weights", self._limits.push_timeout_s)
            if member.started_on != published.directory:
                client.pause(self._limits.push_timeout_s)
                member.laps.lap("pause")
                awaited = False
                load(client, published)
                member.laps.lap("load")
        finally:
            if awaited:
                left_out()
        member.started_on = None
        self._admit(member, published, slept)

    def _admit(self, member: _Member, published: Published, slept: bool = False) -> None:
        """Verify, wake the KV cache of a server that slept, empty the prefix cache and let the server serve."""
        client = member.client
        assert client is not None
        name, timeout_s = f"engine server {member.number}", self._limits.push_timeout_s
        verify_weights(name, client, published, self._config, timeout_s, refresh=True, slept=slept)
        member.laps.lap("verify")
        if slept:
            client.wake("kv_cache", timeout_s)
        client.reset_prefix_cache()
        client.resume()
        member.laps.lap("admit")
        with self._lock:
            member.state = "ready"

    def _restart(self, member: _Member) -> None:
        """Begin to bring a dead server back; the lock is held."""
        member.restarts += 1
        self.counts.restarts += 1
        if member.restarts > self._limits.max_restarts:
            member.state, member.problem = "lost", member.problem or f"it died {member.restarts} times"
            return
        member.state = "starting"
        member.thread = threading.Thread(target=self._revive, args=(member,), name=f"revive-{member.number}", daemon=True)
        member.thread.start()

    def _revive(self, member: _Member) -> None:
        """Start a server anew on the current weights; runs in its own thread."""
        published = self._published
        assert published is not None
        member.laps = Laps()
        try:
            self._boot(member, published)
            member.laps.lap("boot")
            if member.started_on is not None:
                self._admit(member, published)
            else:
                with self._lock:
                    member.state = "blank"
        except (ServerGone, RuntimeError) as error:
            with self._lock:
                member.problem = str(error)
                if not self._closed:
                    self._restart(member)

    def _await_restarts(self) -> None:
        """Wait until every server that is coming back has come back, or is lost."""
        for member in self._members:
            while True:
                with self._lock:  # a restart makes and starts its thread under it: what is read here has been started
                    thread = member.thread
                if thread is None:
                    break
                thread.join()
                with self._lock:
                    if member.thread is thread:  # and not the next attempt, which this one began
                        member.thread = None

    def pids(self) -> list[int]:
        """Return the process ids of the servers that this pool started, 0 for one that is not running."""
        return [m.server.pid if m.server is not None else 0 for m in self._members]

    def close(self) -> None:
        """Stop every server that this pool started."""
        with self._lock:
            self._closed = True
        for member in self._members:
            if member.server is not None:
                member.server.stop()
