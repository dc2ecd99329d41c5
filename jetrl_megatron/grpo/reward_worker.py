"""The process that scores: one sample at a time, told to die by signal when it overruns, never imports torch.

Started by `worker_pool.py` as `python -m jetrl_megatron.grpo.reward_worker FD`; FD is one end of a socket pair. Messages are JSON both
ways: in `{"kind": "score"|"gold", "text", "answer"}`, out `{"status", "value", "detail", "leaving"}`. The first message in is the
configuration, the first out says `ready` or `failed` with the reason.

Bounds. Memory: the address space may grow by `memory_mb` above its size after the imports (RLIMIT_AS), so an allocation beyond it
fails; the worker then reports `memory` and exits, and so it does, after a good answer, once it has kept half of that growth: each
sample therefore has at least half of the bound. Time: the pool kills the worker after `timeout_s`; the kernel alarm set here at
several times that only ends a worker whose parent has gone. A process that a reward function forks holds the same socket: it leaves
before it can reply, so that each task has one reply.
"""

import importlib
import json
import numbers
import os
import reprlib
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

ORPHAN_FACTOR = 4
"""The alarm of an orphaned worker rings at this many times the pool's own limit."""
MAX_ABS_REWARD = 1e6
"""A reward beyond it, like one that is not finite, is a failure of its function: sums, spreads and records then stay finite."""


def main() -> None:
    """Serve until the pool closes the connection or the memory bound is near."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    own_pid = os.getpid()
    with Connection(int(sys.argv[1])) as connection:
        config = json.loads(connection.recv_bytes())
        try:
            functions = _load(config)
        except ValueError as error:
            connection.send_bytes(_encode("failed", None, str(error)))
            return
        room = config["memory_mb"] * 2**20
        start = _address_space()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (start + room, hard))
        connection.send_bytes(_encode("ready", None, ""))
        while True:
            try:
                task = json.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                return
            signal.setitimer(signal.ITIMER_REAL, ORPHAN_FACTOR * config["timeout_s"] + 1.0)
            reply = _answer(functions[task["kind"]], task)
            if os.getpid() != own_pid:
                os._exit(1)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            full = reply[0] == "memory" or _address_space() - start > room // 2
            connection.send_bytes(_encode(*reply, leaving=full))
            if full:
                return


def load_function(name: str) -> Callable[[str, str], float]:
    """Import `package.module:function`; ValueError that says what is missing."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"reward.function is {name!r}; write `math` or `package.module:function`")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward.function is {name!r}, but {module_name} cannot be imported: {error}; is it on PYTHONPATH?") from error
    except (Exception, SystemExit) as error:  # the edge of the process: a user's module may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error}" if isinstance(error, SyntaxError) else f"{error!r} at {frame.filename}:{frame.lineno}"
        raise ValueError(f"reward.function is {name!r}, but {module_name} cannot be imported, it raises {what}; mend it") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"reward.function is {name!r}, but {module_name} has no function {attribute!r}")
    return function


def _load(config: dict) -> dict[str, Callable[[dict], tuple[str, float, str]]]:
    if config["function"] != "math":
        function = load_function(config["function"])
        return {"score": lambda task: _checked(function(task["text"], task["answer"]))}
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off, which is the point
    try:
        import math_verify  # noqa: F401 - paid once, before the clock of the first sample starts
    except ImportError as error:
        raise ValueError(f"reward.function is 'math', which needs math-verify: {error}; pip install math-verify[antlr4_13_2]") from error
    from jetrl_megatron.grpo import equality

    equality.compare(r"x+\sqrt{2}", r"\sqrt{2}+x")  # builds the grammar's tables, so that no sample pays for them

    def score(task: dict) -> tuple[str, float, str]:
        verdict = equality.compare(task["answer"], task["text"])
        return verdict.value, float(verdict is equality.Verdict.equal), ""

    return {"score": score, "gold": lambda task: ("equal", float(equality.gold_parses(task["answer"])), "")}


def _checked(value: object) -> tuple[str, float, str]:
    # Numbers of numpy are real ones too. The comparison is not so for NaN either.
    if not isinstance(value, numbers.Real) or not abs(value) <= MAX_ABS_REWARD:  # type: ignore[operator]
        return "error", 0.0, f"the reward function returned {reprlib.repr(value)}; it must return a number within {MAX_ABS_REWARD:g} of 0"
    return "equal", float(value), ""


def _answer(function: Callable[[dict], tuple[str, float, str]], task: dict) -> tuple[str, float, str]:
    try:
        return function(task)
    except MemoryError:
        return "memory", 0.0, ""
    except Exception:  # the edge of the process: whatever a sample raises is reported, and the sample scores 0
        return "error", 0.0, traceback.format_exc(limit=-3)


def _encode(status: str, value: float | None, detail: str, leaving: bool = False) -> bytes:
    return json.dumps({"status": status, "value": value, "detail": detail, "leaving": leaving}).encode()


def _address_space() -> int:
    """Bytes of address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
