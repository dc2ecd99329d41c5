"""What is left of a server behind its guard: nothing."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PARENT = """
import pathlib, subprocess, sys, tempfile, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(tempfile.gettempdir(), "socket").touch()
print(child.pid, tempfile.gettempdir(), file=sys.stderr, flush=True)
{then}
"""
"""A server that starts a process and leaves a temporary file."""


def guarded(words: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", "jetrl_megatron.rollout.vllm_guard", *words], **pipes, text=True, env=environment)


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("then", ["time.sleep(60)", "sys.exit(3)"], ids=["the run ends", "the server ends"])
def test_processes_and_temporary_files_of_a_server_end_with_it(tmp_path, then):
    with guarded([sys.executable, "-c", PARENT.format(then=then)], {**os.environ, "TMPDIR": str(tmp_path)}) as guard:
        server = int(guard.stdout.readline())
        child, folder = guard.stderr.readline().split()
        assert Path(folder).parent == tmp_path
        if "exit" not in then:
            assert alive(server) and alive(int(child)) and Path(folder, "socket").exists()
            guard.stdin.close()
        code = guard.wait(timeout=20)
    assert code == (3 if "exit" in then else 9)
    assert not alive(server) and not alive(int(child)) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("chars", "asked", "want"), [(40, {}, None), (66, {}, "its own"), (66, {"VLLM_RPC_BASE_PATH": "/mine"}, "/mine")])
def test_sockets_stay_where_their_path_is_short_enough(tmp_path, chars, asked, want):
    """A folder in a folder may be too deep."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    deep = folder / ("x" * (chars - len(str(folder)) - 1))
    deep.mkdir()
    words = [sys.executable, "-c", "import os, sys; print(os.environ.get('VLLM_RPC_BASE_PATH'), file=sys.stderr)"]
    plain = {k: v for k, v in os.environ.items() if k != "VLLM_RPC_BASE_PATH"}
    try:
        with guarded(words, {**plain, **asked, "TMPDIR": str(deep)}) as guard:
            said = guard.stderr.readline().strip()
    finally:
        shutil.rmtree(folder)
    assert said == str(deep if want == "its own" else want)
