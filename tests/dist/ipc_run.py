"""What one rank of the IPC tests does: pushes to servers made of Python that read what the ranks show; a GPU buffer is a file here."""

import hashlib
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.rollout import bucket
from jetrl_megatron.rollout.vllm_client import ServerGone
from jetrl_megatron.rollout.vllm_engine import RunGroup
from jetrl_megatron.rollout.vllm_pool import PoolCounts
from jetrl_megatron.sync import ipc
from jetrl_megatron.sync.publish import Publisher
from tests.dist.wire_run import build


ALIVE, ASLEEP, BEFORE = -1, -2, -3
"""When a server dies, where it is not at a bucket: never, before its load is called, in the first call of it."""


class FakeClient:
    """A server whose worker is on the GPU of the actor's rank `gpu`; it dies at bucket number `dies_at`."""

    def __init__(self, gpu: int, dies_at: int = ALIVE) -> None:
        self.gpu, self.dies_at, self.calls, self.held, self.told_of = gpu, dies_at, [], {}, []  # type: ignore[var-annotated]

    def rpc(self, method: str, kwargs: Any, timeout_s: float) -> list[Any]:
        told = kwargs["bucket"]
        if self.dies_at == (BEFORE if told["first"] else len(self.calls)):
            raise ServerGone("reset")
        self.calls.append((method, told["first"], told["last"]))
        self.told_of.append(kwargs.get("in_place"))
        time.sleep(0.02)  # long enough for the actor to fill another bucket
        buffer = torch.from_file(told["handles"][f"gpu {self.gpu}"], size=ipc._BUFFER_BYTES, dtype=torch.uint8)
        for name, tensor in bucket.read_bucket(told, buffer):
            self.held[name] = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        return [None]


class FakePool:
    """Loads its servers at the same time and waits for what they must hold; one that is gone is left out, as in the real one, until it is back."""

    def __init__(self, clients: list[FakeClient]) -> None:
        self.clients, self.gone, self.counts = clients, [], PoolCounts()  # type: ignore[var-annotated]
        self.expected: Any = None

    def start(self, published: Any) -> list[FakeClient]:
        return self.clients

    def update(self, published: Any, load: Any, left_out: Any) -> None:
        def work(client: FakeClient) -> None:
            try:
                if client.dies_at == ASLEEP:
                    left_out()
                    raise ServerGone("it died asleep")
                load(client, published)
            except ServerGone:
                self.gone.append(client.gpu)

        threads = [threading.Thread(target=work, args=(client,)) for client in self.clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.expected = published.expected.result(60.0)


class Passes:
    """Counts how often the tensors of a wire are gathered."""

    def __init__(self, wire: Any) -> None:
        self.number, self._stream = 0, wire.stream
        wire.stream = self.stream

    def stream(self) -> Any:
        self.number += 1
        yield from self._stream()


def publisher_of(
    hf_dir: str, root: str, tp: int, bucket_bytes: int, dies_at: int, in_place: bool = False
) -> tuple[Publisher, FakePool | None]:
    """Return what pushes to one server a rank, on this rank, and the pool on rank 0."""
    actor = build(hf_dir, tp, 1, "k_complete", "jetrl")
    group = RunGroup(60.0)
    ipc._BUFFER_BYTES = bucket_bytes
    files: dict[int, str] = {}
    numbers = itertools.count()

    def new_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
        file = str(Path(root) / f"buffer{group.rank}-{next(numbers)}")  # an address may come back: its file must not
        mapped = torch.from_file(file, shared=True, size=num_bytes, dtype=torch.uint8)
        files[mapped.data_ptr()] = file
        return mapped

    ipc.new_buffer = new_buffer
    ipc.gpu_name = lambda device: f"gpu {group.rank}"
    torch.cuda.ipc_collect = lambda: None
    ipc.show_buffer = lambda buffer: files[buffer.data_ptr()]  # type: ignore[assignment,return-value]
    pool = None
    if group.rank == 0:
        pool = FakePool([FakeClient(gpu, dies_at if gpu == 1 else ALIVE) for gpu in range(group.size)])
    transport = ipc.IpcTransport(Path(root) / "model", Path(hf_dir), group, engine_tp=1, timeout_s=10.0, in_place=in_place)
    return Publisher(actor, pool, transport, group, everywhere=True, shares_device=True), pool  # type: ignore[arg-type]


def push(hf_dir: str, root: str, tp: int, bucket_bytes: int, dies_at: int) -> Any:
    """Push to one server a rank; returns what the servers were asked and hold, on rank 0."""
    publisher, pool = publisher_of(hf_dir, root, tp, bucket_bytes, dies_at)
    passes = Passes(publisher._wire)
    version = publisher.push()
    assert passes.number == 1, "tensors are hashed in the pass in which they are sent"
    if pool is None:
        return version
    return version, pool.gone, [(client.calls, client.held) for client in pool.clients], pool.expected.by_rank


def push_in_place(hf_dir: str, root: str) -> Any:
    """Push to one server a rank that writes in place; returns on rank 0 what each bucket told each server of the model."""
    publisher, pool = publisher_of(hf_dir, root, 2, 300_000, ALIVE, in_place=True)
    publisher.push()
    return None if pool is None else [client.told_of for client in pool.clients]


def push_stale(hf_dir: str, root: str) -> Any:
    """Push, then fail while the weights are sent; returns the versions and what was raised."""
    publisher, pool = publisher_of(hf_dir, root, 1, 300_000, ALIVE)
    first = publisher.push()
    actor = publisher._actor
    actor.version = 1
    with torch.no_grad():
        actor.chunks[-1].get_submodule("decoder.layers.1.mlp.linear_fc2").weight.mul_(1.5)
    error = ""
    try:
        publisher.push()
    except RuntimeError as caught:
        error = str(caught)
    return first, publisher.version, error, None if pool is None else [len(client.calls) for client in pool.clients]


def push_without_memory(hf_dir: str, root: str) -> Any:
    """Push where there is no memory for the second buffer; returns what was raised and which threads are left."""
    publisher, _ = publisher_of(hf_dir, root, 1, 300_000, ALIVE)
    first, error = ipc.new_buffer, ""

    def new_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
        ipc.new_buffer = full  # type: ignore[assignment]
        return first(num_bytes, device)

    def full(num_bytes: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError(f"no memory for {num_bytes} bytes")

    ipc.new_buffer = new_buffer  # type: ignore[assignment]
    try:
        publisher.push()
    except RuntimeError as caught:
        error = str(caught)
    deadline = time.monotonic() + 10.0
    while (left := [t.name for t in threading.enumerate() if t is not threading.main_thread()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return error, left
