"""What a conversion may write: one class for each kind of checkpoint, and `Target`, which says which one and how.

A kind says what is stored where, which file format its tensors go into, and which files make the directory a checkpoint once all tensors
are there. Adding a kind is adding a class to `KINDS` here and an opener in `checkpoint`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from conversion.architecture import ModelArchitecture
from conversion.assemble import tensor_specs
from conversion.checkpoint import CARRIED, INDEX
from conversion.files import ShardWriter, TensorSpec, TensorWriter
from conversion.layout import ParallelLayout, check_layout_of
from conversion.output import OutputDirectory
from conversion.plan import Plan
from conversion.shards import StoredTensor, hf_tensors, megatron_tensors, torch_dist_tensors

MAX_SHARD_BYTES = 5 * 10**9
FileOf = dict[tuple[str, str], str]
"""(location, tensor name) -> file."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to write."""

    kind: str
    """`hf`, `megatron` or `torch_dist`."""
    layout: ParallelLayout | None = None
    """Of a `megatron` target; the other kinds are the same for every layout."""
    cast: str | None = None
    """None keeps the precision. `bf16`: FP8 -> BF16. `fp32`, `ue8m0`: BF16 -> FP8 with such scales."""
    bf16_layers: tuple[str, ...] = ()
    """Globs of linears that stay BF16 in BF16 -> FP8."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """Of a `hf` or `torch_dist` target: a file has no more, but for a single larger tensor."""
    overwrite: bool = False
    """Replace a checkpoint that stands at the target path."""

    def __post_init__(self) -> None:
        """Check the combination."""
        if self.kind not in KINDS:
            raise ValueError(f"target kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        if (self.layout is None) == (self.kind == "megatron"):
            raise ValueError(f"a {self.kind} target {'needs a layout' if self.kind == 'megatron' else 'has no layout'}")
        if self.cast not in (None, "bf16", "fp32", "ue8m0"):
            raise ValueError(f"cast is {self.cast!r}; it must be bf16, fp32, ue8m0 or nothing")
        if self.bf16_layers and self.cast not in ("fp32", "ue8m0"):
            raise ValueError(
                f"--bf16-layer {', '.join(self.bf16_layers)} (bf16_layers) names linears that quantising leaves out, but nothing is "
                "quantised; add --cast fp8 (cast='fp32' or 'ue8m0') or leave it out"
            )
        if self.max_shard_bytes < 1:
            raise ValueError(f"a shard of {self.max_shard_bytes} bytes holds nothing; --max-shard-gb (max_shard_bytes) must be above 0")


class TargetKind(ABC):
    """How one kind of checkpoint is laid out and written."""

    carried_into: ClassVar[str]
    """Where config, tokenizer and generation files go, inside the directory."""

    @abstractmethod
    def describe(self, arch: ModelArchitecture, target: Target, fp8: frozenset[str]) -> tuple[list[StoredTensor], FileOf]:
        """Return what is stored and in which files; raises ValueError where the model cannot be stored so."""

    def open_file(self, path: Path, specs: list[TensorSpec]) -> TensorWriter:
        """Create one file of tensors; safetensors by default."""
        return ShardWriter(path, specs, {"format": "pt"})

    @abstractmethod
    def finish(self, output: OutputDirectory, arch: ModelArchitecture, plan: Plan, file_of: Mapping[tuple[str, str], str]) -> None:
        """Write what the directory needs beside its tensors and the carried files."""


class HuggingFace(TargetKind):
    """A Hugging Face directory, BF16 or block FP8."""

    carried_into = ""

    def describe(self, arch: ModelArchitecture, target: Target, fp8: frozenset[str]) -> tuple[list[StoredTensor], FileOf]:
        """Deal the canonical tensors over files."""
        check_layout_of(arch, ParallelLayout(), fp8 if target.cast is not None else frozenset())
        tensors = hf_tensors(arch, fp8)
        return tensors, hf_shard_files(tensors, target.max_shard_bytes)

    def finish(self, output: OutputDirectory, arch: ModelArchitecture, plan: Plan, file_of: Mapping[tuple[str, str], str]) -> None:
        """Write the index of several files."""
        files: dict[str, list[TensorSpec]] = {}
        for target in (t.target for t in plan.targets):
            files.setdefault(file_of[target.location, target.name], []).extend(tensor_specs(target))
        if len(files) > 1:
            output.write_text(INDEX, hf_index(files))


class MegatronRanks(TargetKind):
    """One file for each model chunk of each Megatron rank, BF16 or block FP8."""

    carried_into = CARRIED

    def describe(self, arch: ModelArchitecture, target: Target, fp8: frozenset[str]) -> tuple[list[StoredTensor], FileOf]:
        """Cut the model as the layout says."""
        assert target.layout is not None
        check_layout_of(arch, target.layout, fp8)
        tensors = megatron_tensors(arch, target.layout, fp8)
        return tensors, {(t.location, t.name): f"{t.location}.safetensors" for t in tensors}

    def finish(self, output: OutputDirectory, arch: ModelArchitecture, plan: Plan, file_of: Mapping[tuple[str, str], str]) -> None:
        """Write nothing: the manifest tells the layout."""


class TorchDist(TargetKind):
    """A `torch_dist` directory of megatron.core.dist_checkpointing, BF16."""

    carried_into = CARRIED

    def describe(self, arch: ModelArchitecture, target: Target, fp8: frozenset[str]) -> tuple[list[StoredTensor], FileOf]:
        """Deal the global tensors over files."""
        if fp8 and target.cast is not None:
            raise ValueError(
                "a torch_dist checkpoint holds the actor's BF16 parameters, which nothing may quantise; leave --cast fp8 "
                f"(cast={target.cast!r}) out, or write --format ranks (kind='megatron')"
            )
        if fp8:
            raise ValueError(
                f"a torch_dist checkpoint holds the actor's BF16 parameters, but {len(fp8)} linears would be FP8; dequantise them with "
                "--cast bf16 (cast='bf16'), or keep the bytes with --format ranks (kind='megatron')"
            )
        check_layout_of(arch, ParallelLayout(), fp8)
        tensors = torch_dist_tensors(arch)
        numbers = _deal(tensors, target.max_shard_bytes)
        return tensors, {(t.location, t.name): f"__0_{n}.distcp" for t, n in zip(tensors, numbers, strict=True)}

    def open_file(self, path: Path, specs: list[TensorSpec]) -> TensorWriter:
        """Create a `.distcp` file."""
        from conversion.torch_dist_writer import TorchDistWriter

        return TorchDistWriter(path, specs)

    def finish(self, output: OutputDirectory, arch: ModelArchitecture, plan: Plan, file_of: Mapping[tuple[str, str], str]) -> None:
        """Write `.metadata`, `metadata.json` and `common.pt`."""
        from conversion.torch_dist_writer import write_directory_files

        written = {name: entry["tensors"] for name, entry in output.done.items()}
        write_directory_files(written, arch.num_layers, f"__0_{len(written)}.distcp", output.write_bytes)


KINDS: dict[str, TargetKind] = {"hf": HuggingFace(), "megatron": MegatronRanks(), "torch_dist": TorchDist()}


def hf_shard_files(tensors: list[StoredTensor], max_shard_bytes: int) -> FileOf:
    """Deal tensors, in order, over files of at most `max_shard_bytes` (a larger tensor has its own); scales stay with their codes."""
    numbers = _deal(tensors, max_shard_bytes)
    count = numbers[-1] + 1
    names = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return {(t.location, t.name): names[n] for t, n in zip(tensors, numbers, strict=True)}


def _deal(tensors: list[StoredTensor], max_bytes: int) -> list[int]:
    """Return the number of the file of each tensor."""
    numbers: list[int] = []
    number, filled = 0, 0
    for tensor in tensors:
        if filled and filled + tensor.num_bytes > max_bytes:
            number, filled = number + 1, 0
        filled += tensor.num_bytes
        numbers.append(number)
    return numbers


def hf_index(files: Mapping[str, Iterable[TensorSpec]]) -> str:
    """Return the index of several files: total_size counts tensor bytes, scales included; weight_map names each tensor's file.

    files: file name -> what it holds.
    """
    held = [(spec, name) for name, specs in files.items() for spec in specs]
    weight_map = {spec.name: name for spec, name in held}
    assert len(weight_map) == len(held), f"{len(held)} tensors have {len(weight_map)} names"
    total = sum(spec.num_bytes for spec, _ in held)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"
