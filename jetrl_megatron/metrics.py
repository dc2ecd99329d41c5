"""One record a step, to everybody who wants it: the JSONL file, TensorBoard, W&B and the progress line.

Enters: `log(kind, step, values)` on rank 0. Leaves: the durable record (`run/records.py`), scalars under `kind/name`, and one printed line.
A "step" record must hold the names in STEP_KEYS; "seconds" maps phase to seconds (`run/phases.py`), and with vLLM servers "push_seconds"
maps the parts of the step's weight push, all of them in the phase "sync", to seconds (`rollout/laps.py`). TensorBoard runs where it is
installed; W&B only when asked for, and then it is an error that it is missing.
"""

import json
import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from jetrl_megatron.config import RunConfig
from jetrl_megatron.run.phases import BESIDE, PHASES
from jetrl_megatron.run.records import RecordFile
from jetrl_megatron.run.run_dir import RunDir

logger = logging.getLogger(__name__)

_MISMATCH = ("logprob_abs_diff", "logprob_abs_diff_max", "token_mult_prob_error", "k3_kl")
STEP_KEYS = ("reward", "response_toks", *_MISMATCH, "staleness", "staleness_max", "seconds")
"""reward: mean over samples. response_toks: mean tokens. logprob_abs_diff, _max: mean and largest |rollout - actor|, nats.
token_mult_prob_error, k3_kl: as defined in grpo/mismatch.py, which gives `mismatch_by_position` too. staleness, _max: mean and largest over
tokens, in rollout batches (grpo/staleness.py). seconds: by phase, and of the draw beside them."""


class Sink(Protocol):
    """Somebody who draws scalars."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the scalars of one step."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoardSink:
    """Event files under `folder`; those of steps after `resumed_step` are hidden, because they run again."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        """Open the writer."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add each scalar."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """A W&B run whose id is the run directory's name, so that a restart goes on in it."""

    def __init__(self, folder: Path) -> None:
        """Start or continue the run."""
        import wandb

        self._run = wandb.init(project="jetrl", id=folder.resolve().name, dir=str(folder), resume="allow")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log all scalars of the step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def check_sinks(run: RunConfig) -> None:
    """Raise ValueError where W&B is asked for and not installed; called before a process starts, not after an hour of warm start."""
    if run.wandb and find_spec("wandb") is None:
        raise ValueError("run.wandb is true, but the package wandb is not installed; install the extra `log`, or set run.wandb=false")


def open_sinks(run: RunConfig, run_dir: RunDir, resumed_step: int) -> list[Sink]:
    """Open what the recipe asks for; TensorBoard is left out, with one line in the log, where it is not installed."""
    check_sinks(run)
    sinks: list[Sink] = []
    if run.tensorboard and find_spec("tensorboard") is None:
        logger.info("tensorboard is not installed; the curves are in %s and %s", run_dir.records, run_dir.curves)
    elif run.tensorboard:
        sinks.append(TensorBoardSink(run_dir.tensorboard, resumed_step))
    if run.wandb:
        sinks.append(WandbSink(run_dir.path))
    return sinks


class Metrics:
    """Rank 0's one place for numbers.

    run: how long the run is and who listens. resumed_step: of the checkpoint the run goes on from, 0 for a fresh start.
    json_lines: print records as JSON instead of for reading. show: where printed lines go.
    """

    def __init__(
        self, run: RunConfig, run_dir: RunDir, resumed_step: int, *, json_lines: bool = False, show: Callable[[str], None] | None = None
    ) -> None:
        """Open the record file and the sinks."""
        self._num_steps = run.steps
        self._json_lines = json_lines
        self._show = show or _show
        self._records = RecordFile(run_dir.records, resumed_step)
        self._sinks = open_sinks(run, run_dir, resumed_step)

    def has(self, kind: str, step: int) -> bool:
        """Say whether this record was written by an earlier start."""
        return self._records.has(kind, step)

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write a record and show it.

        kind: "step" (all of STEP_KEYS), "eval" ("reward": mean over held-out prompts) or another. step: steps completed so far.
        """
        assert kind != "step" or set(STEP_KEYS) <= set(values), f"missing from the step record: {set(STEP_KEYS) - set(values)}"
        record = self._records.append(kind, step, values)
        scalars = _scalars(values, kind + "/")
        for sink in self._sinks:
            sink.scalars(step, scalars)
        self._show(json.dumps(record, allow_nan=False) if self._json_lines else progress_line(record, self._num_steps))

    def close(self) -> None:
        """Close the file and the sinks."""
        self._records.close()
        for sink in self._sinks:
            sink.close()


def progress_line(record: Mapping[str, Any], num_steps: int) -> str:
    """Say in one line what happened: reward, length, mismatch and seconds by phase for a step; every number for another kind.

    A step that learned from older tokens says how old, and one that drew beside the update how long that took.
    """
    head = f"{record['kind']} {record['step']}/{num_steps}"
    if record["kind"] != "step":
        return f"{head}  " + "  ".join(f"{name} {value:.4g}" for name, value in _scalars(record, "").items() if name != "step")
    mismatch = f"mismatch {record['logprob_abs_diff']:.2e} (max {record['logprob_abs_diff_max']:.2e})"
    seconds = record["seconds"]
    times = "  ".join(f"{name} {seconds[name]:.2f}" for name in PHASES if name in seconds)
    age = f"  staleness {record['staleness']:.2f}" if record["staleness_max"] else ""
    beside = f"  beside them: draw {seconds[BESIDE]:.2f}" if BESIDE in seconds else ""
    numbers = f"reward {record['reward']:.3f}  length {record['response_toks']:.1f}  {mismatch}{age}"
    return f"{head}  {numbers}  |  {seconds['total']:.2f} s: {times}{beside}"


def _scalars(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = float(value)
    return found


def _show(line: str) -> None:
    print(line, flush=True)
