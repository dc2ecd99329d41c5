"""The recipe's section `rollout.vllm`: engine servers, and how weights get to them. Import it from `config.py`."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from jetrl_megatron.choices import (
    Transport,
    WeightLoad,
    above,
    at_least,
    within,
)

MAX_NUM_SEQS = 2**20
MIN_KV_CACHE_GIB, MAX_KV_CACHE_GIB = 2**-10, 2**20
"""A MiB and a PiB: vLLM takes 0 bytes for no size."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """The servers of `rollout.engine=vllm_pool` and `vllm_colocated`, and how weights get to them."""

    servers: int | None = None
    """Started by the run; None is 1, or under `vllm_colocated` one for each data-parallel replica. 0 where `urls` names all of them."""
    tp: int = 1
    """Tensor-parallel degree of each server."""
    urls: tuple[str, ...] = ()
    """Servers that somebody else started with the run's key (JETRL_ENGINE_KEY) and that see the run's file system."""
    gpus: tuple[str, ...] = ()
    """For each server its CUDA_VISIBLE_DEVICES, as `4` or `4,5`; empty takes those behind the actor's."""
    transport: Transport | None = None
    """None is disk, or under `vllm_colocated` on CUDA ipc."""
    load: WeightLoad = WeightLoad.reload
    """in_place takes transport nccl or ipc."""
    weights_dir: str = ""
    """Where the disk transport writes; empty is in the run directory. A memory file system is faster."""
    max_num_seqs: int = 128
    """Sequences that one server decodes together, and requests it is given at a time."""
    gpu_memory_utilization: float = 0.85
    """Share of each GPU that must be free at the start, and that the server then takes unless `kv_cache_gib` is given; under
    `vllm_colocated` while the server is awake, with the actor's memory beside it."""
    kv_cache_gib: float | None = None
    """Of each GPU of a server, or of a server on a CPU. None: what `gpu_memory_utilization` leaves, which a server measures while it
    starts; what others take on its GPU in that time counts against it. With a size given, servers that share a GPU can start at once."""
    cuda_graphs: bool = True
    prefix_caching: bool = True
    start_timeout_s: float = 900.0
    push_timeout_s: float = 600.0
    request_timeout_s: float = 3600.0
    max_repeats: int = 3
    """How often one request may be sent again after a server was gone."""
    max_restarts: int = 5
    """Of one server, over the whole run."""

    def __post_init__(self) -> None:
        """Check ranges, and that each server has its GPUs."""
        at_least("rollout.vllm.servers", self.num_servers, 0)
        at_least("rollout.vllm.tp", self.tp, 1)
        within("rollout.vllm.max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        for name in ("max_repeats", "max_restarts"):
            at_least(f"rollout.vllm.{name}", getattr(self, name), 0)
        for name in ("start_timeout_s", "push_timeout_s", "request_timeout_s"):
            above(f"rollout.vllm.{name}", getattr(self, name), 0.0)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"rollout.vllm.gpu_memory_utilization is {self.gpu_memory_utilization}; it must lie in (0, 1]")
        if self.kv_cache_gib is not None:
            within("rollout.vllm.kv_cache_gib", self.kv_cache_gib, MIN_KV_CACHE_GIB, MAX_KV_CACHE_GIB)
            if self.num_servers == 0:
                raise ValueError(
                    f"rollout.vllm.kv_cache_gib is {self.kv_cache_gib} and rollout.vllm.servers is 0: servers of rollout.vllm.urls were "
                    "started with a size of their own; remove the key"
                )
        if self.num_servers + len(self.urls) < 1:
            raise ValueError("rollout.vllm.servers is 0 and rollout.vllm.urls is empty; there must be at least one server")
        if self.load is WeightLoad.in_place and self.transport is Transport.disk:
            raise ValueError(
                "rollout.vllm.load is in_place and rollout.vllm.transport is disk, from where vLLM reloads: set rollout.vllm.transport="
                "nccl (ipc where servers are colocated), or rollout.vllm.load=reload"
            )
        if self.gpus and len(self.gpus) != self.num_servers:
            raise ValueError(
                f"rollout.vllm.gpus has {len(self.gpus)} entries for rollout.vllm.servers={self.num_servers}; give one for each server"
            )
        for gpus in self.gpus:
            if len(gpus.split(",")) != self.tp:
                raise ValueError(f"rollout.vllm.gpus gives a server {gpus!r} and rollout.vllm.tp is {self.tp}; name {self.tp} for each")
        addresses = [_address(url) for url in self.urls]
        for url, address in zip(self.urls, addresses, strict=True):
            if addresses.count(address) > 1:
                raise ValueError(f"rollout.vllm.urls names {url} and its port more than once; name every server once")

    @property
    def num_servers(self) -> int:
        """Servers that a pool starts."""
        return 1 if self.servers is None else self.servers

    def check_colocated(self) -> None:
        """Raise ValueError for a key that contradicts servers on the actor's own GPUs."""
        if self.urls or self.gpus:
            key, value = ("urls", self.urls) if self.urls else ("gpus", self.gpus)
            raise ValueError(
                f"rollout.vllm.{key} is {list(value)} and rollout.engine is vllm_colocated, whose servers the run starts on the actor's "
                f"own GPUs: remove rollout.vllm.{key}, or use rollout.engine=vllm_pool"
            )
        if self.transport is Transport.nccl:
            raise ValueError(
                "rollout.vllm.transport is nccl and rollout.engine is vllm_colocated: NCCL cannot join two processes on one GPU; use ipc "
                "or disk, or rollout.engine=vllm_pool"
            )


def _address(url: str) -> tuple[str, int]:
    """Return host and port of a server; raises ValueError for what is no such address, or has more to it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or url.rstrip("/") != f"http://{parts.netloc}" or parts.username is not None:
        raise ValueError(f"rollout.vllm.urls names {url!r}; an engine server is http://HOST:PORT, without a path, and speaks no TLS")
    return host, port
