"""The end of a run: a table to read, the curves to look at and `summary.json` to compute with.

Enters: the records of the whole run, over all its starts. Leaves: `curves.png`, `summary.json`, the printed table and, as the very last
line, the path of the summary. Every number here is read from the records; nothing is measured. matplotlib is imported only here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetrl_megatron.run.manifest import write_durably
from jetrl_megatron.run.phases import BESIDE, PHASES
from jetrl_megatron.run.records import read_records
from jetrl_megatron.run.run_dir import RunDir

Record = Mapping[str, Any]


def summarise(records: Sequence[Record], arm: str, total_s: float) -> dict[str, Any]:
    """Condense the records.

    total_s: wall seconds of this start. `reward_before` and `reward_after` are the first and last "eval" record's `reward`, null
    without one. `logprob_abs_diff_mean` is the mean over steps of each step's mean over tokens, `logprob_abs_diff_max` the largest of any
    token. `staleness_mean` is the mean over steps of each step's mean over tokens, in rollout batches.
    """
    steps = [r for r in records if r["kind"] == "step"]
    evals = [r for r in records if r["kind"] == "eval"]
    seconds = {name: sum(r["seconds"].get(name, 0.0) for r in steps) for name in (*PHASES, BESIDE, "total")}
    return {
        "arm": arm,
        "num_steps": len(steps),
        "reward_before": evals[0]["reward"] if evals else None,
        "reward_after": evals[-1]["reward"] if evals else None,
        "train_reward_first": steps[0]["reward"] if steps else None,
        "train_reward_last": steps[-1]["reward"] if steps else None,
        "logprob_abs_diff_mean": sum(r["logprob_abs_diff"] for r in steps) / len(steps) if steps else None,
        "logprob_abs_diff_max": max((r["logprob_abs_diff_max"] for r in steps), default=None),
        "token_mult_prob_error_max": max((r["token_mult_prob_error"] for r in steps), default=None),
        "k3_kl_max": max((r["k3_kl"] for r in steps), default=None),
        # Records from before the key are of runs that drew nothing ahead.
        "staleness_mean": sum(r.get("staleness", 0.0) for r in steps) / len(steps) if steps else None,
        "seconds": {name: value for name, value in seconds.items() if value},
        "total_s": total_s,
    }


def summary_table(summary: Mapping[str, Any]) -> str:
    """Lay the summary out for reading."""
    rows = [
        ("arm", summary["arm"]),
        ("steps", summary["num_steps"]),
        ("reward before -> after", f"{_number(summary['reward_before'])} -> {_number(summary['reward_after'])}"),
        ("mismatch, nats: mean, max", f"{_number(summary['logprob_abs_diff_mean'])}, {_number(summary['logprob_abs_diff_max'])}"),
    ]
    if summary["staleness_mean"]:
        rows.append(("staleness, rollout batches: mean", _number(summary["staleness_mean"])))
    whole = summary["seconds"].get("total", 0.0)
    for name, value in summary["seconds"].items():
        label = f"seconds {name}" + (", beside the others" if name == BESIDE else "")
        rows += [(label, f"{value:.2f} ({value / whole:.0%})")] if name != "total" else []
    rows += [("seconds of all steps", f"{whole:.2f}"), ("seconds of this start", f"{summary['total_s']:.2f}")]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def draw_curves(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw reward, mismatch, length and seconds by phase over the steps into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [r for r in records if r["kind"] == "step"]
    evals = [r for r in records if r["kind"] == "eval"]
    x = [r["step"] for r in steps]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    reward, mismatch, length, seconds = figure.subplots(2, 2).flat
    reward.plot(x, [r["reward"] for r in steps], label="training samples")
    if evals:
        reward.plot([r["step"] for r in evals], [r["reward"] for r in evals], "o--", label="held-out prompts")
    reward.set_title("mean reward")
    reward.legend()
    mismatch.plot(x, [r["logprob_abs_diff_max"] for r in steps], label="largest")
    mismatch.plot(x, [r["logprob_abs_diff"] for r in steps], label="mean")
    mismatch.set_yscale("symlog", linthresh=1e-8)
    mismatch.set_ylim(bottom=0.0)
    mismatch.set_title("|log-prob of rollout - of actor|, nats a token")
    mismatch.legend()
    length.plot(x, [r["response_toks"] for r in steps])
    length.set_title("mean response length, tokens")
    names = [name for name in PHASES if any(r["seconds"].get(name) for r in steps)]
    if names:
        seconds.stackplot(x, [[r["seconds"].get(name, 0.0) for r in steps] for name in names], labels=names)
        seconds.legend(fontsize="small")
    seconds.set_title("seconds a step")
    for axes in (reward, mismatch, length, seconds):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def close_run(run_dir: RunDir, arm: str, total_s: float, *, json_lines: bool = False, show: Callable[[str], None] = print) -> Path:
    """Write the curves and the summary, show the table and the summary's path last; gives that path (rank 0)."""
    records = read_records(run_dir.records)
    summary = summarise(records, arm, total_s)
    draw_curves(records, run_dir.curves, f"{run_dir.path.name} ({arm})")
    write_durably(run_dir.summary, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    show(json.dumps({"kind": "summary", **summary}, allow_nan=False) if json_lines else summary_table(summary))
    show(str(run_dir.summary))
    return run_dir.summary


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
