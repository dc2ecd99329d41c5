"""From the shards of one pipeline stage to canonical tensors on its leader, in whole passes over a few large buffers.

Enters: the actor (its BF16 parameters and the weight cache of the rollout side). Leaves: (name, tensor) in checkpoint layout: FP8 codes
[N, K] E4M3 with scales [ceil(N/128), ceil(K/128)] FP32, or BF16. Codes and scales are moved, never made: what leaves is what the cache
holds.

TP ranks of one stage put the bytes of several parameters, scales with them, end to end into one buffer and gather it in one call; then the
planner's copy operations (conversion.plan) place the rectangles, merged where they can be (rectangles.py). Nothing is gathered over
pipeline stages or data-parallel ranks, nor with one TP rank. A push is many small tensors, and the host's calls take longer than the
copies: what does not change between pushes is worked out once (which module holds what, what is gathered together, what engines hold), and
what lies in one piece is not copied, and its views are kept. Parameters and cache entries are looked up again by every push.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from conversion.architecture import ModelArchitecture
from conversion.layout import fp8_modules
from conversion.plan import CopyOp, TargetPlan, make_plan
from conversion.shards import StoredTensor, hf_tensors, megatron_tensors, rank_key
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.config import LinearPrecision, Recipe
from jetrl_megatron.rollout.held_views import same_elements
from jetrl_megatron.rollout.published import EnginePlans
from jetrl_megatron.sync.rectangles import runs

BUCKET_BYTES = 256 * 2**20
_ALIGN = 16
_Matrices = dict[tuple[int, str], tuple[Tensor, Tensor | None]]
"""(model chunk, Megatron name) -> elements [rows, cols], or codes with their scales."""


def server_fp8(recipe: Recipe, arch: ModelArchitecture) -> frozenset[str]:
    """Return the module names of the linears that are FP8 in the recipe's servers, and on the way to them."""
    precision = recipe.precision
    return fp8_modules(arch, precision.bf16_layers) if precision.rollout_linear is LinearPrecision.fp8 else frozenset()


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One stored tensor's bytes within a bucket: codes or elements, then scales where it is FP8."""

    stored: StoredTensor
    """As the leader's own rank stores it; every TP rank has the same shape."""
    data_at: int
    scale_at: int


