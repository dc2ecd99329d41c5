"""Weights from GPU to GPU by NCCL, through vLLM's weight-transfer API, to pools on other GPUs than the actor's.

Enters: the stage wires. Leaves: verified servers, and no weights on a disk: a server that comes back starts on random ones, stays blank,
and gets the current ones by a push before its first request. Small tensors travel packed, scales with codes, in large buffers.

Rank 0 broadcasts to all engine ranks; with pipeline stages their leaders hand their tensors to rank 0 first, because the API knows
one sender. A server that dies in the middle of a broadcast blocks it: that push does not come back, unlike one over `disk`.
Needs CUDA and vLLM 0.26 (tests/gpu/test_push.py has a test for every way of a push); on a CPU vLLM's sender is replaced (tests/dist).
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
from jetrl_megatron.rollout.fingerprint import algorithm_for
from jetrl_megatron.rollout.laps import Laps
from jetrl_megatron.rollout.published import Expected, Published
from jetrl_megatron.rollout.vllm_client import EngineClient
from jetrl_megatron.rollout.vllm_engine import RunGroup
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.sync.transport import StageRecord, check_sent, engine_config, merge_shares, write_model_files
from jetrl_megatron.sync.wire import StageWire

_BUFFER_BYTES = 512 * 2**20
_MADE_TOGETHER, _MADE_BYTES = 32, 64 * 2**20
"""Tensors that are made before one is handed to vLLM's sender, until they have so many bytes: what is made waits in memory."""


class MemoryTransport:
    """What NCCL and IPC have in common: a model directory without weights, and one pass in which every tensor is sent and hashed.

    Servers are started and told names before the bytes; what they must hold comes behind the last byte, before the pool verifies it.
    """

    def __init__(self, root: Path, source_dir: Path, group: RunGroup, *, engine_tp: int, timeout_s: float, in_place: bool = False) -> None:
        """root: gets config and tokenizer. source_dir: the run's HF directory. group: all ranks. engine_tp: of the servers.

        in_place: the servers write into their parameters (rollout/vllm_in_place.py), for which they are told the model.
        """
        self._root, self._source_dir, self._group = root, source_dir, group
        self._engine_tp, self._timeout_s, self._in_place = engine_tp, timeout_s, in_place
        self._config: dict[str, Any] = {}

    def _engine_config(self, wire: StageWire) -> dict[str, Any]:
        """Return the engines' config.json, made from the run's at the first push."""
        self._config = self._config or engine_config(wire.arch, wire.fp8, self._source_dir)
        return self._config

    def _start(self, wire: StageWire, pool: ServerPool, step: int, laps: Laps) -> tuple[Published, list[EngineClient]]:
        """On rank 0: check the names, start what does not run, and tell the other ranks, which wait in `_started`, whether to send.

        They take no memory before a booting server has measured what is left.
        """
        started = False
        try:
            check_sent(wire, [name for _, names in wire.stages() for name in names], step)
            if not (self._root / "config.json").is_file():
                write_model_files(self._root, self._engine_config(wire), self._source_dir)
            published = Published(step=step, directory=self._root, has_weights=False, algorithm=algorithm_for(wire.device))
            clients = pool.start(published)
            laps.lap("boot")
            self._join(clients, laps)
            started = True
        finally:
            self._group.from_first(started)
        return published, clients

    def _started(self) -> bool:
        """On the other ranks: wait for rank 0 and return whether to send."""
        return bool(self._group.from_first(None))

    def _join(self, clients: list[EngineClient], laps: Laps) -> None:
        """Make ready to send to these servers."""

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
        """Broadcast while every server receives; each stage's leader hashes what it sends. See `Transport.push`."""
        record = StageRecord(wire, self._engine_tp)
        stream = record.watch(wire.stream())
        if pool is None:
            if self._started():
                if wire.replica == 0:
                    _send_to_first(stream)
                self._group.to_first(record.share() if wire.replica == 0 and wire.receives else None)
            return None
        published, _ = self._start(wire, pool, step, laps)
        described, order = wire.described(), [name for _, names in wire.stages() for name in names]
        update = {
            "names": order,
            "dtype_names": [described[name][0] for name in order],
            "shapes": [list(described[name][1]) for name in order],
            "packed": True,
            "packed_buffer_size_bytes": _BUFFER_BYTES,
        }
        if self._in_place:
            update["config"] = self._engine_config(wire)

        def load(client: EngineClient, _: Published) -> None:
            client.control("/start_weight_update", None, self._timeout_s)
            client.control("/update_weights", {"update_info": update}, self._timeout_s)
            client.control("/finish_weight_update", None, self._timeout_s)

        def send() -> Expected:
            tensors, share = _from_stages(wire, stream), None
            try:
                self._broadcast(wire, tensors)
                share = record.share()
            finally:
                for _ in tensors:  # where the sender broke off: the other ranks are in the middle of a gather, or wait to hand theirs over
                    pass
                shares = self._group.to_first(share)
            assert shares is not None
            return merge_shares(wire, [share for share in shares if share is not None], step)

        beside(lambda: pool.update(published, load), lambda: published.settle(send))
        return published.expected.result().version

    def _broadcast(self, wire: StageWire, tensors: Iterator[tuple[str, Tensor]]) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        arguments = {"group": self._communicator, "packed": True, "packed_buffer_size_bytes": _BUFFER_BYTES}
        NCCLWeightTransferEngine.trainer_send_weights(made_on(torch.cuda.current_stream(wire.device), tensors), arguments)
        torch.cuda.synchronize()

    def _join(self, clients: list[EngineClient], laps: Laps) -> None:
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
        laps.lap("join")


