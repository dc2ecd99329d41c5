"""One JSON line for each step and each evaluation, written once whatever interrupts the run.

Enters: `append(kind, step, values)`. Leaves: `records.jsonl`, each line durable before `append` returns, and JSON to
every reader: numbers are finite. On reopening after a resume at
step s, lines of later steps are dropped: they will be written again by the steps that run again, so no step is there twice.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetrl_megatron.run.manifest import sync_directory


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read every record; a last line cut by a kill is left out, any other unreadable line raises ValueError with its number."""
    if not path.exists():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    del tail  # empty, or cut short: a record counts from its newline on
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["kind"], record["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {number} is not a record ({error}); mend or remove that line") from error
        records.append(record)
    return records


class RecordFile:
    """Appends records. path: the file. resumed_step: the last step of the checkpoint that the run goes on from, 0 for a fresh start."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Open the file and drop what comes after `resumed_step`."""
        kept = [r for r in read_records(path) if r["step"] <= resumed_step]
        self._seen = {(r["kind"], r["step"]) for r in kept}
        partial = path.with_name(path.name + ".part")
        with partial.open("w") as file:
            file.writelines(json.dumps(r) + "\n" for r in kept)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync_directory(path.parent)
        self.path = path
        self._file = path.open("a")

    def has(self, kind: str, step: int) -> bool:
        """Say whether this record is already there, for example the evaluation at the step of the checkpoint."""
        return (kind, step) in self._seen

    def append(self, kind: str, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write one record and give it back.

        kind: "step", "eval" or another name. step: steps completed, 0 before the first. values: plain JSON, no "kind" or "step" in it.
        Raises ValueError for NaN and infinities, which are no JSON; rewards and the numbers of a step are refused before they get here.
        """
        assert not self.has(kind, step), f"record {kind} of step {step} is already in {self.path}"
        assert not {"kind", "step"} & set(values), values
        record = {"kind": kind, "step": step, **values}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._seen.add((kind, step))
        return record

    def close(self) -> None:
        """Close the file."""
        self._file.close()
