"""What one rank of the NCCL tests does: pushes to servers made of Python, with a sender that keeps what it is given."""

import hashlib
import sys
import threading
import types
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.rollout.vllm_engine import RunGroup
from jetrl_megatron.rollout.vllm_pool import PoolCounts
from jetrl_megatron.sync import cuda
from jetrl_megatron.sync.publish import Publisher
from tests.dist.ipc_run import Passes
from tests.dist.wire_run import build


class Sender:
    """vLLM's NCCLWeightTransferEngine as the actor sees it."""

    sent: list[Any] = []  # noqa: RUF012  (one push a process)
    asked = threading.Event()
    breaks_at = -1

    @staticmethod
    def trainer_init(info: Any) -> Any:
        return types.SimpleNamespace(destroy=lambda: None)

    @classmethod
    def trainer_send_weights(cls, tensors: Any, arguments: Any) -> None:
        assert cls.asked.wait(60.0), "the servers are told names before the bytes"
        for number, (name, tensor) in enumerate(tensors):
            if number == cls.breaks_at:
                raise RuntimeError(f"no memory for {name}")
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            cls.sent.append((name, (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest())))


class Client:
    """A server's other end."""

    def __init__(self, url: str) -> None:
        self.url, self.routes, self.update = url, [], {}  # type: ignore[var-annotated]

    def control(self, route: str, body: Any, timeout_s: float) -> None:
        self.routes.append(route)
        if route == "/update_weights":
            self.update = body["update_info"]
            Sender.asked.set()


class FakePool:
    """Loads its servers, then waits for what they must hold."""

    def __init__(self, refusal: str) -> None:
        self.clients, self.counts, self.refusal = [Client("http://a"), Client("http://b")], PoolCounts(), refusal
        self.expected: Any = None

    def start(self, published: Any) -> list[Client]:
        if self.refusal:
            raise RuntimeError(self.refusal)
        return self.clients

    def update(self, published: Any, load: Any) -> None:
        for client in self.clients:
            load(client, published)
        self.expected = published.expected.result(60.0)


def push(hf_dir: str, root: str, tp: int, pp: int, refusal: str = "", breaks_at: int = -1, in_place: bool = False) -> Any:
    """Push once; returns on rank 0 what was announced, sent and asked, and on others the version; the error, where it fails.

    refusal: with which the pool does not start. breaks_at: the sender fails at this tensor. in_place: the servers' engine wants the model.
    """
    Sender.breaks_at = breaks_at
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.distributed.weight_transfer.nccl_engine"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["vllm.distributed.weight_transfer.nccl_engine"].NCCLWeightTransferEngine = Sender  # type: ignore[attr-defined]
    cuda.made_on = lambda home, stream: stream
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    actor = build(hf_dir, tp, pp, "k_complete", "jetrl")
    group = RunGroup(60.0)
    pool = FakePool(refusal) if group.rank == 0 else None
    transport = cuda.NcclTransport(Path(root) / "model", Path(hf_dir), group, engine_tp=1, timeout_s=10.0, in_place=in_place)
    publisher = Publisher(actor, pool, transport, group)  # type: ignore[arg-type]
    passes = Passes(publisher._wire)
    try:
        version = publisher.push()
    except RuntimeError as error:
        assert passes.number <= (0 if refusal else 1) and publisher.version is None
        return str(error)
    assert passes.number == (1 if publisher._wire.replica == 0 else 0), "tensors are hashed in the pass in which they are sent"
    if pool is None:
        return version
    return version, pool.expected, pool.clients[0].update, Sender.sent, [client.routes for client in pool.clients]
