"""Weights by CUDA IPC: from each actor rank to the engine worker on its own GPU, for servers that share the actor's GPUs.

Enters: the stage wires. Leaves: verified servers, and no weights on a disk, as with NCCL. Each rank gathers whole tensors over its TP group
into a buffer on its GPU; rank 0 collects where all the buffers are and posts that, bucket by bucket, to every server at the same time; each
worker reads the buffer on its own GPU. There are two buffers: while servers read one bucket the next is filled, and the first before they
have paused. The one after that waits until every server has read the first. Rank 0 hashes the tensors that pass, and every server is
held to that. A server that dies leaves the push, and gets its weights by the next one; the rest goes on.
It needs pp = 1: with stages no rank has everything. Needs CUDA and vLLM 0.26.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.bucket import Bucket, fill_buckets, gpu_name, show_buffer
from jetrl_megatron.rollout.laps import Laps
from jetrl_megatron.rollout.published import Expected, Published
from jetrl_megatron.rollout.vllm_client import EngineClient
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.sync.cuda import MemoryTransport, beside
from jetrl_megatron.sync.relay import Relay
from jetrl_megatron.sync.transport import StageRecord, merge_shares
from jetrl_megatron.sync.wire import StageWire

_BUFFER_BYTES = 512 * 2**20
_NUM_BUFFERS = 2
"""`Relay` lets one bucket be filled while another is read."""


class IpcTransport(MemoryTransport):
    """Transport by CUDA IPC to servers all of whose workers run on the actor's GPUs."""

    def push(self, wire: StageWire, pool: ServerPool | None, step: int, laps: Laps) -> WeightVersion | None:
        """Show every bucket to the servers. See `Transport.push`.

        Raises ValueError where the actor has pipeline stages.
        """
        if wire.num_stages > 1:
            raise ValueError("rollout.vllm.transport=ipc needs parallel.pp=1: with stages no rank holds all tensors; use disk")
        if pool is None:
            if self._started():
                self._show(wire, None, wire.stream())
            return None
        published, clients = self._start(wire, pool, step, laps)
        relay: Relay[Bucket] = Relay(len(clients))
        model = {"in_place": self._engine_config(wire)} if self._in_place else {}

        def load(client: EngineClient, _: Published) -> None:
            relay.follow(lambda bucket: client.rpc("jetrl_load", {"bucket": bucket, **(model if bucket["first"] else {})}, self._timeout_s))

        def update() -> None:
            try:
                pool.update(published, load, relay.leave)
            finally:
                relay.close()

        def send() -> Expected:
            try:
                record = StageRecord(wire, self._engine_tp)
                self._show(wire, relay, record.watch(wire.stream()))
                return merge_shares(wire, [record.share()], step)
            finally:
                relay.end()  # whatever failed, and be it memory for the buffers: the servers' threads wait for a bucket

        beside(update, lambda: published.settle(send))
        return published.expected.result().version

    def _show(self, wire: StageWire, relay: Relay[Bucket] | None, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Fill this rank's buffers in turn; rank 0 (`relay` is not None) passes each bucket on, with everybody's handles."""
        buffers = [new_buffer(_buffer_bytes(wire), wire.device) for _ in range(_NUM_BUFFERS)]
        gpu, shown = gpu_name(wire.device), [show_buffer(buffer) for buffer in buffers]
        for bucket in fill_buckets(stream, buffers):
            handles = self._group.to_first((gpu, shown[bucket["buffer"]]))
            if relay is not None:
                assert handles is not None
                relay.give({**bucket, "handles": dict(handles)})
            self._hear()  # every server has read the bucket before, whose buffer is the next one
        if relay is not None:
            relay.settle()
        self._hear()  # and this one
        torch.cuda.ipc_collect()

    def _hear(self) -> None:
        """Hear from rank 0 that the push goes on."""
        if self._group.from_first(True) is not True:
            raise RunFailure("rank 0 broke off the push; its log says why")


def _buffer_bytes(wire: StageWire) -> int:
    """Return the bytes of a buffer that holds the largest tensor, an embedding as a rule."""
    sizes: list[int] = [prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in wire.described().values()]
    return max(_BUFFER_BYTES, *sizes)


def new_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Return memory for one bucket, [num_bytes] uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
