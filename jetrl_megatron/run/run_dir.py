"""The run directory: made once, reopened by the same run only.

Enters: a recipe. Leaves: the directory with `recipe.yaml` (every key, resolved) and one line in `environment.jsonl` for each start, both
durable before step 0. Layout:

    recipe.yaml  environment.jsonl  data.json  records.jsonl  checkpoints/  tensorboard/  hf/  curves.png  summary.json  run.lock
    initial_model/ (a synthetic model)  warm_start/ (the weights it left)  engines/ (logs of servers)  engine_weights/ (what they load)

Invariant: two starts in one directory differ at most in how long the run is and what it saves and logs, and they compute with the same
kernels, whatever `auto` would choose by now; two processes never run in it at
the same time (a POSIX lock, which the system drops when the process dies; a file system without locks is warned of and goes unguarded).
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from jetrl_megatron.config import Decay, Recipe
from jetrl_megatron.load import dump_recipe, flat_recipe, load_recipe, may_change
from jetrl_megatron.run.environment import describe_environment
from jetrl_megatron.run.manifest import write_durably

logger = logging.getLogger(__name__)
_LOCK_WAIT_S = 3.0
"""A run that was just killed may take a moment to leave."""
_BEFORE_THE_KEY = {"precision.wgrad_granularity": "groups"}
"""Key -> what a run whose recipe.yaml is older than the key computed with, where that is not the default of now."""


@dataclass(frozen=True)
class RunDir:
    """Where everything of one run lies."""

    path: Path
    lock: TextIO | None = field(default=None, repr=False, compare=False)
    """Held by rank 0 as long as it lives."""

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def environment(self) -> Path:
        """One JSON line for each start."""
        return self.path / "environment.jsonl"

    @property
    def data(self) -> Path:
        """Number and fingerprint of the prompts that the run began with, the SHA-256 of its tokenizer's files, and its stop ids."""
        return self.path / "data.json"

    @property
    def records(self) -> Path:
        """One JSON line for each step and evaluation."""
        return self.path / "records.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Root of the checkpoint store."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def hf(self) -> Path:
        """The exported Hugging Face directory."""
        return self.path / "hf"

    @property
    def initial_model(self) -> Path:
        """The HF directory of a synthetic model, written before step 0."""
        return self.path / "initial_model"

    @property
    def curves(self) -> Path:
        """The picture of the curves."""
        return self.path / "curves.png"

    @property
    def summary(self) -> Path:
        """The closing numbers."""
        return self.path / "summary.json"


def open_run_dir(recipe: Recipe, argv: list[str], device: str = "cpu", rank: int = 0, kernels: Mapping[str, str] | None = None) -> RunDir:
    """Make or reopen the directory that `recipe.run.dir` names.

    argv: the command line, for the record. device: what the actor runs on. rank: only rank 0 writes and locks; the others must
    wait for it (a barrier of the caller) before they use the directory. kernels: key of the recipe -> what runs for it here.
    Raises ValueError when the directory belongs to a different recipe or to other kernels, is in use, holds something else or cannot be
    written.
    """
    path = Path(recipe.run.dir)
    if rank != 0:
        return RunDir(path)
    try:
        return _open(path, recipe, argv, device, kernels or {})
    except OSError as error:
        raise ValueError(f"run.dir {path} cannot be written ({error.strerror}: {error.filename}); set another run.dir") from error


def _open(path: Path, recipe: Recipe, argv: list[str], device: str, kernels: Mapping[str, str]) -> RunDir:
    _refuse_foreign(path)
    path.mkdir(parents=True, exist_ok=True)
    run_dir = RunDir(path, _take_lock(path / "run.lock"))
    if run_dir.recipe.exists():
        if _computed_something(run_dir):
            before = _recorded_kernels(run_dir.environment)
            _refuse_other_recipe(run_dir.recipe, recipe, before.keys() & kernels.keys())
            _refuse_other_kernels(path, before, kernels)
        else:
            # A start that failed its checks leaves no claim: what it wrote beside its recipe came from that recipe.
            shutil.rmtree(run_dir.initial_model, ignore_errors=True)
    write_durably(run_dir.recipe, dump_recipe(recipe))
    line = json.dumps(describe_environment(argv, recipe.run.seed, device, kernels))
    with run_dir.environment.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    return run_dir


