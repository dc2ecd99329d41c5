"""RolloutEngine on a pool of vLLM servers, on every rank of a run: rank 0 talks to the servers, the others wait for what it brings.

Enters: each data-parallel replica's requests. Leaves: its completions, in order, tagged with the version that the pool had verified when
the request was sent. All replicas' requests become one dispatch, so that no server waits for another replica's tail. While rank 0
dispatches, the other ranks follow its word: they take part in a weight push where a server came back without weights, and receive the
completions at the end. `begin` does the same in a thread of each rank while the actor learns: the run's own group is all that it uses, and
a push waits until no rank is learning and no server serves (background_draw.PushHold).

Servers that share the actor's GPUs sleep from `rest` until the next push has verified them.

A request's draw is keyed by (seed, prompt id, sample index) through its own seed in the server. Its log-probs are the engine's; where the
engine's logits depend on what else is in the batch, so do its draws.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from jetrl_megatron.contracts import Completion, SamplingParams
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.background_draw import BackgroundDraw, PushHold
from jetrl_megatron.rollout.engine import Request, check_fits
from jetrl_megatron.rollout.vllm_client import Drawn, ServerGone
from jetrl_megatron.rollout.vllm_dispatch import DispatchCounts, Dispatcher
from jetrl_megatron.rollout.vllm_pool import ServerPool

_PUSH, _DONE, _FAILED = "push", "done", "failed"


def request_seed(seed: int, prompt_id: str, sample_index: int) -> int:
    """Return the seed of one request, in [0, 2^63): a function of seed, prompt and sample, so that batching cannot choose it."""
    digest = hashlib.sha256(f"{seed}\0{prompt_id}\0{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class RunGroup:
    """All ranks of a run, for plain values that may take as long as a rollout to come.

    timeout_s: the longest that a rank may wait for rank 0.
    """

    def __init__(self, timeout_s: float) -> None:
        """Make a group of its own on gloo: the actor's own groups end a wait after half an hour. A process that is in none is alone."""
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if self.size > 1 else None

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def to_first(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0, None elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    @staticmethod
    def result_of(word: tuple[str, Any], failure: Exception | None) -> Any:
        """Return the value of rank 0's last word, or raise what it says."""
        if failure is not None:
            raise failure
        kind, value = word
        if kind == _FAILED:
            refused, text = value
            raise ValueError(text) if refused else RunFailure(f"rank 0: {text}")
        return value


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands, and what its requests may be."""

    replica: int
    """Data-parallel rank."""
    is_leader: bool
    """Whether this rank's requests count: one rank a replica."""
    max_positions: int
    """The model's context."""
    vocab_size: int
    """The model's."""
    slots: int
    """Requests that one server takes at a time."""
    max_repeats: int
    """How often a request may be sent again."""
    shares_device: bool = False
    """Whether the servers are on the actor's own GPUs, and sleep while it trains."""


class VllmEngine:
    """RolloutEngine over HTTP.

    pool: on rank 0, None elsewhere. group: all ranks. place: this rank's. push_again: a weight push, called on every rank together, for
    servers that came back without weights.
    """

    def __init__(self, pool: ServerPool | None, group: RunGroup, place: Place, push_again: Callable[[], None]) -> None:
        """Keep the parts."""
        assert (pool is not None) == (group.rank == 0), group.rank
        self.pool, self._group, self._place, self._push_again = pool, group, place, push_again
        self._hold = PushHold()
        self.counts: DispatchCounts | None = None
        """Of the last `generate`; on rank 0."""

    def generate(self, requests: Sequence[Request], params: SamplingParams, *, seed: int) -> list[Completion]:
        """Draw one completion for each request, in order; collective over all ranks of the run. See `RolloutEngine.generate`."""
        shares = self._group.to_first((self._place.replica, list(requests)) if self._place.is_leader else None)
        by_replica = self._lead(shares, params, seed) if shares is not None else self._follow()
        return list(by_replica[self._place.replica])

    def begin(self, requests: Sequence[Request], params: SamplingParams, *, seed: int) -> BackgroundDraw:
        """Start `generate` in a thread of every rank; until it is joined this engine and the run's group are its own."""
        asked = list(requests)
        return BackgroundDraw(lambda: self.generate(asked, params, seed=seed), self._hold)

    def _lead(self, shares: list[Any], params: SamplingParams, seed: int) -> dict[int, list[Completion]]:
        """On rank 0: dispatch everything; every way out of here sends the other ranks a last word."""
        owners = [(replica, request) for share in shares if share is not None for replica, request in [(share[0], r) for r in share[1]]]
        failure: Exception | None = None
        word: tuple[str, Any]
        try:
            word = (_DONE, self._dispatch(owners, params, seed))
        except (ValueError, RuntimeError) as error:
            failure, word = error, (_FAILED, (isinstance(error, ValueError), str(error)))
        self._group.from_first(word)
        result: dict[int, list[Completion]] = self._group.result_of(word, failure)
        for share in shares:
            if share is not None:
                result.setdefault(share[0], [])
        return result

    def _follow(self) -> dict[int, list[Completion]]:
        """On other ranks: take part in pushes until the completions come."""
        while True:
            word = self._group.from_first(None)
            if word[0] != _PUSH:
                result: dict[int, list[Completion]] = self._group.result_of(word, None)
                result.setdefault(self._place.replica, [])
                return result
            self._hold.wait()  # rank 0 has learned, this rank may not have yet
            self._push_again()

    def _dispatch(self, owners: list[tuple[int, Request]], params: SamplingParams, seed: int) -> dict[int, list[Completion]]:
        pool = self.pool
        assert pool is not None
        context = (self._place.max_positions, "the model")
        context = min(context, pool.shortest() or context)
        for _, request in owners:
            check_fits(request, params, self._place.vocab_size, context)
        if pool.asleep():
            raise RunFailure(f"the engine servers have slept since version {pool.version}: push weights before drawing")

        def send(server: int, owned: tuple[int, Request]) -> tuple[Drawn, int]:
            request, version = owned[1], pool.version
            one = pool.complete(server, request.prompt.token_ids, params, request_seed(seed, request.prompt.id, request.sample_index))
            if pool.version != version:
                raise ServerGone(f"version {version} became {pool.version} while prompt {request.prompt.id} was under way")
            return one, version

        servers = _PushingPool(pool, self._hold, self._push)
        dispatcher: Dispatcher[tuple[int, Request], tuple[Drawn, int]] = Dispatcher(
            owners, send, servers, slots=self._place.slots, max_repeats=self._place.max_repeats
        )
        drawn = dispatcher.run()
        self.counts = dispatcher.counts
        by_replica: dict[int, list[Completion]] = {}
        for (replica, request), (one, version) in zip(owners, drawn, strict=True):
            by_replica.setdefault(replica, []).append(_completion(request, one, version))
        return by_replica

    def _push(self) -> None:
        """On rank 0: call the other ranks to a push and take part."""
        self._group.from_first((_PUSH, None))
        self._push_again()

    def rest(self) -> None:
        """Let the servers release the actor's GPUs; collective over all ranks of the run. See `RolloutEngine.rest`.

        Raises RunFailure or ValueError on every rank where a server refuses.
        """
        if not self._place.shares_device:
            return
        self._group.to_first(None)  # every rank is here: none allocates while a server measures what it has released
        failure: Exception | None = None
        word: tuple[str, Any] = (_DONE, None)
        if self.pool is not None:
            try:
                self.pool.rest()
            except (ValueError, RuntimeError) as error:
                failure, word = error, (_FAILED, (isinstance(error, ValueError), str(error)))
        self._group.result_of(self._group.from_first(word), failure)

    def close(self) -> None:
        """Stop the servers."""
        if self.pool is not None:
            self.pool.close()


class _PushingPool:
    """The pool as the dispatcher sees it: before it looks for a server, one that waits for weights gets them, where `hold` allows it."""

    def __init__(self, pool: ServerPool, hold: PushHold, push: Callable[[], None]) -> None:
        self._pool, self._hold, self._push = pool, hold, push
        self.gone = pool.gone

    def ready(self) -> list[int]:
        ready = self._pool.ready()
        if not self._pool.blank() or not self._hold.allows(serving=bool(ready)):
            return ready
        self._push()
        return self._pool.ready()


def _completion(request: Request, drawn: Drawn, version: int) -> Completion:
    return Completion(
        prompt_id=request.prompt.id,
        sample_index=request.sample_index,
        token_ids=drawn.token_ids,
        logprobs=drawn.logprobs,
        finish_reason=drawn.finish_reason,
        versions=(version,) * len(drawn.token_ids),
    )
