"""Checkpoints are complete or invisible."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jetrl_megatron.run.manifest import MANIFEST, BrokenCheckpointError
from jetrl_megatron.run.store import POINTER, CheckpointStore, Ranks


def payload(step: int, rank: int = 0) -> bytes:
    return random.Random(f"{step}/{rank}").randbytes(5000)


def writer(step: int, rank: int = 0):
    def write(folder: Path) -> None:
        (folder / "actor.bin").write_bytes(payload(step, rank))
        (folder / "sub").mkdir()
        (folder / "sub" / "data.json").write_text(json.dumps({"step": step}))

    return write


def saved(root: Path, steps: list[int], keep_last: int = 10) -> CheckpointStore:
    store = CheckpointStore(root, keep_last)
    for step in steps:
        store.save(step, writer(step), {"version": step})
    return store


def steps_in(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir())


def pointer(root: Path) -> dict:
    return json.loads((root / POINTER).read_text())


def test_save_and_find_gives_the_bytes_and_meta_back(tmp_path):
    store = saved(tmp_path, [2, 4])
    found = store.newest_complete()
    assert (found.step, found.meta, found.manifest.num_ranks) == (4, {"version": 4}, 1)
    assert (found.rank_dir(0) / "actor.bin").read_bytes() == payload(4)
    assert pointer(tmp_path) == {"step": 4, "path": "step_00000004"}
    assert [e.path for e in found.manifest.files] == ["rank_0000/actor.bin", "rank_0000/sub/data.json"]
    assert store.open(2).step == 2
    assert steps_in(tmp_path) == ["step_00000002", "step_00000004"]


def test_nothing_saved_is_none(tmp_path):
    assert CheckpointStore(tmp_path / "new", 1).newest_complete() is None


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest_missing", "manifest_cut", "wrong_step"])
def test_broken_newest_is_skipped_with_a_warning_and_refused_by_name(tmp_path, caplog, damage):
    store = saved(tmp_path, [2, 4])
    shard, manifest = tmp_path / "step_00000004/rank_0000/actor.bin", tmp_path / "step_00000004" / MANIFEST
    if damage == "truncated":
        os.truncate(shard, 4999)
    elif damage == "flipped":
        data = bytearray(shard.read_bytes())
        data[17] ^= 1
        shard.write_bytes(data)
    elif damage == "missing":
        shard.unlink()
    elif damage == "manifest_missing":
        manifest.unlink()
    elif damage == "manifest_cut":
        os.truncate(manifest, 40)
    else:
        (tmp_path / "step_00000004").rename(tmp_path / "step_00000006")
    step = 6 if damage == "wrong_step" else 4
    with caplog.at_level(logging.WARNING):
        assert store.newest_complete().step == 2
    assert f"step_0000000{step} is skipped" in caplog.text
    with pytest.raises(BrokenCheckpointError, match=f"step_0000000{step}"):
        store.open(step)
    store.save(step, writer(step))
    assert store.newest_complete().step == step
    assert (store.open(step).rank_dir(0) / "actor.bin").read_bytes() == payload(step)


def test_empty_directory_with_a_higher_number_is_skipped(tmp_path):
    store = saved(tmp_path, [2])
    (tmp_path / "step_00000099").mkdir()
    assert store.newest_complete().step == 2


def test_only_broken_checkpoints_are_an_error_not_a_fresh_start(tmp_path):
    store = saved(tmp_path, [2])
    os.truncate(tmp_path / "step_00000002/rank_0000/actor.bin", 1)
    with pytest.raises(ValueError, match=r"holds no whole checkpoint.*actor\.bin has 1 bytes, its manifest says 5000.*another run\.dir"):
        store.newest_complete()


def test_pointer_without_any_directory_is_an_error(tmp_path):
    (tmp_path / POINTER).write_text('{"step": 3, "path": "step_00000003"}')
    with pytest.raises(ValueError, match="no step directory"):
        CheckpointStore(tmp_path, 1).newest_complete()


def test_missing_pointer_uses_the_newest_and_overwrites_nothing(tmp_path, caplog):
    store = saved(tmp_path, [2, 4])
    (tmp_path / POINTER).unlink()
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert store.newest_complete().step == 4
    assert "latest cannot be read" in caplog.text
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_open_of_a_step_that_was_never_saved_names_those_that_were(tmp_path):
    with pytest.raises(BrokenCheckpointError, match=r"no checkpoint of step 3 .* steps there: \[2, 4\]"):
        saved(tmp_path, [2, 4]).open(3)


def test_kill_between_actor_and_data_state_leaves_the_old_one(tmp_path):
    store = saved(tmp_path, [2])

    def killed(folder: Path) -> None:
        (folder / "actor.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(4, killed)
    assert (store.newest_complete().step, pointer(tmp_path)["step"]) == (2, 2)
    store.save(4, writer(4))
    assert (store.open(4).rank_dir(0) / "actor.bin").read_bytes() == payload(4)
    assert steps_in(tmp_path) == ["step_00000002", "step_00000004"]


def test_first_save_killed_starts_from_nothing(tmp_path):
    (tmp_path / "step_00000002.tmp/rank_0000").mkdir(parents=True)
    store = CheckpointStore(tmp_path, 1)
    assert store.newest_complete() is None
    store.save(2, writer(2))
    assert steps_in(tmp_path) == ["step_00000002"]


def test_pointer_is_moved_last_and_names_the_step_given_to_save(tmp_path):
    store = saved(tmp_path, [1])
    live_step, slow_disk = [2], threading.Event()

    def slow(folder: Path) -> None:
        assert slow_disk.wait(10)
        writer(2)(folder)

    thread = threading.Thread(target=store.save, args=(live_step[0], slow))
    thread.start()
    live_step[0] = 4
    assert pointer(tmp_path)["step"] == 1
    assert store.newest_complete().step == 1
    slow_disk.set()
    thread.join()
    assert pointer(tmp_path) == {"step": 2, "path": "step_00000002"}
    assert store.newest_complete().manifest.step == 2


def test_retention_keeps_the_newest_whole_ones(tmp_path):
    store = saved(tmp_path, [1, 2, 3], keep_last=2)
    assert steps_in(tmp_path) == ["step_00000002", "step_00000003"]
    os.truncate(tmp_path / "step_00000003/rank_0000/actor.bin", 0)
    store.keep_last = 1
    store.save(4, writer(4))
    assert steps_in(tmp_path) == ["step_00000003", "step_00000004"]  # the broken one does not count, and is left to look at
    with pytest.raises(ValueError, match="keep_last is 0"):
        CheckpointStore(tmp_path, 0)


def test_failed_save_never_removes_the_last_good_one(tmp_path):
    store = saved(tmp_path, [1], keep_last=1)

    def disk_full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    for step in (2, 3):
        with pytest.raises(OSError, match="No space"):
            store.save(step, disk_full)
    assert store.newest_complete().step == 1


def test_replacing_a_step_survives_a_kill_between_the_two_renames(tmp_path):
    store = saved(tmp_path, [2])
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000002.replaced")
    assert (store.newest_complete().rank_dir(0) / "actor.bin").read_bytes() == payload(2)
    store.save(3, writer(3))
    assert store.open(2).step == 2


def test_going_back_to_an_earlier_step_leaves_the_old_future(tmp_path):
    store = saved(tmp_path, [2, 4])
    store.open(2)
    store.save(3, writer(3))
    assert store.newest_complete().step == 3
    assert steps_in(tmp_path) == ["step_00000002", "step_00000003", "step_00000004.abandoned"]


def run_ranks(num_ranks: int, work) -> list:
    """Call work(ranks) in one thread a rank with a real barrier and a real logical and."""
    barrier, votes, results = threading.Barrier(num_ranks, timeout=20), [True] * num_ranks, [None] * num_ranks

    def all_true(rank: int, ok: bool) -> bool:
        votes[rank] = ok
        barrier.wait()
        answer = all(votes)
        barrier.wait()
        return answer

    def body(rank: int) -> None:
        ranks = Ranks(rank=rank, num_ranks=num_ranks, barrier=lambda: barrier.wait() and None, all_true=lambda ok: all_true(rank, ok))
        results[rank] = work(ranks)

    threads = [threading.Thread(target=body, args=(r,)) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_every_rank_writes_its_own_files_and_all_agree_on_a_broken_one(tmp_path):
    def save(ranks: Ranks):
        store = CheckpointStore(tmp_path, 5, ranks)
        for step in (1, 2):
            store.save(step, writer(step, ranks.rank), {"tp": 3})
        return store.newest_complete().step

    assert run_ranks(3, save) == [2, 2, 2]
    found = CheckpointStore(tmp_path, 5).open(2)
    assert found.manifest.num_ranks == 3
    assert [(found.rank_dir(r) / "actor.bin").read_bytes() for r in range(3)] == [payload(2, r) for r in range(3)]
    shard = tmp_path / "step_00000002/rank_0001/actor.bin"
    shard.write_bytes(bytes(5000))  # right size, wrong bytes: only the rank that hashes it sees it
    assert run_ranks(3, lambda ranks: CheckpointStore(tmp_path, 5, ranks).newest_complete().step) == [1, 1, 1]


LOOP = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_store import writer
from jetrl_megatron.run.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), 1)
found = store.newest_complete()
step = found.step if found else 0
print("ready", flush=True)
while True:
    step += 1
    store.save(step, writer(step), {"step": step})
"""


def test_kill_minus_nine_at_any_point_leaves_a_whole_checkpoint_that_only_moves_forward(tmp_path):
    rng, last, num_kills = random.Random(7), 0, 0
    while num_kills < 8 or last < 3:
        num_kills += 1
        command = [sys.executable, "-c", LOOP, str(tmp_path), str(Path(__file__).parent)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        if not any(tmp_path.glob("step_*[0-9]")):
            continue
        found = CheckpointStore(tmp_path, 1).newest_complete()
        assert found.step >= last
        assert found.meta == {"step": found.step}
        assert (found.rank_dir(0) / "actor.bin").read_bytes() == payload(found.step)
        last = found.step
