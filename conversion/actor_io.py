"""What the actor calls: its own shards out of a Hugging Face directory, and its own shards back into one. No process gathers the model.

In: each rank calls `load_hf_into_rank` for each of its model chunks and gets the BF16 parameters by Megatron name.
Out: each rank calls `write_rank_shards` on a directory that all ranks see; after a barrier one rank calls `merge_to_hf`, which streams the
shards into a Hugging Face directory with bounded memory. Layer numbers in names are local to the model chunk, as Megatron-core has them.
Left out: optimizer state and FP32 masters (the actor's own checkpoint).
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from conversion.architecture import ModelArchitecture
from conversion.assemble import assemble
from conversion.checkpoint import Checkpoint, open_checkpoint, open_rank_shards
from conversion.convert import Target, prepare, publish
from conversion.files import ShardWriter, TensorSpec
from conversion.layout import ParallelLayout, check_layout
from conversion.names import check_names
from conversion.plan import make_plan
from conversion.shards import StoredTensor, megatron_tensors, rank_key, rank_keys

_log = logging.getLogger(__name__)


def rank_tensor_shapes(
    arch: ModelArchitecture, layout: ParallelLayout, pp_rank: int, tp_rank: int, vp_stage: int = 0
) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters of one model chunk on one rank, in the order of the forward pass."""
    return {stored.name: stored.shape for stored in _chunk_tensors(arch, layout, pp_rank, tp_rank, vp_stage)}


def load_hf_into_rank(
    hf_dir: str | Path, arch: ModelArchitecture, layout: ParallelLayout, *, pp_rank: int, tp_rank: int, vp_stage: int = 0
) -> dict[str, torch.Tensor]:
    """Read the parameters of one model chunk of one rank from a Hugging Face directory.

    Returns Megatron parameter name -> BF16 tensor of the local shape, on the CPU, in the order of the forward pass; vocabulary rows
    behind vocab_size are zero. A block-FP8 directory is dequantised, and a warning says that masters then start from such values.
    Raises ValueError for an illegal layout, an `arch` that is not that of config.json, and missing, spare or damaged tensors.
    """
    check_layout(arch, layout)
    source = open_checkpoint(hf_dir)
    try:
        if source.arch != arch:
            raise ValueError(
                f"{hf_dir}/config.json describes {source.arch}, but the actor was built as {arch}; use one and the same config"
            )
        if source.fp8:
            _log.warning(
                "%s is an FP8 checkpoint: parameters and FP32 masters start from dequantised values, not from the weights it was made of",
                hf_dir,
            )
        return _load(source, _chunk_tensors(arch, layout, pp_rank, tp_rank, vp_stage))
    finally:
        source.close()


def _load(source: Checkpoint, tensors: list[StoredTensor]) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = {}
    for target_plan in make_plan(source.tensors, tensors, whole=False).targets:
        data, _ = assemble(target_plan, source, cast="bf16")
        loaded[target_plan.target.name] = torch.from_numpy(data).view(torch.bfloat16).reshape(target_plan.target.shape)
    return loaded


def _chunk_tensors(arch: ModelArchitecture, layout: ParallelLayout, pp_rank: int, tp_rank: int, vp_stage: int) -> list[StoredTensor]:
    key = rank_key(pp_rank, tp_rank, vp_stage)
    if key not in rank_keys(layout):
        raise ValueError(
            f"rank pp={pp_rank} tp={tp_rank} chunk={vp_stage} is outside the layout pp={layout.pp} tp={layout.tp} vpp={layout.vpp}"
        )
    return [stored for stored in megatron_tensors(arch, layout) if stored.location == key]


def write_rank_shards(
    directory: str | Path,
    arch: ModelArchitecture,
    layout: ParallelLayout,
    rank: tuple[int, int],
    chunks: list[Mapping[str, torch.Tensor]],
    tag: str = "",
) -> None:
    """Write the parameters of one rank, one file for each of its model chunks.

    directory: shared by all ranks, and empty or of an earlier export. rank: (pipeline rank, tensor rank). chunks: for each model chunk
    the parameters by Megatron name, BF16 of the local shape, on any device. tag: names this export; `merge_to_hf` refuses other shards.
    Raises ValueError listing names that are missing or spare, and for a wrong dtype or shape.
    """
    if len(chunks) != layout.vpp:
        raise ValueError(f"{len(chunks)} model chunks were given, the layout has vpp={layout.vpp}; give one mapping for each")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for vp_stage, params in enumerate(chunks):
        key = rank_key(*rank, vp_stage)
        tensors = _chunk_tensors(arch, layout, *rank, vp_stage)
        check_names(key, (t.name for t in tensors), params)
        for stored in tensors:
            tensor = params[stored.name]
            if tensor.dtype is not torch.bfloat16 or tuple(tensor.shape) != stored.shape:
                raise ValueError(f"{key}: {stored.name} is {tensor.dtype} {tuple(tensor.shape)}; it must be torch.bfloat16 {stored.shape}")
        partial = directory / f".{key}.partial"
        writer = ShardWriter(partial, [TensorSpec(t.name, "BF16", t.shape) for t in tensors], {"format": "pt", "tag": tag})
        try:
            for stored in tensors:
                writer.write(stored.name, _bytes_of(params[stored.name]))
        finally:
            writer.close()
        os.replace(partial, directory / f"{key}.safetensors")


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy()


def merge_to_hf(
    directory: str | Path,
    out_dir: str | Path,
    source_hf_dir: str | Path,
    arch: ModelArchitecture,
    layout: ParallelLayout,
    *,
    tag: str = "",
    target: Target | None = None,
) -> None:
    """Merge the shards that all ranks wrote into a Hugging Face directory at `out_dir`; one process calls this, behind a barrier.

    source_hf_dir: where config.json, tokenizer, chat template and generation config are copied from. target: a `hf` target, by default
    BF16 and no replacing; `cast` in it quantises, `overwrite` replaces a checkpoint at `out_dir`.
    Raises ValueError naming a shard that is missing or of another export, and a tensor whose copies differ between ranks.
    """
    theirs = ModelArchitecture.from_hf_directory(source_hf_dir)
    if theirs != arch:
        raise ValueError(
            f"{source_hf_dir}/config.json describes {theirs}, but the shards are of {arch}; give the directory the run started from"
        )
    source = open_rank_shards(Path(directory), arch, layout, frozenset(), Path(source_hf_dir), tag)
    try:
        publish(prepare(source, target or Target(kind="hf")), Path(out_dir))
    finally:
        source.close()
