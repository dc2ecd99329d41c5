"""What every transport does: take a stage's stream, bring it to the pool, and say what must have arrived.

Enters: `StageWire` on every rank, the pool on rank 0. Leaves: the version on rank 0, after the pool has verified it. The names that passed
are checked against what the model must have, before engines are held to them.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from conversion.architecture import ModelArchitecture, read_config
from conversion.names import check_names
from conversion.output import carried_files
from conversion.quantization_config import quantization_config
from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.rollout.fingerprint import algorithm_for
from jetrl_megatron.rollout.laps import Laps
from jetrl_megatron.rollout.published import Expected, Fingerprints, Rectangles
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.sync.wire import StageWire

Share = dict[str, Any]
"""What one stage tells rank 0 of what it sent: names, expected rectangles by engine rank, rectangles with negative zeros."""


class Transport(Protocol):
    """Brings one version to every server. `push` is called on all ranks together."""

    def push(self, wire: StageWire, pool: ServerPool | None, step: int, laps: Laps) -> WeightVersion | None:
        """Send, load and verify; returns the version on rank 0, None elsewhere.

        laps: gets the parts of a push that are not the pool's. Raises on rank 0 and on the rank where it happened: WeightMismatch naming
        tensors, RuntimeError where no server is left.
        """
        ...

    def close(self) -> None:
        """Let go of what is held between pushes; the servers still run."""
        ...


class StageRecord:
    """Watches a stage's stream: the names that passed and their fingerprints.

    wire: of the stage. engine_tp: TP degree of the engines.
    """

    def __init__(self, wire: StageWire, engine_tp: int) -> None:
        """Start with nothing seen."""
        self._prints = Fingerprints(wire.arch, engine_tp, wire.fp8, algorithm_for(wire.device), wire.engine_plans)
        self._resident = wire.resident
        self._names: list[str] = []

    def watch(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass a stream on and hash each tensor behind that: none waits for its own hash. The stream must be taken to its end.

        Nobody writes to a tensor before `share`: many are hashed together, some as late as there.
        """
        for name, tensor in stream:
            self._names.append(name)
            yield name, tensor
            self._prints.add(name, tensor, resident=name in self._resident)

    def share(self) -> Share:
        """Wait for the hashes and return what rank 0 needs to know."""
        expected, unsigned = self._prints.take()
        return {"names": self._names, "expected": expected, "unsigned": unsigned}


def merge_shares(wire: StageWire, shares: list[Share], step: int) -> Expected:
    """Put the stages' shares together into what every engine rank must hold.

    Raises ValueError naming tensors that no stage sent, and tensors that the model does not have.
    """
    check_sent(wire, [name for share in shares for name in share["names"]], step)
    expected: list[Rectangles] = [{} for _ in shares[0]["expected"]]
    unsigned: Rectangles = {}
    for share in shares:
        for rank, rectangles in enumerate(share["expected"]):
            expected[rank].update(rectangles)
        unsigned.update(share["unsigned"])
    return Expected(version=WeightVersion(step, digest_of_rectangles(expected)), by_rank=tuple(expected), unsigned=unsigned)


def check_sent(wire: StageWire, names: Sequence[str], step: int) -> None:
    """Check the names of all stages together; raises ValueError naming tensors that are missing, and those that the model does not have."""
    check_names(f"weight push of version {step}", wire.described(), names)
    assert len(names) == len(set(names)), "a tensor is sent by two stages"


def digest_of_rectangles(expected: list[Rectangles]) -> str:
    """Return one SHA-256 over the names and fingerprints of everything that engines must hold."""
    return hashlib.sha256(json.dumps(expected, sort_keys=True).encode()).hexdigest()


def engine_config(arch: ModelArchitecture, fp8: frozenset[str], source_dir: Path) -> dict[str, Any]:
    """Return config.json of the engines: the run's own, saying which linears are FP8."""
    config = read_config(source_dir)
    config.pop("quantization_config", None)
    if fp8:
        config["quantization_config"] = quantization_config(arch, fp8)
    return config


def write_model_files(directory: Path, config: Mapping[str, Any], source_dir: Path) -> None:
    """Write config.json and copy tokenizer and generation files, so that a server can start on `directory`."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in carried_files(source_dir):
        target = directory / path.relative_to(source_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name != "config.json":
            shutil.copyfile(path, target)
    (directory / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
