"""`jetrl train` with a real server, stopped with SIGTERM while the server takes new weights, and started again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_megatron.run.records import read_records
from jetrl_megatron.run.run_dir import RunDir
from jetrl_megatron.run.store import CheckpointStore

ROOT = Path(__file__).parents[2]
STEPS = 4
WORDS = (
    f"run.steps={STEPS}", "run.save_every=10", "run.tensorboard=false", "parallel.tp=1", "warm_start.steps=0", "data.eval=[]",
    "rollout.engine=vllm_pool", "rollout.vllm.servers=1", "rollout.vllm.max_num_seqs=4", "rollout.prompts_per_step=2",
    "rollout.group_size=4", "rollout.max_new_toks=8", "reward.function=tests.vllm.grpo_run:odd_length", "reward.workers=1",
    "grpo.dynamic_sampling=false", "optim.lr=1.0e-3",
)  # fmt: skip
LOAD = "jetrl_megatron.rollout.vllm_member:Member.bring"


def start(folder: Path, interrupt: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests" / "dist" / "interrupt"), str(ROOT))), "JETRL_TEST_INTERRUPT": interrupt}
    recipe = "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml"
    command = [sys.executable, "-W", "ignore", "-m", "jetrl_megatron.cli", "train", recipe, f"run.dir={folder}", *WORDS]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.dist
def test_a_stop_inside_a_push_is_saved_behind_it_and_goes_on(tmp_path: Path) -> None:
    """No step is lost or doubled: the push is finished, the step behind it saved, and the next start pushes what was saved."""
    run = RunDir(tmp_path / "run")
    done = start(run.path, f"SIGTERM {LOAD}:2")  # the first push brings the start weights, the second those of step 1
    assert done.returncode == 0, done.stderr
    steps = [r["step"] for r in read_records(run.records)]
    stopped = steps[-1]
    assert 1 <= stopped < STEPS and steps == list(range(1, stopped + 1))
    assert f"stopped by a signal after step {stopped}; start the same command again to go on" in done.stderr
    found = CheckpointStore(run.checkpoints, 2).newest_complete()
    assert found is not None and found.step == stopped
    logs = {p.name: p.read_bytes() for p in (run.path / "engines").iterdir()}
    done = start(run.path)
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in read_records(run.records)] == list(range(1, STEPS + 1))
    assert run.summary.exists()
    assert {name: (run.path / "engines" / name).read_bytes() for name in logs} == logs, "the logs of the first start stay as they were"
    assert len(list((run.path / "engines").iterdir())) == len(logs) + 1
