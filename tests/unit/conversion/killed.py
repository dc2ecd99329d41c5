"""A conversion that kills itself at its n-th tensor, and which files it must have finished by then.

The child sends itself SIGKILL instead of writing tensor n (from 1, counted over this run). Before each tensor it waits until the files that
are complete are journalled, which otherwise happens on a thread beside; so what it leaves depends on n alone.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from conversion.checkpoint import open_checkpoint
from conversion.convert import Target, prepare

_CHILD = """
import os, signal, sys
import conversion.execute as m
from conversion.cli import main

kill_at, written = int(sys.argv[1]), 0
write_target, finish_one = m._write_target, m._Shard.finish_one

def counted(*args):
    global written
    written += 1
    if written == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    write_target(*args)

def journalled(shard):
    finish_one(shard)
    for sync in shard.syncs:
        sync.result()

m._write_target, m._Shard.finish_one = counted, journalled
os.fsync = os.fdatasync = lambda fd: None
sys.exit(main(sys.argv[2:]))
"""


def killed_at(n: int, words: list[str]) -> None:
    """Run `python -m conversion WORDS` with one worker until it kills itself at tensor n."""
    done = _run(n, words)
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stderr)


def finished(words: list[str]) -> None:
    """Run the same to its end."""
    done = _run(0, words)
    assert done.returncode == 0, done.stderr


def _run(n: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _CHILD, str(n), *words, "--workers", "1", "--json"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def files_in_order(source: Path, target: Target) -> list[str]:
    """Return the file of each tensor, in the order in which one worker writes them."""
    opened = open_checkpoint(source)
    prepared = prepare(opened, target)
    opened.close()
    return [prepared.file_of[t.target.location, t.target.name] for t in prepared.plan.targets]


def done_after(order: list[str], done: set[str], n: int) -> set[str]:
    """Return the complete files behind a run that found `done` and was killed at tensor n."""
    todo = [file for file in order if file not in done]
    assert 1 <= n <= len(todo), f"the run writes {len(todo)} tensors and would not reach tensor {n}"
    return set(order) - set(todo[n - 1 :])


def journalled(partial: Path) -> dict[str, int]:
    """Return the files that the journal lists, with the time at which each was last written."""
    lines = (partial / "journal.jsonl").read_text().splitlines()[1:]
    names = [json.loads(line)["file"] for line in lines]
    return {name: (partial / name).stat().st_mtime_ns for name in names}


def check_kills_and_resumption(source: Path, final: Path, words: list[str], target: Target, shares: tuple[float, ...]) -> None:
    """Kill one run after another, then let one finish. shares: where in what is left to write; 0 its first tensor, 1 its last.

    Asserts that no kill leaves anything at `final`, that each leaves exactly the files that were complete, and that no such file is written
    again.
    """
    order, partial = files_in_order(source, target), final.with_name(f".{final.name}.partial")
    done: set[str] = set()
    kept: dict[str, int] = {}
    for share in shares:
        n = 1 + round(share * (len([file for file in order if file not in done]) - 1))
        killed_at(n, words)
        done = done_after(order, done, n)
        found = journalled(partial)
        assert found.keys() == done and not final.exists(), n
        assert all(found[name] == time for name, time in kept.items()), f"killed at {n}: a complete file was written again"
        kept = found
    assert len(done) >= 2 and done < set(order)
    finished(words)
    assert not partial.exists()
    for name, time in kept.items():
        assert (final / name).stat().st_mtime_ns == time, f"{name} was complete, yet written again"
