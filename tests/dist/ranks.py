"""Run a function on N processes of this machine, and bring back what each returned."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 900


def on_shared_gpu(host: str) -> dict[str, str]:
    """Return the environment in which NCCL joins this process with others on the same GPU: each has to be another `host`.

    NCCL refuses one GPU twice on one host, so that it is told of several, between which it goes through the loopback interface. Slow, and
    the same collectives.
    """
    return {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}


def run_ranks(
    function: Callable[..., Any], num_processes: int, *args: Any, shared_gpu: bool = False, timeout_s: float = _TIMEOUT_S
) -> list[Any]:
    """Call `function(*args)` in `num_processes` fresh processes with the launcher's environment; returns the results by rank.

    shared_gpu: all of them run on the first GPU. The function must be importable by name. A process that fails ends the test with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call.pkl"
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        # The rendezvous lives here, on a port that the system chose: no two tests can take the same one.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(num_processes),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        logs = [Path(folder) / f"log{rank}" for rank in range(num_processes)]
        places: list[dict[str, str]] = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]
        if shared_gpu:
            places = [place | {"LOCAL_RANK": "0"} | on_shared_gpu(f"rank{place['RANK']}") for place in places]
        processes = [
            _start(call, Path(folder) / f"out{rank}.pkl", env | place, log) for rank, (place, log) in enumerate(zip(places, logs, strict=True))
        ]
        try:
            _wait(processes, logs, timeout_s)
        finally:
            for p in processes:
                p.kill()
                p.wait()
        return [pickle.loads((Path(folder) / f"out{rank}.pkl").read_bytes()) for rank in range(num_processes)]


def _start(call: Path, out: Path, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.dist.ranks", str(call), str(out)],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=_ROOT,
        )


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path], timeout_s: float) -> None:
    """Wait for all; the first that fails ends the wait, since the others may wait for it in a collective for ever."""
    deadline = time.monotonic() + timeout_s
    while any(p.poll() is None for p in processes):
        failed = [rank for rank, p in enumerate(processes) if p.poll()]
        if failed or time.monotonic() > deadline:
            time.sleep(2.0)  # the last words of the others
            break
        time.sleep(0.1)
    codes = [p.poll() for p in processes]
    if any(code != 0 for code in codes):
        output = "\n".join(f"--- rank {rank}\n{log.read_text(errors='replace')[-6000:]}" for rank, log in enumerate(logs))
        raise AssertionError(f"ranks left with codes {codes} (None: still running):\n{output}")


def _main(call: str, out: str) -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    module, name, args = pickle.loads(Path(call).read_bytes())
    result = getattr(importlib.import_module(module), name)(*args)
    Path(out).write_bytes(pickle.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # a thread of a group that is left over can abort the process at its end


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