def _from_stages(wire: StageWire, own: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """On rank 0: its own stage's tensors, then those of the other stages' leaders, in the order of the stages."""
    yield from own
    described = wire.described()
    for leader, names in wire.stages()[1:]:
        for name in names:
            dtype, shape = described[name]
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=wire.device)
            dist.recv(tensor.view(torch.uint8), src=leader)
            yield name, tensor


def made_on(home: torch.cuda.Stream, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Make every tensor of `stream` on the CUDA stream `home`, whichever is current where it is taken; that one waits for it.

    vLLM's sender takes tensors on two CUDA streams in turn. The weights and their hashes belong to `home`, and a gathered bucket outlives a
    turn: its bytes, put there on one, would be read on the other, and its memory be used again, with nothing in between that waits. Small
    tensors are made several at a time, because changing streams and waiting cost the host more than the tensors do.
    """
    while made := _made_together(home, stream):
        waiting: list[torch.cuda.Stream] = []
        for name, tensor in made:
            taker = torch.cuda.current_stream(home.device)
            if taker not in waiting:
                taker.wait_stream(home)
                waiting.append(taker)
            tensor.record_stream(taker)
            yield name, tensor


def _made_together(home: torch.cuda.Stream, stream: Iterator[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Take tensors on `home` until they are enough for one wait; an empty list at the end."""
    made: list[tuple[str, Tensor]] = []
    num_bytes = 0
    with torch.cuda.stream(home):
        while len(made) < _MADE_TOGETHER and num_bytes < _MADE_BYTES:
            item = next(stream, None)
            if item is None:
                break
            made.append(item)
            num_bytes += item[1].nbytes
    return made


def _send_to_first(stream: Iterator[tuple[str, Tensor]]) -> None:
    """On the ranks of the first replica but rank 0: gather, and hand a later stage's tensors to rank 0."""
    for _, tensor in stream:
        dist.send(tensor.contiguous().view(torch.uint8), dst=0)


def beside(background: Callable[[], None], foreground: Callable[[], None]) -> None:
    """Run both at the same time. Raises what the background raised, which knows which server failed, where the foreground came to its end.

    Raises what the foreground raised at once: a server may wait for bytes that do not come, until its own time is over.
    """
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
