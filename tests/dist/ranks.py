"""Run a function on N processes of this machine with gloo, and bring back what each returned."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 600


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(function: Callable[..., Any], num_processes: int, *args: Any) -> list[Any]:
    """Call `function(*args)` in `num_processes` fresh processes with the launcher's environment; returns the results by rank.

    The function must be importable by name. A process that fails ends the test with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call.pkl"
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(num_processes),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        logs = [open(Path(folder) / f"log{rank}", "w+b") for rank in range(num_processes)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.dist.ranks", str(call), str(Path(folder) / f"out{rank}.pkl")],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
            )
            for rank in range(num_processes)
        ]
        try:
            codes = [p.wait(timeout=_TIMEOUT_S) for p in processes]
        finally:
            for p in processes:
                p.kill()
        for rank, code in enumerate(codes):
            logs[rank].seek(0)
            output = logs[rank].read().decode(errors="replace")[-6000:]
            logs[rank].close()
            assert code == 0, f"rank {rank} of {num_processes} left with code {code}:\n{output}"
        return [pickle.loads((Path(folder) / f"out{rank}.pkl").read_bytes()) for rank in range(num_processes)]


def _main(call: str, out: str) -> None:
    import importlib

    import torch

    torch.set_num_threads(1)
    module, name, args = pickle.loads(Path(call).read_bytes())
    result = getattr(importlib.import_module(module), name)(*args)
    Path(out).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
