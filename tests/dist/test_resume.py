"""`jetrl train` killed with SIGKILL or stopped with SIGTERM at exact points ends like the run that nobody interrupted, bit for bit.

Every start is the real command: a launcher and its workers. The kill takes all of them, at a call named below (`interrupt/sitecustomize`).
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jetrl_megatron.run.records import read_records
from jetrl_megatron.run.run_dir import RunDir
from jetrl_megatron.run.store import CheckpointStore

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/grpo-tiny-1n2p-tp2pp1-jetrl.yaml"
SMALL = [
    *("run.steps=4", "run.save_every=1", "run.tensorboard=false", "warm_start.steps=3", "warm_start.batch_seqs=8"),
    *("rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_toks=4", "grpo.minibatches=2"),
    *("grpo.dynamic_sampling=true", "grpo.dynamic_max_rounds=1", "reward.function=text_reward:reward", "reward.workers=1"),
    *("optim.warmup_steps=6", "data.max_eval_prompts=4", "eval.samples=2", "model.synthetic.num_layers=1"),
]


def model_of(width: int, heads: int) -> list[str]:
    """The smallest legal model for as many tensor-parallel ranks as heads."""
    sizes = {"hidden_size": width, "ffn_hidden_size": width, "num_heads": heads, "num_kv_heads": heads}
    return [f"parallel.tp={heads}", *(f"model.synthetic.{name}={size}" for name, size in sizes.items())]


ONE, TWO = model_of(128, 1), model_of(256, 2)

TRAIN_STEP = "jetrl_megatron.actor.actor:Actor.train_step"
DECODE = "jetrl_megatron.rollout.local:_Decoding._decode"
PUBLISH = "jetrl_megatron.run.store:CheckpointStore._publish"
RETAIN = "jetrl_megatron.run.store:CheckpointStore._retain"
EVALUATE = "jetrl_megatron.loop.held_out:evaluate"
MERGE = "conversion.actor_io:merge_to_hf"


def start(folder: Path, layout: list[str], interrupt: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command to its end, whatever that is."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(ROOT / "tests" / "dist" / "interrupt"), "JETRL_TEST_INTERRUPT": interrupt, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "jetrl_megatron.cli", "train", RECIPE, f"run.dir={folder}", *SMALL, *layout]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)


def outcome(folder: Path) -> dict:
    """All that a run leaves, without times."""
    run = RunDir(folder)
    records = read_records(run.records)
    summary = json.loads(run.summary.read_text())
    found = CheckpointStore(run.checkpoints, 2).newest_complete()
    states = [torch.load(rank / "actor.pt", weights_only=True) for rank in sorted(found.path.glob("rank_*/"))]
    return {
        "records": [{k: v for k, v in r.items() if k not in ("seconds", "push_seconds")} for r in records],
        "summary": {k: v for k, v in summary.items() if k not in ("seconds", "total_s")},
        "hf": {p.name: p.read_bytes() for p in sorted(run.hf.iterdir())},
        "checkpoint": (found.step, dict(found.meta), states),
        "kept": sorted(p.name for p in run.checkpoints.iterdir()),
    }


def assert_same(a: object, b: object, where: str = "") -> None:
    """Equal trees, tensors bit for bit."""
    if isinstance(a, dict):
        assert isinstance(b, dict) and a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def uninterrupted(folder: Path, layout: list[str]) -> dict:
    done = start(folder, layout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder / "summary.json")
    return outcome(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return uninterrupted(tmp_path_factory.mktemp("whole") / "run", ONE)


def test_the_uninterrupted_run_is_one_worth_comparing(whole: dict) -> None:
    kinds = [(r["kind"], r["step"]) for r in whole["records"]]
    assert kinds == [("eval", 0), *(("step", i) for i in (1, 2, 3, 4)), ("eval", 4)]
    steps = [r for r in whole["records"] if r["kind"] == "step"]
    assert [r["version"] for r in steps] == [2, 4, 6, 8]
    assert all(r["logprob_abs_diff_max"] == 0.0 for r in steps)
    assert len({r["grad_norm"] for r in steps}) == 4 and all(r["grad_norm"] > 0 for r in steps), "every step must learn something"
    assert sum(r["reward_failures"] for r in steps) > max(r["reward_failures"] for r in steps) > 0, "failures in several steps"
    assert len({r["lr"] for r in steps}) > 1, "the warm-up must still be going on when the run is interrupted"
    assert whole["kept"] == ["latest", "step_00000003", "step_00000004"]


def test_killed_at_every_stage_of_the_run(whole: dict, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    points = [
        (f"{TRAIN_STEP}:2", None),  # in the warm start, which begins anew
        (f"{MERGE}:1", None),  # while the warm-started weights are written
        (f"{PUBLISH}:1", None),  # step 1 is recorded, its checkpoint is not in place
        (f"{PUBLISH}:2", 1),  # step 2 is written and hashed, not renamed into place
        (f"{DECODE}:2", 1),  # in the rollout of step 2
        (f"{RETAIN}:2", 3),  # step 3 is in place, step 1 not yet removed
        (f"{MERGE}:1", 4),  # everything is trained and saved, the export is not written
    ]
    for point, saved in points:
        done = start(folder, ONE, f"SIGKILL {point}")
        assert done.returncode == -signal.SIGKILL, (point, done.stderr)
        found = CheckpointStore(RunDir(folder).checkpoints, 2).newest_complete()
        assert (found.step if found else None) == saved, point
        assert not RunDir(folder).summary.exists()
    done = start(folder, ONE)
    assert done.returncode == 0, done.stderr
    assert_same(whole, outcome(folder))
    assert_same(whole, uninterrupted(folder, ONE), "a finished run that is started again")
    assert len(RunDir(folder).environment.read_text().splitlines()) == len(points) + 2


def test_stopped_by_sigterm_it_saves_and_exits_0(whole: dict, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = start(folder, ONE, f"SIGTERM {TRAIN_STEP}:1")  # in the warm start: nothing to save yet
    assert (done.returncode, RunDir(folder).records.exists()) == (0, False), done.stderr
    # With saves this rare only the stop itself can have saved.
    done = start(folder, [*ONE, "run.save_every=3"], f"SIGTERM {DECODE}:7")
    assert done.returncode == 0, done.stderr
    stopped = read_records(RunDir(folder).records)[-1]["step"]
    assert f"stopped by a signal after step {stopped}; start the same command again to go on" in done.stderr
    found = CheckpointStore(RunDir(folder).checkpoints, 2).newest_complete()
    assert stopped in (1, 2) and found.step == stopped
    done = start(folder, ONE)
    assert done.returncode == 0, done.stderr
    assert_same(whole, outcome(folder))


def test_stopped_in_an_evaluation(whole: dict, tmp_path: Path) -> None:
    """The first evaluation is recorded once; a stop in the last one finds nothing left to do but to save and export."""
    folder = tmp_path / "run"
    done = start(folder, ONE, f"SIGTERM {EVALUATE}:1")
    assert done.returncode == 0 and not RunDir(folder).summary.exists(), done.stderr
    records = read_records(RunDir(folder).records)
    stopped = records[-1]["step"]
    assert stopped in (0, 1) and [r["kind"] for r in records] == ["eval", "step"][: stopped + 1]
    assert f"stopped by a signal after step {stopped}; start the same command again to go on" in done.stderr
    found = CheckpointStore(RunDir(folder).checkpoints, 2).newest_complete()
    assert (found.step if found else 0) == stopped
    done = start(folder, ONE, f"SIGTERM {EVALUATE}:{1 if stopped else 2}")
    assert done.returncode == 0, done.stderr
    assert_same(whole, outcome(folder))
    starts = [json.loads(line) for line in RunDir(folder).environment.read_text().splitlines()]
    keys = ("precision.attention", "precision.attention_backward", "precision.backend")
    assert [line["kernels"] for line in starts] == [dict.fromkeys(keys, "reference")] * 2
    tokenizer = RunDir(folder).initial_model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"Z"', '"Ä"'))  # no prompt has it, a completion may
    done = start(folder, ONE)
    assert done.returncode == 2 and "the tokenizer of run.dir" in done.stderr and "tokenizer.json is changed" in done.stderr, done.stderr


def test_two_tensor_parallel_ranks_killed_and_stopped(tmp_path: Path) -> None:
    whole, folder = uninterrupted(tmp_path / "whole", TWO), tmp_path / "run"
    assert len(whole["checkpoint"][2]) == 2
    done = start(folder, TWO, f"SIGKILL {PUBLISH}:3")
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = start(folder, TWO, f"SIGTERM {TRAIN_STEP}:1")
    assert done.returncode == 0 and "stopped by a signal after step 3" in done.stderr, done.stderr
    done = start(folder, TWO)
    assert done.returncode == 0, done.stderr
    assert_same(whole, outcome(folder))
