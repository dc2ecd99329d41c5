"""One push of the actor's weights to the pool, on all ranks of the run together.

Enters: the actor after an optimizer step (or a restart). Leaves: every server verified to hold the step's bytes, and the version that
completions drawn from now on carry. Happens-before: the version is returned, on any rank, only after the last server's verification.
"""

import logging

import torch

from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.rollout.laps import Laps
from jetrl_megatron.rollout.vllm_engine import RunGroup
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.sync.transport import Transport
from jetrl_megatron.sync.wire import StageWire

_LOG = logging.getLogger(__name__)


class Publisher:
    """Pushes an actor's weights.

    actor: whose weights. pool: on rank 0, None elsewhere. transport: how. group: all ranks of the run. everywhere: see StageWire.
    shares_device: whether servers take memory on the actor's GPUs in a push.
    """

    def __init__(
        self,
        actor: Actor,
        pool: ServerPool | None,
        transport: Transport,
        group: RunGroup,
        *,
        everywhere: bool = False,
        shares_device: bool = False,
    ) -> None:
        """Plan the wire once: the layout does not change during a run."""
        self._actor, self._pool, self._transport, self._group = actor, pool, transport, group
        self._shares_device = shares_device
        self._wire = StageWire(actor, everywhere=everywhere)
        self.version: WeightVersion | None = None
        """What the servers were last verified to hold."""
        self.seconds = 0.0
        """Of the last push."""
        self.parts: dict[str, float] = {}
        """The same by part (rollout/laps.py), the pool's on rank 0 alone."""

    def push(self) -> WeightVersion:
        """Bring every server to the actor's current weights and verify it; collective.

        Raises RuntimeError on every rank where it fails: rank 0's names the server and the tensors. The version then stays what it was.
        A rank whose disk is full raises OSError naming the file.
        """
        laps = Laps()
        step = self._actor.version
        if self.version is not None and step < self.version.step:
            raise RuntimeError(f"version {step} would follow {self.version.step}; versions only grow")
        if self._shares_device:
            torch.cuda.empty_cache()  # what the update left in the allocator's cache the servers need; on a CPU there is nothing
        done: WeightVersion | None = None
        failure: Exception | None = None
        try:
            done = self._transport.push(self._wire, self._pool, step, laps)
        except (ValueError, RuntimeError, OSError) as error:
            if self._group.rank != 0:
                raise
            failure = error
            _LOG.error("the push of version %d failed: %s", step, error)  # the others hear of it below, if they are still there
        word = ("done", done) if failure is None else ("failed", (False, str(failure)))
        version = self._group.result_of(self._group.from_first(word), failure)
        assert isinstance(version, WeightVersion) and version.step == step, (version, step)
        if self._pool is not None:
            laps.add(self._pool.counts.push_s)
        self.version, self.parts = version, laps.with_rest()
        self.seconds = sum(self.parts.values())
        parts = ", ".join(f"{part} {value:.2f}" for part, value in self.parts.items())
        _LOG.info("version %d (%s) is on every server after %.2f s: %s", step, version.sha256[:12], self.seconds, parts)
        return version

    def close(self) -> None:
        """Let go of what the transport holds; comes before the servers end."""
        self._transport.close()
