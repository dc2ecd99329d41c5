"""The parts together: a loop that is killed or told to stop at random points ends like the uninterrupted one."""

import json
import random
import signal
import subprocess
import sys
import time

from jetrl_megatron.run.records import read_records
from jetrl_megatron.run.run_dir import RunDir
from jetrl_megatron.run.store import CheckpointStore

LOOP = """
import hashlib, sys, time
from pathlib import Path
from jetrl_megatron.config import Recipe, RunConfig
from jetrl_megatron.metrics import STEP_KEYS, Metrics
from jetrl_megatron.run.report import close_run
from jetrl_megatron.run.run_dir import open_run_dir
from jetrl_megatron.run.signals import StopSignal
from jetrl_megatron.run.store import CheckpointStore

run = RunConfig(dir=sys.argv[1], steps=16, save_every=2, keep_last=2, tensorboard=False)
run_dir = open_run_dir(Recipe(run=run), sys.argv)
store = CheckpointStore(run_dir.checkpoints, run.keep_last)
found = store.newest_complete()
step, state = (found.step, (found.rank_dir(0) / "state").read_text()) if found else (0, "start")
metrics = Metrics(run, run_dir, step, show=lambda line: print(line, flush=True))
with StopSignal(run.grace_s) as stop:
    while step < run.steps:
        state = hashlib.sha256(state.encode()).hexdigest()
        step += 1
        time.sleep(0.05)
        metrics.log("step", step, dict.fromkeys(STEP_KEYS, 0.0) | {"reward": int(state[:8], 16), "seconds": {"total": 0.01}})
        stopping = stop.should_stop(lambda mine: mine)
        if step % run.save_every == 0 or step == run.steps or stopping:
            store.save(step, lambda folder: (folder / "state").write_text(state))
        if stopping:
            sys.exit(0)
print("finished", flush=True)
"""


def start(folder) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", LOOP, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(folder) -> tuple:
    run_dir = RunDir(folder)
    found = CheckpointStore(run_dir.checkpoints, 2).newest_complete()
    return [(r["step"], r["reward"]) for r in read_records(run_dir.records)], found.step, (found.rank_dir(0) / "state").read_text()


def test_killed_and_stopped_runs_end_like_the_uninterrupted_one(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    out, err = start(whole).communicate(timeout=60)
    assert out.endswith("finished\n"), err
    rng, codes = random.Random(3), []
    for attempt in range(40):
        process = start(broken)
        first = process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.4))
        stop = attempt % 3 == 2
        process.send_signal(signal.SIGTERM if stop else signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        codes.append(process.returncode)
        if "finished" in first + out:
            break
        if stop:  # it saved at the next boundary: nothing it has logged is lost
            records, saved, _ = outcome(broken)
            assert (process.returncode, records[-1][0]) == (0, saved), err
    assert outcome(broken) == outcome(whole)
    assert [step for step, _ in outcome(broken)[0]] == list(range(1, 17))
    assert set(codes) <= {0, -signal.SIGKILL}
    assert -signal.SIGKILL in codes
    starts = [json.loads(line) for line in RunDir(broken).environment.read_text().splitlines()]
    assert len(starts) == len(codes)
