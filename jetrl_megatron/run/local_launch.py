"""One process a rank on this machine, for a command that was not started by torchrun or Slurm.

Enters: the command line and a number of processes. Leaves: the exit code of the run. This process serves the rendezvous store on a port
that the system chose (so no two runs can clash), passes SIGTERM on, and ends every worker when one dies, naming it. A worker dies with this
process, even when it is killed with SIGKILL: no orphan goes on writing into the run directory.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from jetrl_megatron.run.early_stop import STOPPED_EARLY

_LAUNCHER = "JETRL_LAUNCHER_PID"
_LAST_WORDS_S = 3.0
"""After one worker died: time for the others to print their own errors."""
_PR_SET_PDEATHSIG = 1


def under_launcher(variables: Mapping[str, str]) -> bool:
    """Say whether somebody has given this process its rank already (torchrun, or this launcher)."""
    return "RANK" in variables and "WORLD_SIZE" in variables


def slurm_rank(variables: Mapping[str, str]) -> dict[str, str]:
    """Translate what `srun` says about this task into RANK and its kin; empty where this is not one of several Slurm tasks.

    Raises ValueError when the rendezvous address, which Slurm does not give, is missing.
    """
    if "SLURM_PROCID" not in variables or int(variables.get("SLURM_NTASKS", "1")) < 2:
        return {}
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables]
    if missing:
        raise ValueError(
            f"this is task {variables['SLURM_PROCID']} of srun, but {', '.join(missing)} is not set; export it in the job script"
        )
    return {
        "RANK": variables["SLURM_PROCID"],
        "WORLD_SIZE": variables["SLURM_NTASKS"],
        "LOCAL_RANK": variables.get("SLURM_LOCALID", "0"),
    }


def die_with_launcher() -> None:
    """In a worker: ask the system to end this process when its launcher ends, however that happens. No effect without a launcher."""
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is None:
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(launcher):
        os._exit(1)  # it had died before the line above


def threads_per_process(num_processes: int) -> int:
    """Share the cores that this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def launch(command: list[str], num_processes: int, grace_s: float, *, resumes: bool = True) -> int:
    """Run `command` once a rank and wait for all.

    command: program and arguments. grace_s: the workers' own grace time after SIGTERM; this process waits ten seconds longer. resumes:
    whether another start goes on from what the workers have saved; else they have no handler for a signal.
    Gives 0 when all workers gave 0 or were told to stop while starting, else the first failing worker's exit code, 1 for one that a
    signal ended.
    """
    workers: list[subprocess.Popen[bytes]] = []
    stop_asked_s: list[float] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stop_asked_s.append(time.monotonic())
        for worker in workers:
            worker.send_signal(signal.SIGTERM)

    old = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        store, shared = _rendezvous(num_processes)
        for rank in range(num_processes):
            if stop_asked_s:
                break
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A session of its own: Ctrl-C reaches this process only, which passes it on once. Rank 0 alone owns standard output.
            output = None if rank == 0 else sys.stderr
            workers.append(subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True))
        if not workers:
            _say(STOPPED_EARLY)
            return 0
        if stop_asked_s:
            forward(signal.SIGTERM, None)
        code = _wait(workers, stop_asked_s, grace_s + 10.0, resumes)
        del store  # it serves until here
        return code
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for number, handler in old.items():
            signal.signal(number, handler)


def _rendezvous(num_processes: int) -> tuple[Any, dict[str, str]]:
    """Serve the store that the workers meet at; returns it with the environment that all of them share."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = os.environ | {
        _LAUNCHER: str(os.getpid()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # workers join the store above, none of them opens a port for it
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    shared.setdefault("OMP_NUM_THREADS", str(threads_per_process(num_processes)))
    return store, shared


def _wait(workers: list[subprocess.Popen[bytes]], stop_asked_s: list[float], limit_s: float, resumes: bool) -> int:
    """Wait until all workers ended well, one failed, or a stop took longer than `limit_s`."""
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        starting = [rank for rank, code in failed if code == -signal.SIGTERM]
        if starting and stop_asked_s:
            # One that resumes had no handler yet, so no rank has begun a step: nothing is lost.
            early = f"while rank {starting[0]} was starting; the next start goes on from the last checkpoint"
            _say(f"stopped {early if resumes else 'by a signal'}")
            return 0
        if failed:
            return _report_failure(workers, *failed[0])
        if all(code == 0 for code in codes):
            return 0
        if stop_asked_s and time.monotonic() - stop_asked_s[0] > limit_s:
            late = [rank for rank, code in enumerate(codes) if code is None]
            _say(f"ranks {late} did not leave within {limit_s:g} s of the signal and are killed")
            return 1
        time.sleep(0.05)


def _report_failure(workers: list[subprocess.Popen[bytes]], rank: int, code: int) -> int:
    deadline = time.monotonic() + _LAST_WORDS_S
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(0.05)
    cause = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    running = [other for other, worker in enumerate(workers) if worker.poll() is None]
    rest = f"; ranks {running} are killed" if running else ""
    _say(f"rank {rank} of {len(workers)} {cause}{rest}")
    return code if code > 0 else 1


def _say(text: str) -> None:
    print(f"jetrl: {text}", file=sys.stderr, flush=True)
