"""One vLLM server process: its command line, its environment, its start and its end.

Enters: `ServerSpec` (how every server of the run is started), a model directory. Leaves: a running server that answers only with the run's
key, on the interface that was named (loopback by default), logging into the run directory, and dying with the run (vllm_guard.py).
The key is in the server's environment, never on a command line or in a log. Each start has a port of its own choice and a log file of its
own, also when the run is started again in its directory.
"""

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.compat import (
    device_arguments,
    engine_environment,
    engine_numerics,
    request_fields,
    server_module,
    vllm_version,
)
from jetrl_megatron.rollout.vllm_auth import KEY_VARIABLE
from jetrl_megatron.rollout.vllm_client import EngineClient
from jetrl_megatron.rollout.vllm_plugin import IN_PLACE

_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "SBATCH_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JETRL_LAUNCHER_PID")
_LOG_TAIL_CHARS = 1500
_ERROR = re.compile(r" ERROR .*?(\b\w+(?:Error|Exception): .*)")
_PORT_ATTEMPTS, _PORT_TAKEN = 3, "Address already in use"
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_WORKER = "jetrl_megatron.rollout.vllm_worker.WeightReader"


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How a run starts its servers."""

    tp: int
    max_model_len: int
    max_num_seqs: int
    gpu_memory_utilization: float
    kv_cache_gib: float | None = None
    """Of each GPU, or on a CPU of the server; None: what the GPU's share leaves, or on a CPU 1."""
    cuda_graphs: bool
    prefix_caching: bool
    transport: str
    """`disk`, `nccl` or `ipc`."""
    in_place: bool = False
    """Whether weights are written into the model's parameters (vllm_in_place.py), not given to its loader; nccl needs an engine for it."""
    power_of_two_scales: bool
    on_cuda: bool
    log_dir: Path
    start_timeout_s: float
    sleeps: bool = False
    """Whether it releases its GPU memory while it sleeps."""
    host: str = "127.0.0.1"
    worker: str = _WORKER
    """Class that vLLM mixes into its workers: that one, or one that derives from it."""


def new_key() -> str:
    """Return a key for one run: 256 random bits as text."""
    return secrets.token_urlsafe(32)


def server_command(spec: ServerSpec, model_dir: Path, port: int, with_weights: bool) -> list[str]:
    """Return the command line of a server.

    model_dir: config and tokenizer, and the weights where `with_weights`; without them the server starts on dummies that a push replaces.
    """
    words = [sys.executable, "-m", server_module(), "--model", str(model_dir), "--served-model-name", "policy"]
    words += ["--host", spec.host, "--port", str(port), "--seed", "0"]
    words += ["--tensor-parallel-size", str(spec.tp), "--max-model-len", str(spec.max_model_len)]
    words += ["--max-num-seqs", str(spec.max_num_seqs), "--gpu-memory-utilization", str(spec.gpu_memory_utilization)]
    if spec.kv_cache_gib is not None:
        words += ["--kv-cache-memory-bytes", str(int(spec.kv_cache_gib * 2**30))]
    for name, value in engine_numerics(spec.on_cuda, spec.max_num_seqs if spec.cuda_graphs else 0).items():
        words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    words += ["--max-logprobs", "1", "--tokens-only"]  # no tokenizer is loaded; 0.30 has the route for token ids behind it
    words += ["--middleware", "jetrl_megatron.rollout.vllm_auth.RequireKey"]
    words += ["--worker-extension-cls", spec.worker]
    words += ["--disable-uvicorn-access-log", "--no-enable-log-requests"]
    words += ["--enable-prefix-caching" if spec.prefix_caching else "--no-enable-prefix-caching"]
    words += [] if with_weights else ["--load-format", "dummy"]
    words += device_arguments(spec.on_cuda, spec.sleeps)
    if spec.transport == "nccl":
        words += ["--weight-transfer-config", json.dumps({"backend": IN_PLACE if spec.in_place else "nccl"})]
    return words if spec.cuda_graphs else [*words, "--enforce-eager"]


