"""Weights from GPU to GPU by NCCL, through vLLM's weight-transfer API, to pools on other GPUs than the actor's.

Enters: the stage wires. Leaves: verified servers, and no weights on a disk: a server that comes back starts on random ones, stays blank,
and gets the current ones by a push before its first request. Small tensors travel packed, scales with codes, in large buffers.

Rank 0 broadcasts to all engine ranks; with pipeline stages their leaders hand their tensors to rank 0 first, because the API knows
one sender. A server that dies in the middle of a broadcast blocks it: that push does not come back, unlike one over `disk`.
Needs CUDA and vLLM 0.26. It has run from one GPU to another with every push verified; see results/LOG.md for what has run.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.rollout.laps import Laps
from jetrl_megatron.rollout.published import Published
from jetrl_megatron.rollout.vllm_client import EngineClient
from jetrl_megatron.rollout.vllm_engine import RunGroup
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.sync.transport import Share, StageRecord, engine_config, merge_shares, write_model_files
from jetrl_megatron.sync.wire import StageWire

_BUFFER_BYTES = 512 * 2**20


class MemoryTransport:
    """What NCCL and IPC have in common: a model directory without weights, and names that every server is told before the bytes."""

    def __init__(self, root: Path, source_dir: Path, group: RunGroup, *, engine_tp: int, timeout_s: float) -> None:
        """root: gets config and tokenizer. source_dir: the run's HF directory. group: all ranks. engine_tp: of the servers."""
        self._root, self._source_dir, self._group = root, source_dir, group
        self._engine_tp, self._timeout_s = engine_tp, timeout_s

    def _published(self, wire: StageWire, shares: list[Share], step: int) -> Published:
        if not (self._root / "config.json").is_file():
            write_model_files(self._root, engine_config(wire.arch, wire.fp8, self._source_dir), self._source_dir)
        return merge_shares(wire, shares, self._root, step, has_weights=False)

    def _hash(self, wire: StageWire) -> Share | None:
        """Hash what this stage is going to send: engines are compared with it, so it has to be known before they are loaded."""
        record = StageRecord(wire, self._engine_tp)
        for _ in record.watch(wire.stream()):
            pass
        return record.share() if wire.receives else None

    def close(self) -> None:
        """Nothing is held between pushes."""


class NcclTransport(MemoryTransport):
    """Transport over one NCCL group of rank 0 and every engine rank of the pool."""

    _communicator: Any = None
    _members: tuple[str, ...] = ()

    def close(self) -> None:
        """Leave the group; before the servers end, because a process that still holds it does not come to its end."""
        if self._communicator is not None:
            self._communicator.destroy()
        self._communicator, self._members = None, ()

    def push(self, wire: StageWire, pool: ServerPool | None, step: int, laps: Laps) -> WeightVersion | None:
        """Broadcast while every server receives. See `Transport.push`."""
        shares = self._group.to_first(self._hash(wire) if wire.replica == 0 else None)
        if pool is None:
            if wire.replica == 0:
                _send_to_first(wire)
            return None
        assert shares is not None
        published = self._published(wire, [s for s in shares if s is not None], step)
        laps.lap("hash")
        clients = pool.start(published)
        laps.lap("boot")
        self._join(clients)
        laps.lap("join")
        names, dtypes, shapes = _described(wire, shares)
        update = {"names": names, "dtype_names": dtypes, "shapes": shapes, "packed": True, "packed_buffer_size_bytes": _BUFFER_BYTES}

        def load(client: EngineClient, _: Published) -> None:
            client.control("/start_weight_update", None, self._timeout_s)
            client.control("/update_weights", {"update_info": update}, self._timeout_s)
            client.control("/finish_weight_update", None, self._timeout_s)

        def broadcast() -> None:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            arguments = {"group": self._communicator, "packed": True, "packed_buffer_size_bytes": _BUFFER_BYTES}
            tensors = made_on(torch.cuda.current_stream(wire.device), _from_stages(wire))
            NCCLWeightTransferEngine.trainer_send_weights(tensors, arguments)
            torch.cuda.synchronize()

        beside(lambda: pool.update(published, load), broadcast)
        return published.version

    def _join(self, clients: list[EngineClient]) -> None:
        """Make the group anew where the servers are not those of the last push."""
        members = tuple(client.url for client in clients)
        if members == self._members:
            return
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.close()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        world = 1 + self._engine_tp * len(clients)
        info = {"master_address": "127.0.0.1", "master_port": port, "world_size": world}
        with ThreadPoolExecutor(max_workers=len(clients)) as threads:
            asked = [
                threads.submit(
                    client.control,
                    "/init_weight_transfer_engine",
                    {"init_info": {**info, "rank_offset": 1 + self._engine_tp * number}},
                    self._timeout_s,
                )
                for number, client in enumerate(clients)
            ]
            self._communicator = NCCLWeightTransferEngine.trainer_init(info)
            for future in asked:
                future.result()
        self._members = members


def _described(wire: StageWire, shares: list[Share | None]) -> tuple[list[str], list[str], list[list[int]]]:
    """Return names, dtypes and shapes in the order in which rank 0 broadcasts."""
    described = wire.described()
    order = [name for share in shares if share is not None for name in share["names"]]
    return order, [described[name][0] for name in order], [list(described[name][1]) for name in order]


def _from_stages(wire: StageWire) -> Iterator[tuple[str, Tensor]]:
    """On rank 0: its own stage's tensors, then those of the other stages' leaders, in the order of the stages."""
    yield from wire.stream()
    described = wire.described()
    for leader, names in wire.other_stages():
        for name in names:
            dtype, shape = described[name]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=wire.device)
            dist.recv(tensor.view(torch.uint8), src=leader)
            yield name, tensor


def made_on(home: torch.cuda.Stream, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Make every tensor of `stream` on the CUDA stream `home`, whichever is current where it is taken; that one waits for it.

    vLLM's sender takes tensors on two CUDA streams in turn, and a bucket of the wire outlives a turn: its bytes, put there on one, would be
    read on the other, and its memory be used again, with nothing in between that waits.
    """
    while True:
        with torch.cuda.stream(home):
            made = next(stream, None)
        if made is None:
            return
        taker = torch.cuda.current_stream(home.device)
        taker.wait_stream(home)
        made[1].record_stream(taker)
        yield made


def _send_to_first(wire: StageWire) -> None:
    """On the ranks of the first replica but rank 0: gather, and hand a later stage's tensors to rank 0."""
    for _, tensor in wire.stream():
        dist.send(tensor.contiguous().view(torch.uint8), dst=0)


def beside(background: Callable[[], None], foreground: Callable[[], None]) -> None:
    """Run both at the same time and raise what either raises, the background's first: it knows which server failed."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            background()
        except BaseException as error:  # a thread's end: whatever it was, the caller raises it
            failures.append(error)

    thread = threading.Thread(target=run, name="push", daemon=True)
    thread.start()
    foreground()
    thread.join()
    if failures:
        raise failures[0]
