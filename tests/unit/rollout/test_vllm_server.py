"""How a server is started again: on another port where its own was taken, into a log file that no other start has."""

import threading
from dataclasses import replace

import pytest

from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout import vllm_server
from jetrl_megatron.rollout.vllm_server import VllmServer
from tests.unit.rollout.test_vllm_client import KEY, SPEC

TAKEN = "OSError: [Errno 98] Address already in use"


class Guard:
    """A process that has begun, and writes its first words to its log."""

    stdin = stdout = None

    def __init__(self, words, *, env, stderr, **options):
        self.stdin, self.stdout = self, self
        stderr.write(b"started with " + words[words.index("--port") + 1].encode())

    def readline(self):
        return "77\n"

    def close(self):
        pass

    def wait(self, timeout):
        pass

    def poll(self):
        return None


class Client:
    """An end that is healthy at once."""

    def __init__(self, **fields):
        self.url = fields["url"]

    def healthy(self):
        return True

    def rpc(self, method, kwargs, timeout_s):
        return []


@pytest.fixture
def server_of(tmp_path, monkeypatch):
    """Servers of one run directory, as each start of the run would make them."""
    monkeypatch.setattr(vllm_server.subprocess, "Popen", Guard)
    monkeypatch.setattr(vllm_server, "EngineClient", Client)
    monkeypatch.setattr(vllm_server, "vllm_version", lambda: "0.30")
    return lambda number=0: VllmServer(number, replace(SPEC, log_dir=tmp_path / "engines"), KEY)


def test_every_start_in_a_run_directory_has_a_log_of_its_own(server_of, tmp_path):
    """A run that died and is started again keeps the logs that say why."""
    first = server_of()
    first.start(tmp_path, True)
    dead = first.log_file.read_bytes()
    first.start(tmp_path, True)
    again = server_of()
    again.start(tmp_path, True)
    server_of(1).start(tmp_path, True)
    names = [f"server0-start{k}.log" for k in (1, 2, 3)]
    assert sorted(p.name for p in (tmp_path / "engines").iterdir()) == [*names, "server1-start1.log"]
    assert again.log_file.name == names[2] and again.log_tail() == f"started with {again.client.url.rpartition(':')[2]}"
    assert (tmp_path / "engines" / names[0]).read_bytes() == dead


@pytest.fixture
def starts(monkeypatch):
    """What each start ends with, in turn: an error's text, or nothing; returns the list, which grows shorter."""
    outcomes = []

    def start_once(self, model_dir, with_weights):
        words = outcomes.pop(0)
        if words:
            raise RuntimeError(words)
        return "client"

    monkeypatch.setattr(VllmServer, "_start_once", start_once)
    return outcomes


def test_a_port_that_somebody_took_is_tried_again_three_times_in_all(server_of, starts, tmp_path):
    starts += [TAKEN, ""]
    assert server_of().start(tmp_path, True) == "client" and starts == []
    starts += [TAKEN, TAKEN, ""]
    assert server_of().start(tmp_path, True) == "client" and starts == []
    starts += [TAKEN, TAKEN, TAKEN, ""]
    with pytest.raises(RuntimeError, match="Address already in use"):
        server_of().start(tmp_path, True)
    assert starts == [""]


def test_another_failure_is_not_tried_again(server_of, starts, tmp_path):
    starts += ["out of memory", ""]
    with pytest.raises(RuntimeError, match="out of memory"):
        server_of().start(tmp_path, True)
    assert starts == [""]


def test_a_server_that_ends_while_it_starts_is_reported_with_its_first_error(server_of, monkeypatch, tmp_path):
    class Dead(Guard):
        def __init__(self, words, *, env, stderr, **options):
            stderr.write(b"WARNING 1 [base.py:2] ValueError: nothing bad\n(EngineCore pid=1) ERROR 2 [core.py:3]   File 'x'\n")
            stderr.write(b"(EngineCore pid=1) ERROR 2 [core.py:3] ValueError: To serve one request 4.0 GiB are needed\n")
            stderr.write(b"(APIServer pid=2) ERROR 3 [x.py:1] RuntimeError: see above\n" + b"x" * 2000)
            self.stdin, self.stdout = self, self

        def poll(self):
            return 1

    monkeypatch.setattr(vllm_server.subprocess, "Popen", Dead)
    monkeypatch.setattr(Client, "healthy", lambda self: False)
    with pytest.raises(RunFailure, match=r"ended while starting \(ValueError: To serve one request 4\.0 GiB are needed\); the end"):
        server_of().start(tmp_path, True)


def test_each_start_asks_for_a_port_anew(server_of, monkeypatch, tmp_path):
    ports, failures = iter([20001, 20002]), [TAKEN]

    def healthy(self, client):
        if failures:
            raise RuntimeError(failures.pop())

    monkeypatch.setattr(vllm_server, "_free_port", lambda host: next(ports))
    monkeypatch.setattr(VllmServer, "_wait_until_healthy", healthy)
    server = server_of()
    assert server.start(tmp_path, True).url == "http://127.0.0.1:20002"
    assert server.log_tail() == "started with 20002"


def test_a_server_that_two_threads_stop_is_stopped_once(server_of, monkeypatch, tmp_path):
    """The run's end, and the thread that was bringing the server back and sees it die."""
    server, ends, waits, failures = server_of(), threading.Event(), [], []
    server.start(tmp_path, True)

    def wait(guard, timeout):
        waits.append(timeout)
        assert ends.wait(5.0)

    def stop():
        try:
            server.stop()
        except AttributeError as error:
            failures.append(error)

    monkeypatch.setattr(Guard, "wait", wait)
    threads = [threading.Thread(target=stop, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[1].join(0.2)
    ends.set()
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()
    assert len(waits) == 1 and not failures and not server.alive
