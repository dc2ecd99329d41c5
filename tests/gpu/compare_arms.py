"""Reward, mismatch and seconds of the arms that vllm_h200.sh ran, beside each other.

python tests/gpu/compare_arms.py OUT: reads OUT/ARM/records.jsonl, prints a table, writes OUT/arms.json. Exit code 1 where the jetrl arm's
mean mismatch is not at least 10 times below fp8_rollout's.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

WANTED_RATIO = 10.0


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what one arm's records say."""
    steps = [r for r in records if r["kind"] == "step"]
    evals = [r["reward"] for r in records if r["kind"] == "eval"]
    phases = sorted({name for r in steps for name in r["seconds"]})
    # The first step's seconds hold the start of the servers and the first use of every kernel.
    seconds = {name: mean(r["seconds"].get(name, 0.0) for r in steps[1:] or steps) for name in phases}
    return {
        "steps": len(steps),
        "reward_first_5": mean(r["reward"] for r in steps[:5]),
        "reward_last_5": mean(r["reward"] for r in steps[-5:]),
        "eval": evals,
        "logprob_abs_diff": mean(r["logprob_abs_diff"] for r in steps),
        "logprob_abs_diff_max": max(r["logprob_abs_diff_max"] for r in steps),
        "k3_kl": mean(r["k3_kl"] for r in steps),
        "seconds": seconds,
    }


def main(out: Path) -> int:
    """Compare; returns the exit code."""
    arms = {}
    for path in sorted(out.glob("*/records.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        if any(r["kind"] == "step" for r in records):
            arms[path.parent.name] = summarise(records)
    (out / "arms.json").write_text(json.dumps(arms, indent=1) + "\n")
    for arm, row in arms.items():
        print(arm, json.dumps(row))
    if not {"jetrl", "fp8_rollout"} <= arms.keys():
        print("jetrl and fp8_rollout are not both there")
        return 1
    ratio = arms["fp8_rollout"]["logprob_abs_diff"] / max(arms["jetrl"]["logprob_abs_diff"], 1e-12)
    print(f"mismatch of fp8_rollout over jetrl: {ratio:.1f} (wanted: at least {WANTED_RATIO:g})")
    return 0 if ratio >= WANTED_RATIO else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