class StageWire:
    """What this rank's pipeline stage sends. Every rank of the stage iterates `stream`; only the receiving ranks get tensors.

    actor: whose weights. everywhere: every TP rank receives the whole tensors (CUDA IPC), instead of the leader alone.
    """

    def __init__(self, actor: Actor, everywhere: bool = False) -> None:
        """Plan the stage: which stored tensors are gathered, and which canonical tensors are made of them."""
        self.fp8 = server_fp8(actor.recipe, actor.arch)
        self.arch = actor.arch
        self._actor, self._everywhere = actor, everywhere
        self._group = mpu.get_tensor_model_parallel_group()
        layout, ranks = actor.layout, actor.ranks
        everything = megatron_tensors(actor.arch, layout, self.fp8)
        plan = make_plan(everything, hf_tensors(actor.arch, self.fp8))
        mine = {rank_key(ranks.pp_rank, t, v): (t, v) for t in range(layout.tp) for v in range(layout.vpp)}
        self._place, self._plan = mine, plan
        self._targets = [t for t in plan.targets if t.ops[0].source.location in mine]
        self._runs = {t.target.name: runs(t.ops) for t in self._targets}
        alone = self._group.size() == 1
        whole = [t.target for t in self._targets if alone and self._runs[t.target.name][0].covers(t.target.rows_cols)]
        self.resident = frozenset(name for target in whole for name in _names(target))
        """What `stream` yields where the actor holds it; all else is a copy, made for the stream."""
        self._own = {(mine[s.location][1], s.name): s for s in everything if s.location in mine and mine[s.location][0] == ranks.tp_rank}
        self._modules = {source: self._module(*source) for source in self._own}
        self._buckets = list(self._cut())
        self._kept: dict[str, tuple[Tensor, Tensor | None, list[tuple[str, Tensor]]]] = {}
        """Of resident tensors: elements and scales as they lay, and the views that were yielded of them."""
        self.engine_plans = EnginePlans()
        """What engines hold of these tensors."""

    @property
    def receives(self) -> bool:
        """Whether `stream` yields tensors on this rank."""
        return self._everywhere or self._actor.ranks.tp_rank == 0

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self._actor.device

    def specs(self) -> list[StoredTensor]:
        """Return the canonical tensors that `stream` yields, in its order; an FP8 one is followed by its scales."""
        return [t.target for t in self._targets]

    @property
    def replica(self) -> int:
        """This rank's data-parallel rank; the first replica alone needs to send."""
        return self._actor.ranks.dp_rank

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas of the actor."""
        return self._actor.ranks.dp

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the actor."""
        return self._actor.ranks.pp

    def described(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return name -> (torch's name of the dtype, shape) of every canonical tensor of the model, scales included; not to be changed."""
        return self._described

    @cached_property
    def _described(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for target in hf_tensors(self.arch, self.fp8):
            found[target.name] = ("float8_e4m3fn" if target.fp8 else "bfloat16", target.shape)
            if target.fp8:
                found[target.scale_name] = ("float32", target.scale_shape)
        return found

    def stages(self) -> list[tuple[int, list[str]]]:
        """Return, for each pipeline stage, the global rank that stands in it where this one does, and the names that it streams."""
        group = mpu.get_pipeline_model_parallel_group()
        return [(dist.get_global_rank(group, stage), self._names_of(stage)) for stage in range(self.num_stages)]

    def _names_of(self, stage: int) -> list[str]:
        places = {rank_key(stage, t, v) for t in range(self._actor.layout.tp) for v in range(self._actor.layout.vpp)}
        targets = [t.target for t in self._plan.targets if t.ops[0].source.location in places]
        return [name for target in targets for name in _names(target)]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Gather bucket after bucket and yield (name, tensor) on receiving ranks; nothing on others, which still take part.

        With one TP rank nothing is gathered, and a tensor that lies in one piece is what the actor holds, not a copy (`resident`): it may
        be read alone, and no weight may change before the end, or before `StageRecord.share` where one watches. Raises RuntimeError where
        one had changed after it was quantised.
        """
        for targets in self._buckets:
            held = self._held(list(dict.fromkeys(self._source(op) for target in targets for op in target.ops)))
            if held is None:
                continue
            for target in targets:
                yield from self._assemble(target, held)

    def _cut(self) -> Iterator[list[TargetPlan]]:
        """Cut the targets, in order, into lists of at most BUCKET_BYTES that no fused parameter crosses."""
        bucket: list[TargetPlan] = []
        seen: set[tuple[int, str]] = set()
        size = 0
        for target in self._targets:
            sources = {self._source(op) for op in target.ops} - seen
            new = sum(self._own[source].num_bytes for source in sources)
            if bucket and sources and size + new > BUCKET_BYTES:
                yield bucket
                bucket, seen, size = [], set(), 0
            bucket.append(target)
            seen |= sources
            size += new
        if bucket:
            yield bucket

    def _source(self, op: CopyOp) -> tuple[int, str]:
        """Return (model chunk, Megatron name) of an operation's source."""
        return self._place[op.source.location][1], op.source.name

    @torch.no_grad()
    def _held(self, sources: list[tuple[int, str]]) -> list[_Matrices] | None:
        """Return by TP rank what it holds of `sources`, on receiving ranks; None elsewhere."""
        own = {source: self._local(self._own[source], *source) for source in sources}
        if self._group.size() == 1:
            return [own]
        parts, buffer = self._fill(own)
        gathered = self._gather(buffer)
        return None if gathered is None else [{source: self._read(part, b) for source, part in parts.items()} for b in gathered]

    def _fill(self, own: _Matrices) -> tuple[dict[tuple[int, str], _Part], Tensor]:
        """Put this rank's bytes of everything end to end."""
        parts: dict[tuple[int, str], _Part] = {}
        pieces: list[tuple[int, Tensor]] = []
        end = 0
        for source, (data, scales) in own.items():
            places = []
            for tensor in (data,) if scales is None else (data, scales):
                raw = tensor.contiguous().reshape(-1).view(torch.uint8)
                places.append(end)
                pieces.append((end, raw))
                end += -(-raw.numel() // _ALIGN) * _ALIGN
            parts[source] = _Part(stored=self._own[source], data_at=places[0], scale_at=places[-1])
        buffer = torch.empty(end, dtype=torch.uint8, device=self.device)
        for at, raw in pieces:
            buffer[at : at + raw.numel()] = raw
        return parts, buffer

    def _read(self, part: _Part, buffer: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return codes and scales, or elements, of one parameter out of a rank's bytes."""
        stored = part.stored
        data = _view(buffer, part.data_at, *stored.rows_cols, torch.float8_e4m3fn if stored.fp8 else torch.bfloat16)
        return data, _view(buffer, part.scale_at, *stored.scale_shape, torch.float32) if stored.fp8 else None

    def _local(self, stored: StoredTensor, chunk: int, name: str) -> tuple[Tensor, Tensor | None]:
        """Return this rank's elements, or codes and scales, of one parameter, as matrices; a vector has one column."""
        module = self._modules[chunk, name]
        if not stored.fp8:
            parameter = getattr(module, name.rpartition(".")[2])
            assert tuple(parameter.shape) == stored.shape and parameter.dtype is torch.bfloat16, (name, parameter.shape, parameter.dtype)
            return parameter.detach().view(stored.rows_cols), None
        cache = module.flow_sides["rollout"].cache
        assert cache is not None, name
        weight = cache.get(module.flow_name).w
        assert tuple(weight.data.shape) == stored.shape and tuple(weight.scale.shape) == stored.scale_shape, (name, weight.data.shape)
        return weight.data, weight.scale.float()

    def _module(self, chunk: int, name: str) -> Any:
        """Return the module that holds a parameter."""
        return self._actor.chunks[chunk].get_submodule(name.rpartition(".")[0])

    def _gather(self, buffer: Tensor) -> list[Tensor] | None:
        """Return the buffers of all TP ranks on receiving ranks, None elsewhere."""
        buffers = [torch.empty_like(buffer) for _ in range(self._group.size())] if self.receives else None
        if self._everywhere:
            assert buffers is not None
            dist.all_gather(buffers, buffer, group=self._group)
        else:
            dist.gather(buffer, buffers, dst=dist.get_global_rank(self._group, 0), group=self._group)
        return buffers

    def _assemble(self, plan: TargetPlan, held: list[_Matrices]) -> list[tuple[str, Tensor]]:
        """Return one canonical tensor, and its scales where it is FP8."""
        target = plan.target
        whole = self._runs[target.name][0]
        if target.name in self.resident:
            data, grid = held[0][self._source(whole.first)]
            kept = self._kept.get(target.name)
            if kept is None or not (same_elements(data, kept[0]) and _same_scales(grid, kept[1])):
                found = [(target.name, whole.view(data).reshape(target.shape))]
                if target.fp8:
                    assert grid is not None, target.name
                    found.append((target.scale_name, whole.view(grid, scales=True)))
                # Detached: the cache's own tensors would follow what they are set to, and always be the same.
                kept = self._kept[target.name] = data.detach(), None if grid is None else grid.detach(), found
            return kept[2]
        dtype = torch.float8_e4m3fn if target.fp8 else torch.bfloat16
        out = torch.empty(target.rows_cols, dtype=dtype, device=self.device)
        scales = torch.empty(target.scale_shape, dtype=torch.float32, device=self.device) if target.fp8 else None
        for run in self._runs[target.name]:
            op = run.first
            data, grid = held[self._place[op.source.location][0]][self._source(op)]
            run.copy(out, data)
            if scales is not None:
                assert grid is not None, op.source.name
                run.copy(scales, grid, scales=True)
        return [(target.name, out.view(target.shape))] + ([] if scales is None else [(target.scale_name, scales)])


def _names(target: StoredTensor) -> tuple[str, ...]:
    return (target.name, target.scale_name) if target.fp8 else (target.name,)


def _same_scales(x: Tensor | None, y: Tensor | None) -> bool:
    return x is y if x is None or y is None else same_elements(x, y)


def _view(buffer: Tensor, at: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    """Return [rows, cols] of a buffer's bytes from `at` on."""
    return buffer[at : at + rows * cols * dtype.itemsize].view(dtype).view(rows, cols)
