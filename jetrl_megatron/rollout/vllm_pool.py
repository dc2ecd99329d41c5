"""N engine servers as one: who may serve, with which weights, and how one that died comes back.

Enters: `Published` weights and a way to load them into one live server. Leaves: completions, each from a server that has reported the
fingerprints of the pool's version. The states of one server and its way through them are in vllm_member.py.

Invariants: only `ready` servers that hold the pool's version are given requests; the version moves when every server that is not `lost`
is `ready` with it. A restarted server starts on the published directory, so it holds the current weights before its first request; where
no weights lie on disk it stays `blank` until the next push. Servers that share the actor's GPUs sleep between `rest` and the next push.
One process of the run owns the pool (global rank 0).
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from subprocess import SubprocessError
from typing import Any

from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.laps import Laps, slowest
from jetrl_megatron.rollout.published import Published
from jetrl_megatron.rollout.vllm_client import Drawn, EngineClient, ServerGone
from jetrl_megatron.rollout.vllm_member import Load, Member
from jetrl_megatron.rollout.vllm_server import VllmServer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """How patient a pool is."""

    request_timeout_s: float
    push_timeout_s: float
    """Of one call."""
    max_restarts: int
    """Of one server, over the whole run."""


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
        ends: list[tuple[VllmServer | None, EngineClient | None]] = [(server, None) for server in servers]
        ends += [(None, client) for client in clients]
        assert ends, "a pool needs a server"
        self.counts = PoolCounts()
        self._limits = limits
        self._lock = threading.RLock()
        """Held to change or compare states."""
        self._members = [
            Member(
                number=number,
                server=server,
                client=client,
                lock=self._lock,
                model_config=model_config,
                push_timeout_s=limits.push_timeout_s,
            )
            for number, (server, client) in enumerate(ends)
        ]
        self._published: Published | None = None
        """What servers are started on."""
        self._version = -1
        self._closed = False

    @property
    def version(self) -> int:
        """Step of the weights that every ready server holds; -1 before the first push."""
        return self._version

    def ready(self) -> list[int]:
        """Return the servers that may serve; raises RunFailure with the causes where all are lost, or where the pool was closed."""
        return [m.number for m in self._verified() if m.holds == self._version]

    def _verified(self) -> list[Member]:
        """Return the servers that are ready, if with the version that a push is bringing, or that a failed push has brought."""
        with self._lock:
            if self._closed:
                raise RunFailure("the engine servers were stopped")
            if all(m.state == "lost" for m in self._members):
                raise RunFailure("no engine server is left: " + "; ".join(f"server {m.number}: {m.problem}" for m in self._members))
            return [m for m in self._members if m.state == "ready"]

    def blank(self) -> bool:
        """Tell whether a server waits for a push by the actor: it has no weights, or others than the pool's version."""
        with self._lock:
            return any(m.state == "blank" or (m.state == "ready" and m.holds != self._version) for m in self._members)

    def asleep(self) -> bool:
        """Tell whether `rest` was called and no push has come since."""
        with self._lock:
            return any(m.state == "asleep" for m in self._members)

    def shortest(self) -> tuple[int, str] | None:
        """Return the shortest context of the servers found by their URL, tokens, and whose it is; None where the run started all."""
        with self._lock:
            found = [(m.context, f"{m.client.url} (its --max-model-len)") for m in self._members if m.context and m.client is not None]
        return min(found, default=None)

    def complete(self, number: int, prompt_ids: Sequence[int], params: SamplingParams, seed: int) -> Drawn:
        """Draw one completion on one server; see `EngineClient.complete`."""
        return self._members[number].reached().complete(prompt_ids, params, seed, self._limits.request_timeout_s)

    def gone(self, number: int, cause: ServerGone) -> None:
        """Hear that a request failed: a server that does not answer is restarted, in the background."""
        member = self._members[number]
        with self._lock:
            if self._closed or member.state != "ready" or member.client is None:
                return
            if member.client.healthy():
                _LOG.warning("engine server %d failed a request and lives: %s", number, cause)
                return
            self._restart(member, f" ({cause})")

    def start(self, published: Published) -> list[EngineClient]:
        """Start the servers that do not run yet and wait for those that are coming back; returns the live ones, not yet verified."""
        with self._lock:
            self._published = published
        self._each(lambda m: m.state == "off", lambda m: self._guarded(m, lambda: m.boot(published)))
        with self._lock:
            for member in self._members:
                member.state = "blank" if member.state == "off" else member.state
        self._await_restarts()
        return [m.client for m in self._members if m.state != "lost" and m.client is not None]

    def update(self, published: Published, load: Load, left_out: Callable[[], None] = lambda: None) -> None:
        """Bring every server to `published`, verified; only then the pool's version is its version.

        load: called in one thread a server, at the same time. left_out: called for each server of `start` that is gone before its load, for
        a `load` that waits for the others. A server that dies on the way is restarted on the published directory. Raises WeightMismatch
        naming tensors, or RunFailure where no server is left or `published.expected` does not come.
        """
        laps = Laps()
        live = [m for m in self._members if m.state != "lost"]
        self.start(published)
        laps.lap("boot")
        for _ in [m for m in live if m.state == "lost"]:
            left_out()
        self._each(lambda m: m.state != "lost", lambda m: self._guarded(m, lambda: m.bring(published, load, left_out)))
        self._await_restarts()
        laps.add(slowest(member.laps for member in self._verified()))
        self._version, self.counts.push_s = published.step, laps.seconds

    def rest(self) -> None:
        """Put every server to sleep: none answers until the next `update` has verified it.

        One that is coming back comes back first. One that does not answer is stopped, to free its memory; the next push starts it anew.
        """
        self._await_restarts()
        self._each(lambda m: m.state in ("ready", "blank"), Member.lay_down)

    def _each(self, chosen: Callable[[Member], bool], work: Callable[[Member], None]) -> None:
        """Do something with several members at the same time; raises what the first of them raised."""
        members = [m for m in self._members if chosen(m)]
        with ThreadPoolExecutor(max_workers=len(members) or 1, thread_name_prefix="pool") as threads:
            for future in [threads.submit(work, member) for member in members]:
                future.result()

    def _guarded(self, member: Member, work: Callable[[], None]) -> None:
        """Do something with one server; one that is gone then is restarted in the background."""
        try:
            work()
        except ServerGone as cause:
            with self._lock:
                self._restart(member, f" in the middle of a push ({cause})")

    def _restart(self, member: Member, how: str) -> None:
        """Say how a server was found dead and begin to bring it back, unless it has died too often; the lock is held."""
        member.restarts += 1
        self.counts.restarts += 1
        lost = member.restarts > self._limits.max_restarts
        _LOG.warning("engine server %d is gone%s; it is %s", member.number, how, "given up" if lost else "restarted")
        if lost:
            times = "once" if member.restarts == 1 else f"{member.restarts} times"
            member.state, member.problem = "lost", member.problem or f"it died {times}"
            return
        member.state = "starting"
        member.thread = threading.Thread(target=self._revive, args=(member,), name=f"revive-{member.number}", daemon=True)
        member.thread.start()

    def _revive(self, member: Member) -> None:
        """Start a server anew on the current weights; runs in its own thread."""
        published = self._published
        assert published is not None
        member.laps = Laps()
        try:
            member.boot(published)
            member.laps.lap("boot")
            if member.started_on is not None:
                member.admit(published)
            else:
                member.become("blank")
        except (ServerGone, RuntimeError, ValueError, OSError, SubprocessError) as error:
            # Also a refusal, a full disk, a process that does not end: a thread that ended here would leave a draw waiting for this server.
            with self._lock:
                member.problem = str(error)
                if not self._closed:
                    self._restart(member, f" while it came back ({error})")

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