def claim_data(
    run_dir: RunDir,
    prompts: Mapping[str, tuple[int, str]],
    tokenizer: Mapping[str, str],
    stop_ids: Sequence[int],
    architecture: Mapping[str, Any],
) -> None:
    """Note which prompts, tokenizer and model the run began with and what ends its completions, or compare with what was noted (rank 0).

    prompts: `data.train` and `data.eval` -> number and fingerprint of the prompts, (0, "") where there are none. tokenizer: file ->
    SHA-256, because prompts do not show what completions are decoded to. stop_ids: partly from files that are not the tokenizer's.
    architecture: what config.json says of the model, because a checkpoint does not hold all of it. Raises ValueError when a start in this
    directory computed something from others. What an older data.json does not hold is not compared.
    """
    now = {key: {"prompts": number, "fingerprint": mark} for key, (number, mark) in prompts.items()}
    if run_dir.data.exists() and _computed_something(run_dir):
        try:
            before = json.loads(run_dir.data.read_text())
        except ValueError as error:
            raise ValueError(f"{run_dir.data} is not JSON ({error}); put it back, or set another run.dir") from error
        if not isinstance(before, dict):
            raise ValueError(f"{run_dir.data} is not a JSON object ({type(before).__name__}); put it back, or set another run.dir")
        _refuse_other_tokenizer(run_dir.path, before.get("tokenizer"), tokenizer)
        if before.get("stop_ids", list(stop_ids)) != list(stop_ids):
            raise ValueError(
                f"the eos_token_ids of run.dir {run_dir.path} were {before['stop_ids']} and are now {list(stop_ids)}. Set eos_token_id in "
                "generation_config.json and config.json of the model back, or start anew with another run.dir"
            )
        told = before.get("architecture", architecture)
        other = [f"{key} was {told.get(key)} and is now {architecture[key]}" for key in architecture if told.get(key) != architecture[key]]
        if other:
            raise ValueError(
                f"config.json of the model of run.dir {run_dir.path} has changed: {'; '.join(other)}. Set these back, or start anew with "
                "another run.dir"
            )
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            listed = "; ".join(f"{key} was {before.get(key)} and is now {now[key]}" for key in changed)
            raise ValueError(
                f"the prompts of run.dir {run_dir.path} have changed: {listed}. Restore the data and the tokenizer of that run, "
                "or start anew with another run.dir"
            )
    noted = {**now, "tokenizer": dict(tokenizer), "stop_ids": list(stop_ids), "architecture": dict(architecture)}
    write_durably(run_dir.data, json.dumps(noted) + "\n")


def _refuse_other_tokenizer(path: Path, before: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """before: None where the latest start noted no tokenizer."""
    if before is None or before == now:
        return
    words = {name: ("missing" if name not in now else "new" if name not in before else "changed") for name in sorted({*before, *now})}
    listed = ", ".join(f"{name} is {word}" for name, word in words.items() if before.get(name) != now.get(name))
    raise ValueError(
        f"the tokenizer of run.dir {path} has changed: {listed}. Restore these files, whose SHA-256 data.json holds, "
        "or start anew with another run.dir"
    )


def _computed_something(run_dir: RunDir) -> bool:
    """Whether a start in this directory got as far as a record, a checkpoint or warm-started weights."""
    has_records = run_dir.records.exists() and run_dir.records.stat().st_size > 0
    has_checkpoints = run_dir.checkpoints.is_dir() and any(run_dir.checkpoints.iterdir())
    return has_records or has_checkpoints or (run_dir.path / "warm_start").exists()


def differing_keys(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Give dotted key -> (old, new) where two recipes differ and a run may not.

    `run.steps` may differ unless the learning rate decays over it: a longer run would then have another curve from its first step on.
    """
    before, after = flat_recipe(old), flat_recipe(new)
    differing = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    steps_shape_decay = old.optim.decay is not Decay.constant and old.optim.decay_steps == 0
    return {key: pair for key, pair in differing.items() if not may_change(key) or (key == "run.steps" and steps_shape_decay)}


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"run.dir {path} is a file; name a directory")
    if path.is_dir() and not (path / "recipe.yaml").exists():
        others = sorted(p.name for p in path.iterdir() if p.name not in ("run.lock", "recipe.yaml.part"))
        if others:
            raise ValueError(f"run.dir {path} holds {', '.join(others[:5])} and no recipe.yaml: it is not a run; name another directory")


def _take_lock(path: Path) -> TextIO | None:
    file = path.open("a+")
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                file.close()
                logger.warning("%s cannot be locked (%s): take care that only one run uses this directory", path, error)
                return None
            if time.monotonic() > deadline:
                file.seek(0)
                holder = file.read().strip()
                file.close()
                way_out = "wait for it, stop it, or set another run.dir"
                raise ValueError(f"run.dir {path.parent} is in use by process {holder}; {way_out}") from error
        time.sleep(0.1)
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _refuse_other_recipe(path: Path, recipe: Recipe, resolved: Set[str]) -> None:
    """resolved: keys that are compared by what they stand for, so that a name may take the place of `auto`."""
    old_words = [f"{key}={value}" for key, value in _BEFORE_THE_KEY.items() if f"{key.rpartition('.')[2]}:" not in path.read_text()]
    differing = {key: pair for key, pair in differing_keys(load_recipe(path, old_words), recipe).items() if key not in resolved}
    if differing:
        listed = "; ".join(f"{key} was {old!r} and is now {new!r}" for key, (old, new) in differing.items())
        raise ValueError(
            f"run.dir {path.parent} belongs to another recipe: {listed}. Set these back and name run.dir={path.parent}, or set another "
            "run.dir (a run may change only how long it is and what it saves and logs)"
        )


def _recorded_kernels(path: Path) -> Mapping[str, str]:
    """The kernels of the latest start that was let in: what the directory's records were computed with; empty where none noted them."""
    found: Mapping[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], start=1):
        try:
            found = json.loads(line).get("kernels") or found
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is not JSON ({error}); mend or remove that line") from error
    if "precision.attention" in found:  # a start that noted no backward had no other
        only = "reference" if found["precision.attention"] == "reference" else "flash2"
        return {"precision.attention_backward": only, **found}
    return found


def _refuse_other_kernels(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = [key for key in now if key in before and before[key] != now[key]]
    if changed:
        listed = "; ".join(f"{key} ran {before[key]} and would now run {now[key]}" for key in changed)
        words = " ".join(f"{key}={before[key]}" for key in changed)
        raise ValueError(
            f"run.dir {path} was computed with other kernels: {listed}. Go on with {words} run.dir={path} where that can run, "
            "or start anew with another run.dir"
        )
