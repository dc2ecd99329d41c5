"""Weights from GPU to GPU through vLLM's weight-transfer API: NCCL to pools on other GPUs, CUDA IPC to servers on the actor's own.

Enters: the stage wires. Leaves: verified servers, and no weights on a disk: a server that comes back starts on random ones, stays blank,
and gets the current ones by a push before its first request. Small tensors travel packed, scales with codes, in large buffers.

NCCL: rank 0 broadcasts to all engine ranks; with pipeline stages their leaders hand their tensors to rank 0 first, because the API knows
one sender. A server that dies in the middle of a broadcast blocks it: that push does not come back, unlike one over `disk`.
IPC: each actor rank gathers whole tensors over its TP group and shows them to the engine rank on its own GPU; it needs pp = 1.
Needs CUDA and vLLM 0.26. NCCL has run from one GPU to another with every push verified; see results/LOG.md for what has run.
"""

import base64
import pickle
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
from jetrl_megatron.rollout.published import Published
from jetrl_megatron.rollout.vllm_client import EngineClient
from jetrl_megatron.rollout.vllm_engine import RunGroup
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.sync.transport import Share, StageRecord, engine_config, merge_shares, write_model_files
from jetrl_megatron.sync.wire import StageWire

_BUFFER_BYTES = 512 * 2**20


class _MemoryTransport:
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


class NcclTransport(_MemoryTransport):
    """Transport over one NCCL group of rank 0 and every engine rank of the pool."""

    _communicator: Any = None
    _members: tuple[str, ...] = ()

    def close(self) -> None:
        """Leave the group; before the servers end, because a process that still holds it does not come to its end."""
        if self._communicator is not None:
            self._communicator.destroy()
        self._communicator, self._members = None, ()

    def push(self, wire: StageWire, pool: ServerPool | None, step: int) -> WeightVersion | None:
        """Broadcast while every server receives. See `Transport.push`."""
        shares = self._group.to_first(self._hash(wire) if wire.replica == 0 else None)
        if pool is None:
            if wire.replica == 0:
                _send_to_first(wire)
            return None
        assert shares is not None
        published = self._published(wire, [s for s in shares if s is not None], step)
        clients = pool.start(published)
        self._join(clients)
        names, dtypes, shapes = _described(wire, shares)
        update = {"names": names, "dtype_names": dtypes, "shapes": shapes, "packed": True, "packed_buffer_size_bytes": _BUFFER_BYTES}

        def load(client: EngineClient, _: Published) -> None:
            client.control("/start_weight_update", None, self._timeout_s)
            client.control("/update_weights", {"update_info": update}, self._timeout_s)
            client.control("/finish_weight_update", None, self._timeout_s)

        def broadcast() -> None:
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            arguments = {"group": self._communicator, "packed": True, "packed_buffer_size_bytes": _BUFFER_BYTES}
            NCCLWeightTransferEngine.trainer_send_weights(_from_stages(wire), arguments)
            torch.cuda.synchronize()

        _beside(lambda: pool.update(published, load), broadcast)
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


class IpcTransport(_MemoryTransport):
    """Transport by CUDA IPC to one server whose ranks run on the actor's GPUs."""

    def push(self, wire: StageWire, pool: ServerPool | None, step: int) -> WeightVersion | None:
        """Show every bucket to the server on the same GPU. See `Transport.push`.

        Raises ValueError where the actor has pipeline stages or replicas: then no rank holds everything, or several servers would be
        needed.
        """
        if wire.num_stages > 1 or wire.num_replicas > 1:
            raise ValueError("rollout.vllm.transport=ipc needs parallel.pp=1 and one data-parallel replica; use nccl or disk")
        shares = self._group.to_first(self._hash(wire))
        clients: list[EngineClient] = []
        published: Published | None = None
        if pool is not None:
            assert shares is not None
            published = self._published(wire, shares[:1], step)
            clients = pool.start(published)
        if self._group.from_first(len(clients)) != 1:
            raise ValueError("rollout.vllm.transport=ipc needs exactly one server; set rollout.vllm.servers=1")
        if pool is None:
            self._show(wire, None)
            return None
        assert published is not None

        def load(client: EngineClient, _: Published) -> None:
            client.control("/start_weight_update", None, self._timeout_s)
            self._show(wire, client)
            client.control("/finish_weight_update", None, self._timeout_s)

        pool.update(published, load)
        return published.version

    def _show(self, wire: StageWire, client: EngineClient | None) -> None:
        """Run vLLM's own sender on every rank; rank 0 passes each chunk's handles on with the run's key."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        def post(info: Any) -> None:
            assert client is not None
            fields = {"names": info.names, "dtype_names": info.dtype_names, "shapes": info.shapes, "packed": info.packed}
            fields["tensor_sizes"] = info.tensor_sizes
            fields["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(info.ipc_handles)).decode()
            client.control("/update_weights", {"update_info": fields}, self._timeout_s)

        torch.cuda.set_device(wire.device)
        arguments = {"send_mode": post, "packed": True, "packed_buffer_size_bytes": _BUFFER_BYTES}
        IPCWeightTransferEngine.trainer_send_weights(wire.stream(), arguments)


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


def _send_to_first(wire: StageWire) -> None:
    """On the ranks of the first replica but rank 0: gather, and hand a later stage's tensors to rank 0."""
    for _, tensor in wire.stream():
        dist.send(tensor.contiguous().view(torch.uint8), dst=0)


def _beside(background: Callable[[], None], foreground: Callable[[], None]) -> None:
    """Run both at the same time and raise what either raises, the background's first: it knows which server failed."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            background()
        except (ValueError, RuntimeError) as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="push", daemon=True)
    thread.start()
    foreground()
    thread.join()
    if failures:
        raise failures[0]
