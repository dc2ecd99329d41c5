"""One process a rank: exit codes, signals and no orphans."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from jetrl_megatron.run import local_launch
from jetrl_megatron.run.local_launch import launch, slurm_rank, threads_per_process, under_launcher


def python(body: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, time, signal; rank = int(os.environ['RANK'])\n" + textwrap.dedent(body)]


def test_ranks_and_threads_are_set_and_success_is_zero(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    body = """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        open(str(rank), "w").write(" ".join(os.environ[n] for n in names))
    """
    monkeypatch.chdir(tmp_path)
    assert launch(python(body), 3, grace_s=1.0) == 0
    threads = threads_per_process(3)
    assert [(tmp_path / str(r)).read_text() for r in range(3)] == [f"{r} {r} 3 3 127.0.0.1 {threads}" for r in range(3)]


@pytest.mark.parametrize(("ending", "code", "words"), [("sys.exit(2)", 2, "exited with code 2"), ("os.kill(os.getpid(), 9)", 1, "SIGKILL")])
def test_one_dead_rank_ends_all_and_is_named(capfd, monkeypatch, ending, code, words):
    monkeypatch.setattr("jetrl_megatron.run.local_launch._LAST_WORDS_S", 0.2)
    start = time.monotonic()
    assert launch(python(f"{ending} if rank == 1 else time.sleep(60)"), 2, grace_s=1.0) == code
    assert time.monotonic() - start < 20
    message = capfd.readouterr().err
    assert "rank 1 of 2 " in message
    assert words in message
    assert "ranks [0] are killed" in message


def test_told_to_stop_before_a_worker_is_there_it_starts_none(capfd, monkeypatch):
    meet = local_launch._rendezvous

    def interrupted(num_processes):
        os.kill(os.getpid(), signal.SIGTERM)
        return meet(num_processes)

    monkeypatch.setattr(local_launch, "_rendezvous", interrupted)
    assert launch(python("print('started')"), 2, grace_s=1.0) == 0
    captured = capfd.readouterr()
    assert captured.out == "" and "stopped before anything was started" in captured.err


def start_launcher(body: str, *, grace_s: float, num: int = 2, options: str = "") -> subprocess.Popen:
    call = f"launch({python(body)!r}, {num}, {grace_s}{options})"
    code = f"import sys; from jetrl_megatron.run.local_launch import launch; sys.exit({call})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_sigterm_reaches_every_rank_and_a_clean_stop_is_zero():
    body = """
        signal.signal(signal.SIGTERM, lambda *a: (os.write(1, b"stopping %d\\n" % rank), os._exit(0)))
        print("ready", rank, file=sys.stdout, flush=True)
        for _ in range(1200):  # short naps: a signal between the interpreter's check and one long sleep would wait for its end
            time.sleep(0.05)
    """
    process = start_launcher(body, grace_s=5.0)
    assert process.stdout.readline() == "ready 0\n"
    assert process.stderr.readline() == "ready 1\n"  # only rank 0 owns standard output
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "stopping 0\n", "stopping 1\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "jetrl: stopped while rank 0 was starting; the next start goes on from the last checkpoint\n"),
        (", resumes=False", "jetrl: stopped by a signal\n"),
    ],
)
def test_a_stop_before_the_workers_can_handle_it_loses_nothing_and_is_zero(options, said):
    body = "print('ready', file=sys.stdout, flush=True); time.sleep(60)"
    process = start_launcher(body, grace_s=5.0, num=1, options=options)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert err == said


def alive(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_die_with_a_launcher_that_is_killed():
    body = """
        from jetrl_megatron.run.local_launch import die_with_launcher
        die_with_launcher()
        print(os.getpid(), file=sys.stdout, flush=True)
        time.sleep(60)
    """
    process = start_launcher(body, grace_s=5.0)
    pids = [int(process.stdout.readline()), int(process.stderr.readline())]
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [alive(pid) for pid in pids] == [False, False]
    process.stdout.close()
    process.stderr.close()


@pytest.mark.dist
def test_workers_meet_at_the_launchers_store(tmp_path, monkeypatch):
    body = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([rank + 1]); dist.all_reduce(total)
        open(str(rank), "w").write(str(total.item())); dist.destroy_process_group()
    """
    monkeypatch.chdir(tmp_path)
    assert launch(python(body), 2, grace_s=1.0) == 0
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["3", "3"]


def test_a_place_to_meet_that_was_inherited_is_not_the_runs(tmp_path, monkeypatch):
    """A shell that exports one run's address must not send the next run's workers there."""
    stale = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False", "LOCAL_WORLD_SIZE": "8"}
    stale |= {"WORLD_SIZE": "8", "LOCAL_RANK": "5", "TORCHELASTIC_RESTART_COUNT": "3"}
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    stores, meet = [], local_launch._rendezvous

    def kept(num_processes):
        stores.append(meet(num_processes))
        return stores[-1]

    monkeypatch.setattr(local_launch, "_rendezvous", kept)
    monkeypatch.chdir(tmp_path)
    assert launch(python(f"open(str(rank), 'w').write(' '.join(os.environ[n] for n in {sorted(stale)}))"), 2, grace_s=1.0) == 0
    (store, _) = stores[0]
    # Sorted: LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RESTART_COUNT, ..._USE_AGENT_STORE, WORLD_SIZE.
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == [f"{r} 2 127.0.0.1 {store.port} 0 True 2" for r in range(2)]


def test_who_gave_the_rank():
    assert under_launcher({"RANK": "0", "WORLD_SIZE": "2"})
    assert not under_launcher({"RANK": "0"})
    assert slurm_rank({}) == {}
    assert slurm_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == {}
    task = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "MASTER_ADDR": "node", "MASTER_PORT": "1"}
    assert slurm_rank(task) == {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    with pytest.raises(ValueError, match=r"task 3 of srun, but MASTER_ADDR, MASTER_PORT is not set"):
        slurm_rank({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"})


def test_threads_share_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_process(1) == cores
    assert threads_per_process(10 * cores) == 1
