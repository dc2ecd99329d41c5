"""A guard between the run and one engine server: no server outlives its run, no part of a server outlives the server.

    run --(pipe)--> guard --> server process --> its engine and worker processes

Enters: the server's command line; standard input is a pipe that only the run holds open. Leaves: the server's exit code. When the pipe ends
(the run has closed it, or has died in whatever way) or the server's first process ends, the guard kills the server's whole session.
A server that is killed leaves its sockets and rendezvous files: it has a folder of its own for what is temporary, which goes with it.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile

_POLL_S = 0.2
_SOCKET_FOLDER_CHARS = 70
"""A socket's path has at most 107 characters, of which vLLM's name takes 37."""


def guard(command: list[str], watched_fd: int) -> int:
    """Run `command` in a session of its own until it ends or `watched_fd` reports end of file; returns its exit code.

    The process id of the server goes to standard output as one line.
    """
    with tempfile.TemporaryDirectory(prefix="jetrl-", ignore_cleanup_errors=True) as temporary:
        environment = {**os.environ, "TMPDIR": temporary}
        if len(temporary) > _SOCKET_FOLDER_CHARS:
            environment.setdefault("VLLM_RPC_BASE_PATH", tempfile.gettempdir())  # where its sockets would be otherwise, and stay
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
        print(server.pid, flush=True)
        try:
            while server.poll() is None:
                readable, _, _ = select.select([watched_fd], [], [], _POLL_S)
                if readable and not os.read(watched_fd, 1):
                    break
        finally:
            _kill_session(server.pid)
            server.wait()
    return server.returncode


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # the whole session has ended already


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)  # the run decides when its servers end, by closing the pipe
    sys.exit(abs(guard(sys.argv[1:], sys.stdin.fileno())))