def server_environment(spec: ServerSpec, key: str, gpus: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server: the run's own, without its launcher's variables, with the key and the engine's switches.

    gpus: value of CUDA_VISIBLE_DEVICES, empty where there are none.
    """
    kept = {k: v for k, v in base.items() if k not in _LAUNCHER_NAMES and not k.startswith(_LAUNCHER_PREFIXES)}
    switches = {
        KEY_VARIABLE: key,
        "VLLM_SERVER_DEV_MODE": "1",  # the weight-update routes; RequireKey stands before them
        "VLLM_HOST_IP": spec.host,
        "VLLM_LOGGING_LEVEL": kept.get("VLLM_LOGGING_LEVEL", "INFO"),
        **engine_environment(spec.on_cuda, spec.power_of_two_scales),
    }
    if "VLLM_DEEP_GEMM_WARMUP" in kept:  # a user may have kernels compiled at the start, not in the first rollouts: the same kernels
        switches["VLLM_DEEP_GEMM_WARMUP"] = kept["VLLM_DEEP_GEMM_WARMUP"]
    if gpus:
        switches["CUDA_VISIBLE_DEVICES"] = gpus
    cpu_gib = kept.pop("VLLM_CPU_KVCACHE_SPACE", "1")
    if not spec.on_cuda and spec.kv_cache_gib is None:  # vLLM would take it before the size on the command line
        switches["VLLM_CPU_KVCACHE_SPACE"] = cpu_gib
    return kept | switches


class VllmServer:
    """One server that this process has started.

    number: its place in the pool, in names of log files. spec, key: of the run. gpus: CUDA_VISIBLE_DEVICES, empty on a CPU.
    """

    def __init__(self, number: int, spec: ServerSpec, key: str, gpus: str = "") -> None:
        """Start nothing yet."""
        self.number, self._spec, self._key, self._gpus = number, spec, key, gpus
        self._guard: subprocess.Popen[str] | None = None
        self._start_number = 0
        self._stopping = threading.Lock()
        """Held by `stop`: the thread that brings a server back may stop it while the pool closes."""
        self.pid = 0
        """Of the server's first process, 0 before the start."""
        self.client: EngineClient | None = None

    @property
    def log_file(self) -> Path:
        """Where the server of the latest start writes."""
        return self._spec.log_dir / f"server{self.number}-start{self._start_number}.log"

    def start(self, model_dir: Path, with_weights: bool) -> EngineClient:
        """Start the server and wait until it is healthy; once more where somebody else took its port in the meantime.

        Raises RunFailure with the end of its log where it dies or takes longer than start_timeout_s.
        """
        for attempt in range(_PORT_ATTEMPTS):
            try:
                return self._start_once(model_dir, with_weights)
            except RuntimeError as error:
                if _PORT_TAKEN not in str(error) or attempt + 1 == _PORT_ATTEMPTS:
                    raise
        raise AssertionError("the loop above returns or raises")

    def _start_once(self, model_dir: Path, with_weights: bool) -> EngineClient:
        self.stop()
        port = _free_port(self._spec.host)
        words = [sys.executable, "-m", "jetrl_megatron.rollout.vllm_guard", *server_command(self._spec, model_dir, port, with_weights)]
        environment = server_environment(self._spec, self._key, self._gpus, os.environ)
        with self._new_log() as log:
            self._guard = subprocess.Popen(
                words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        assert self._guard.stdout is not None
        self.pid = int(self._guard.stdout.readline() or 0)
        self.client = EngineClient(url=f"http://{self._spec.host}:{port}", key=self._key, fields=request_fields(vllm_version()))
        self._wait_until_healthy(self.client)
        self.client.rpc("jetrl_prepare", {}, self._spec.start_timeout_s)
        return self.client

    def _new_log(self) -> BinaryIO:
        """Create the log of the next start: the first number that no start in this run directory has taken, this process's or another's."""
        self._spec.log_dir.mkdir(parents=True, exist_ok=True)
        while True:
            self._start_number += 1
            try:
                return self.log_file.open("xb")
            except FileExistsError:
                continue

    def _wait_until_healthy(self, client: EngineClient) -> None:
        deadline = time.monotonic() + self._spec.start_timeout_s
        while not client.healthy():
            if not self.alive or time.monotonic() > deadline:
                cause = "ended while starting" if not self.alive else f"was not up after {self._spec.start_timeout_s:g} s"
                self.stop()
                raise RunFailure(
                    f"engine server {self.number} {cause}{self._first_error()}; the end of {self.log_file}:\n{self.log_tail()}"
                )
            time.sleep(0.5)

    @property
    def alive(self) -> bool:
        """Whether the process runs (it may still be deaf)."""
        guard = self._guard  # another thread may stop it between two looks
        return guard is not None and guard.poll() is None

    def log_tail(self) -> str:
        """Return the end of the log."""
        return self.log_file.read_text(errors="replace")[-_LOG_TAIL_CHARS:] if self.log_file.is_file() else ""

    def _first_error(self) -> str:
        """Return the first error of the log: what comes behind it, in other processes, only says that there was one."""
        text = self.log_file.read_text(errors="replace") if self.log_file.is_file() else ""
        found = _ERROR.search(text)
        return f" ({found[1]})" if found else ""

    def stop(self) -> None:
        """End the server and everything it has started; nothing happens where none runs."""
        with self._stopping:
            if self._guard is None:
                return
            assert self._guard.stdin is not None and self._guard.stdout is not None
            self._guard.stdin.close()  # the guard kills the server's session
            self._guard.wait(timeout=30.0)
            self._guard.stdout.close()
            self._guard, self.pid = None, 0


def _free_port(host: str) -> int:
    """Return a port that is free now, outside the range from which systems give ports away, since the server binds it much later."""
    while True:
        port = _FIRST_PORT + secrets.randbelow(_NUM_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
