"""Worker processes that can be killed: wall clock and memory are bounded for each sample, and the pool is whole again afterwards.

Enters: tasks (JSON objects, see `reward_worker.py`). Leaves: one `Outcome` a task, in order. A sample that overruns its time has its
process killed and replaced; other samples only wait. Processes, not threads: a thread cannot be ended, and math-verify's own timeouts
need the main thread. The pool may be used from any thread; calls of several threads take turns.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from jetrl_megatron.failure import RunFailure

START_TIMEOUT_S = 120.0
"""A worker that has not finished its imports by then is an error: the machine, not a sample, is at fault."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one task."""

    status: str
    """A status of the worker, or "timeout" or "crash" when the process is gone."""
    value: float
    detail: str = ""


class _Worker:
    """One process with its connection; `task` is the index it works on, None when it is free or still starting."""

    def __init__(self, config: Mapping[str, object]) -> None:
        ours, theirs = socket.socketpair()
        paths = [path or os.getcwd() for path in sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "jetrl_megatron.grpo.reward_worker", str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=sys.stderr)
        theirs.close()
        self.connection = Connection(ours.detach())
        self.ready = False
        self.task: int | None = None
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.connection.send_bytes(json.dumps(dict(config)).encode())

    def give(self, index: int, task: Mapping[str, str], timeout_s: float) -> None:
        self.task = index
        self.deadline = time.monotonic() + timeout_s
        self.connection.send_bytes(json.dumps(dict(task)).encode())

    def receive(self) -> dict | None:
        """The message that is waiting, or None when the process is gone."""
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            return None

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.connection.close()


class WorkerPool:
    """A fixed number of worker processes, each replaced when it dies or is killed.

    config: what the workers get as their first message: `function`, `memory_mb`. timeout_s: wall clock of one task. Raises ValueError
    when the workers cannot load their function, with the reason, and RunFailure when they cannot start.
    """

    def __init__(self, num_workers: int, timeout_s: float, config: Mapping[str, object]) -> None:
        """Start all workers and wait until each has imported what it needs."""
        self._config, self._timeout_s = {**config, "timeout_s": timeout_s}, timeout_s
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        try:
            self._workers.extend(_Worker(self._config) for _ in range(num_workers))
            for worker in self._workers:
                if not worker.connection.poll(max(worker.deadline - time.monotonic(), 0.0)):
                    raise RunFailure(f"a reward worker did not start within {START_TIMEOUT_S} s")
                self._started(worker)
        except BaseException:
            self.close()
            raise

    def run(self, tasks: Sequence[Mapping[str, str]]) -> list[Outcome]:
        """Do every task and return the outcomes in order."""
        with self._lock:
            assert self._workers, "the pool is closed"
            outcomes: dict[int, Outcome] = {}
            waiting = deque(range(len(tasks)))
            while len(outcomes) < len(tasks):
                for slot, worker in enumerate(self._workers):
                    if worker.ready and worker.task is None and waiting:
                        self._give(slot, waiting.popleft(), tasks)
                self._collect(outcomes)
            return [outcomes[index] for index in range(len(tasks))]

    def pids(self) -> list[int]:
        """Process ids of the workers that are alive; as many as the pool is large whenever `run` is not running."""
        return [worker.process.pid for worker in self._workers if worker.process.poll() is None]

    def close(self) -> None:
        """End all workers. A closed pool cannot be used again."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def _give(self, slot: int, index: int, tasks: Sequence[Mapping[str, str]]) -> None:
        try:
            self._workers[slot].give(index, tasks[index], self._timeout_s)
        except ConnectionError:  # it died while it was idle: no sample is to blame, so the task goes to its successor
            self._replace(slot)
            while not self._workers[slot].ready:
                self._workers[slot].connection.poll(START_TIMEOUT_S)
                self._started(self._workers[slot])
            self._workers[slot].give(index, tasks[index], self._timeout_s)

    def _collect(self, outcomes: dict[int, Outcome]) -> None:
        """Wait for a message or a deadline, then take what is there and kill what is late."""
        active = [worker for worker in self._workers if worker.task is not None or not worker.ready]
        patience = max(min(worker.deadline for worker in active) - time.monotonic(), 0.0)
        readable = set(wait([worker.connection for worker in active], timeout=patience))
        for slot, worker in enumerate(self._workers):
            if worker not in active:
                continue
            if worker.connection in readable:
                self._take(slot, outcomes)
            elif time.monotonic() >= worker.deadline:
                if worker.task is None:
                    raise RunFailure(f"a reward worker did not start within {START_TIMEOUT_S} s")
                outcomes[worker.task] = Outcome(status="timeout", value=0.0)
                self._replace(slot)

    def _take(self, slot: int, outcomes: dict[int, Outcome]) -> None:
        worker = self._workers[slot]
        if not worker.ready:
            self._started(worker)
            return
        assert worker.task is not None, "a message from a worker that had no task"
        message = worker.receive()
        if message is None:
            outcomes[worker.task] = Outcome(status="crash", value=0.0)
            self._replace(slot)
            return
        outcomes[worker.task] = Outcome(status=message["status"], value=message["value"], detail=message["detail"])
        worker.task = None
        if message["leaving"]:
            self._replace(slot)

    def _started(self, worker: _Worker) -> None:
        message = worker.receive()
        if message is None:
            code = worker.process.wait()
            raise RunFailure(f"a reward worker ended with exit code {code} before it was ready; its standard error says why")
        if message["status"] == "failed":
            raise ValueError(message["detail"])
        worker.ready = True

    def _replace(self, slot: int) -> None:
        self._workers[slot].end()
        self._workers[slot] = _Worker(self._config)
