"""Weights by way of a directory: for CPUs, for pools on other machines with a shared file system, and for servers that come back.

Enters: the stage wires of all pipeline stages. Leaves: `vNNNNNNNN/`, a Hugging Face directory with one safetensors file a stage, complete
or not there (written beside and renamed), which live servers reload from and restarted ones start on. Only the current version is kept: the
one before goes when every server has verified its successor.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from conversion.assemble import tensor_specs
from conversion.checkpoint import INDEX
from conversion.files import SafetensorsFile, ShardWriter, TensorSpec
from conversion.targets import hf_index
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.contracts import WeightVersion
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.fingerprint import algorithm_for
from jetrl_megatron.rollout.laps import Laps
from jetrl_megatron.rollout.published import Published
from jetrl_megatron.rollout.vllm_client import EngineClient
from jetrl_megatron.rollout.vllm_engine import RunGroup
from jetrl_megatron.rollout.vllm_pool import ServerPool
from jetrl_megatron.sync.transport import Share, StageRecord, engine_config, merge_shares, write_model_files
from jetrl_megatron.sync.wire import StageWire


class DiskTransport:
    """Transport over a directory that every stage leader and every server sees.

    root: where versions are written. source_dir: the run's HF directory. actor: whose ranks write. group: all ranks of the run. engine_tp:
    TP degree of the servers. timeout_s: for one server's reload.
    """

    def __init__(self, root: Path, source_dir: Path, actor: Actor, group: RunGroup, *, engine_tp: int, timeout_s: float) -> None:
        """Remove what an earlier start left; rank 0 does."""
        self._root, self._source_dir, self._ranks, self._group = root, source_dir, actor.ranks, group
        self._engine_tp, self._timeout_s = engine_tp, timeout_s
        if group.rank == 0:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True, mode=0o700)

    def push(self, wire: StageWire, pool: ServerPool | None, step: int, laps: Laps) -> WeightVersion | None:
        """Write a version, let every server reload and verify it, then remove the one before. See `Transport.push`."""
        final = self._root / f"v{step:08d}"
        partial = final.with_name(final.name + ".part")
        if self._group.rank == 0:
            partial.mkdir(mode=0o700, exist_ok=True)
        self._group.from_first(None)  # the directory is there
        share: Share | OSError | None = None
        if self._ranks.dp_rank == 0:
            try:
                share = self._write_stage(wire, partial)
            except OSError as error:  # a full disk: rank 0 hears of it in the place of a share, for the others wait for its word
                share = error
        shares = self._group.to_first(share)
        if isinstance(share, OSError):
            raise share
        if pool is None:
            return None
        assert shares is not None
        for given in shares:
            if isinstance(given, OSError):
                raise RunFailure(f"a pipeline stage could not write its weights: {given}")
        expected = merge_shares(wire, [s for s in shares if s is not None], step)
        algorithm = algorithm_for(wire.device)
        published = Published(step=step, directory=final, has_weights=True, algorithm=algorithm, expected=expected.at_hand())
        self._publish(wire, partial, final)
        laps.lap("write")
        pool.update(published, self._load)
        for old in self._root.iterdir():
            if old != final:
                shutil.rmtree(old)
        return expected.version

    def close(self) -> None:
        """Nothing is held between pushes; the directory stays for servers that come back."""

    def _write_stage(self, wire: StageWire, partial: Path) -> Share | None:
        """Write this stage's file on its leader and return its share; the stage's other ranks take part in gathering.

        Raises OSError naming the file where there is no room, when the stage has gathered all the same.
        """
        if not wire.receives:
            for _ in wire.stream():
                raise AssertionError("a rank that does not receive got a tensor")
            return None
        record = StageRecord(wire, self._engine_tp)
        specs = [spec for target in wire.specs() for spec in tensor_specs(target)]
        stream = record.watch(wire.stream())
        try:
            writer = ShardWriter(partial / stage_file(self._ranks.pp_rank, self._ranks.pp), specs, {"format": "pt"})
            try:
                for name, tensor in stream:
                    writer.write(name, _bytes_of(tensor))
            finally:
                writer.close(sync=False)  # a crash of this machine ends the servers too; nothing else reads these files
        finally:
            for _ in stream:  # where the disk is full: the stage's other ranks are in the middle of a gather
                pass
        return record.share()

    def _publish(self, wire: StageWire, partial: Path, final: Path) -> None:
        """Complete the directory and rename it to its place."""
        write_model_files(partial, engine_config(wire.arch, wire.fp8, self._source_dir), self._source_dir)
        names = sorted(path.name for path in partial.glob("*.safetensors"))
        assert len(names) == self._ranks.pp, (names, self._ranks.pp)
        if len(names) > 1:
            (partial / INDEX).write_text(hf_index({name: _held(partial / name) for name in names}))
        if final.exists():  # the same version once more
            shutil.rmtree(final)
        os.replace(partial, final)

    def _load(self, client: EngineClient, published: Published) -> None:
        client.rpc("reload_weights", {"weights_path": str(published.directory)}, self._timeout_s)


def stage_file(stage: int, num_stages: int) -> str:
    """Return the file name of a pipeline stage, as Hugging Face names shards."""
    return "model.safetensors" if num_stages == 1 else f"model-{stage + 1:05d}-of-{num_stages:05d}.safetensors"


def _held(path: Path) -> list[TensorSpec]:
    file = SafetensorsFile(path)
    file.close()
    return [TensorSpec(name, entry.dtype, entry.shape) for name, entry in file.entries.items()]


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
