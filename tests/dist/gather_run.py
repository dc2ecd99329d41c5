"""What one rank does in the tests of what ranks exchange: the same layers with it and by Megatron's mappings, what was sent, when, and kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import mappings

from conversion.architecture import ModelArchitecture
from jetrl_megatron.actor import linears, parallel_state
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import local_device, megatron_scope
from jetrl_megatron.config import OptimConfig, ParallelConfig, PrecisionConfig, Recipe, RowParallel
from jetrl_megatron.fp8 import BlockScaled, GemmPrecision, gather, triton_quantize
from jetrl_megatron.fp8.block_scaled import leading_rows
from jetrl_megatron.fp8.exchange import LOCAL
from jetrl_megatron.fp8.quantize import ROW_BLOCK, WEIGHT_BLOCK, quantize
from tests.dist.actor_run import batches_of, fixed_samples
from tests.dist.backward_order import Order
from tests.unit.actor.single_rank import take_step

OPTIM = OptimConfig(lr=1e-3, clip_grad=0.0)


@dataclass
class Wire:
    """What this rank gave to all-gathers, and what it kept instead."""

    launches: int = 0
    """Of the FP8 gather."""
    sent: list[tuple[str, int]] = field(default_factory=list)
    """(dtype, bytes) of every all-gather's input."""
    kept: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the matrices of FP8 codes and of BF16 that the forward saved for the backward."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A hook of saved tensors."""
        if tensor.dtype in (torch.float8_e4m3fn, torch.bfloat16):
            self.kept.append(tuple(tensor.shape))
        return tensor

    @contextmanager
    def tapped(self) -> Iterator[None]:
        """Count while open."""

        def gathered(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(out: torch.Tensor, part: torch.Tensor, **kwargs: Any) -> Any:
                self.sent.append((str(part.dtype).removeprefix("torch."), part.numel() * part.element_size()))
                return real(out, part, **kwargs)

            return call

        def launched(group: Any, outputs: list[torch.Tensor], parts: list[torch.Tensor], options: Any) -> Any:
            self.launches += 1
            self.sent += [(str(part.dtype).removeprefix("torch."), part.numel() * part.element_size()) for part in parts]
            work = real_launch(group, outputs, parts, options)
            if options.asyncOp:
                return work
            work.wait()
            return None  # as NCCL does

        real_launch = dist.ProcessGroup.allgather_into_tensor_coalesced
        with (
            mock.patch.object(dist, "all_gather_into_tensor", gathered(dist.all_gather_into_tensor)),
            mock.patch.object(mappings, "dist_all_gather_func", gathered(mappings.dist_all_gather_func)),
            mock.patch.object(dist.ProcessGroup, "allgather_into_tensor_coalesced", launched),
        ):
            yield


@contextmanager
def one_after_the_other() -> Iterator[None]:
    """The way to compare with: Megatron's mappings, waited for, around linears that exchange nothing, so that all of X is quantised."""
    real = linears.FlowLinear.gemm

    def mapped(linear: Any, x: torch.Tensor, *, swiglu: bool = False, h_format: None = None) -> torch.Tensor:
        exchange = linear.exchange
        if exchange.group is not None:
            group = {"group": linear.tp_group}
            if exchange.axis is None:
                x = mappings.copy_to_tensor_model_parallel_region(x, **group)
            elif exchange.axis == 0:
                x = mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, **group)
            else:
                x = mappings.all_gather_last_dim_from_tensor_parallel_region(x, **group)
        with mock.patch.dict(vars(linear), exchange=LOCAL):
            return real(linear, x, swiglu=swiglu, h_format=h_format)

    def traded(y: torch.Tensor, group: Any) -> torch.Tensor:
        # Of no tokens Megatron's gives the width of one part.
        return mappings.all_to_all_hp2sp(y, group=group) if y.shape[0] else y.repeat(1, group.size())

    flow = linears.FlowLinear
    with (
        mock.patch.object(flow, "gemm", mapped),
        mock.patch.object(flow, "wants_bf16", True),
        mock.patch.object(linears, "columns_for_tokens", traded),
    ):
        yield


def in_kernel_layout(x: BlockScaled) -> BlockScaled:
    """The same values where the GPU quantisers would put them."""
    if x.block != ROW_BLOCK:
        return x
    out = triton_quantize.empty_grouped(*x.shape, x.data.dtype, x.data.device)
    out.data.view(torch.uint8).copy_(x.data.view(torch.uint8))
    out.scale.copy_(x.scale)
    return out


def blocks_of_one_rank(shapes: list[tuple[int, int]]) -> dict[str, list[str]]:
    """What is wrong with gathers of this rank's part of matrices of `shapes`, by case; [] is right."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    wrong: dict[str, list[str]] = {}
    for rows, cols in shapes:
        x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).bfloat16()
        x *= torch.exp(3 * torch.randn(rows, 1, generator=torch.Generator().manual_seed(1)))
        if x.numel():
            x[-1, -1], x[0, 0] = float("nan"), float("inf")
        for axis in (0, 1):
            for block in (ROW_BLOCK, WEIGHT_BLOCK):
                part = x.chunk(group.size(), axis)[rank]
                if part.shape[axis] % block[axis]:
                    continue
                want = in_kernel_layout(quantize(x, block))
                for layout in (lambda q: q, in_kernel_layout):
                    got = gather.gather_blocks(layout(quantize(part, block)), axis, group)
                    found = [] if got.same_bytes(want) else ["bytes"]
                    if not got.data.is_contiguous() or (x.numel() and got.scale.stride() != want.scale.stride()):
                        found.append(f"strides {got.data.stride()} {got.scale.stride()}")
                    if block == ROW_BLOCK and rows % 4:
                        padding = got.scale.as_strided((-rows % 4, got.scale.shape[1]), (1, leading_rows(rows)), rows)
                        found += ["rounding"] if torch.count_nonzero(padding) else []
                    wrong.setdefault(f"{rows}x{cols} axis {axis} {block}", []).extend(found)
    dist.destroy_process_group()
    return wrong


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model, with the switches to run it with."""

    hf_dir: str
    parallel: ParallelConfig
    switches: dict[str, GemmPrecision]
    toks: tuple[int, ...]
    modes: tuple[str, ...] = ("grad", "no grad")
    """What gets gradients: "grad" X and the weights, "frozen" X alone, "weights" the weights alone, "no grad" nothing."""
    row_parallel: RowParallel = RowParallel.k_complete


def layers_of_one_rank(cases: dict[str, Layer]) -> dict[str, dict[str, Any]]:
    """Run the linears and the MLP of each case both ways; by "case/switches/T/part/mode": what differs, and the wire of the FP8 way."""
    found: dict[str, dict[str, Any]] = {}
    device = local_device()
    for name, case in cases.items():
        ranks = parallel_state.initialize(case.parallel, device)
        arch = ModelArchitecture.from_hf_directory(case.hf_dir)
        recipe = replace(Recipe(), parallel=case.parallel, precision=PrecisionConfig(row_parallel=case.row_parallel))
        actor = Actor(recipe, arch, Path(case.hf_dir), ranks, device)
        for switches, precision in case.switches.items():
            flow_linears = [m for m in actor.chunks[0].modules() if isinstance(m, linears.FlowLinear)]
            for linear in flow_linears:
                linear.flow_sides = {"train": replace(linear.flow_sides["train"], precision=precision)}
            for toks in case.toks:
                for part, module in _parts(actor).items():
                    for mode in case.modes:
                        module.requires_grad_(mode in ("grad", "weights"))
                        found[f"{name}/{switches}/{toks}/{part}/{mode}"] = _both_ways(actor, module, toks, mode)
        mpu.destroy_model_parallel()
    parallel_state.destroy()
    return found


def _parts(actor: Actor) -> dict[str, torch.nn.Module]:
    layer = actor.chunks[0].decoder.layers[0]
    return {"qkv": layer.self_attention.linear_qkv, "o": layer.self_attention.linear_proj, "mlp": layer.mlp}


def _both_ways(actor: Actor, module: torch.nn.Module, toks: int, mode: str) -> dict[str, Any]:
    """(differing outputs and gradients, those that are zero, wire, order of the backward) of one module in the two ways."""
    wire, order = Wire(), Order()
    with order.tapped(), wire.tapped():
        found = _run(actor, module, toks, mode, wire, order)
    with one_after_the_other():
        want = _run(actor, module, toks, mode, Wire(), Order())
    return {
        "differing": [name for name in want if not torch.equal(found[name], want[name])],
        "zero": [name for name in found if found[name].count_nonzero() == 0],
        "names": list(found),
        "launches": wire.launches,
        "sent": wire.sent,
        "kept": wire.kept,
        "order": order.events,
    }


def _run(actor: Actor, module: torch.nn.Module, toks: int, mode: str, wire: Wire, order: Order) -> dict[str, torch.Tensor]:
    """Output of a module on this rank's part of fixed tokens, and, by `mode`, dX and main_grad, added to what was there."""
    grad = mode != "no grad"
    tp, rank, parallel = actor.ranks.tp, actor.ranks.tp_rank, actor.recipe.parallel
    row = isinstance(module, linears.FlowRowParallelLinear)
    width = actor.arch.num_heads * actor.arch.head_dim if row else actor.arch.hidden_size
    generator = torch.Generator().manual_seed(toks)
    whole = torch.randn(toks, 1, width, generator=generator).bfloat16()
    split = row or parallel.sequence_parallel
    x = (whole.chunk(tp, 2 if row else 0)[rank] if split else whole).to(actor.device, copy=True)
    x.requires_grad_(mode in ("grad", "frozen"))
    weights = dict(module.named_parameters())
    for weight in weights.values():
        weight.main_grad.fill_(0.5)
    with megatron_scope(actor.device), torch.set_grad_enabled(grad):
        with torch.autograd.graph.saved_tensors_hooks(wire.keep, lambda kept: kept):
            y = module(x)[0]
        order.events.clear()
        if not grad:
            return {"y": y}
        y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(actor.device))
    found = {"y": y.detach()}
    if mode in ("grad", "frozen"):
        assert x.grad is not None
        found["dx"] = x.grad
    if mode in ("grad", "weights"):
        found |= {n: w.main_grad - 0.5 for n, w in weights.items() if n.endswith("weight")}
    return found


def steps_of_one_rank(hf_dir: str, cases: list[tuple[ParallelConfig, PrecisionConfig]]) -> list[dict[str, Any]]:
    """Take one training step both ways; returns which gradients and weights differ, and the wire of the first way, for each case."""
    found = [_step_both_ways(hf_dir, *case) for case in cases]
    parallel_state.destroy()
    return found


def _step_both_ways(hf_dir: str, parallel: ParallelConfig, precision: PrecisionConfig) -> dict[str, Any]:
    wire = Wire()
    with wire.tapped():
        found, seen = _step(hf_dir, parallel, precision, wire)
    with one_after_the_other():
        want, _ = _step(hf_dir, parallel, precision, Wire())
    differing = [name for name in want if not torch.equal(found[name], want[name])]
    return {"differing": differing, "zero": [n for n in found if found[n].abs().max() == 0], **seen}


def _step(
    hf_dir: str, parallel: ParallelConfig, precision: PrecisionConfig, wire: Wire
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(gradients and new weights by name, what forward and backward sent) of one step of a fresh actor."""
    device = local_device()
    ranks = parallel_state.initialize(parallel, device)
    arch = ModelArchitecture.from_hf_directory(hf_dir)
    recipe = replace(Recipe(), parallel=parallel, precision=precision, optim=OPTIM)
    actor = Actor(recipe, arch, Path(hf_dir), ranks, device)
    actor.start_optimizer(OPTIM, total_steps=10)
    batches = batches_of(fixed_samples(arch.vocab_size)[:4], actor, parallel.micro_batch_toks)
    seen = _before_the_optimizer(actor, wire)
    take_step(actor, batches)
    named = dict(actor.chunks[0].named_parameters())
    result = {f"grad {n}": p.main_grad.clone() for n, p in named.items()} | {n: p.detach().clone() for n, p in named.items()}
    mpu.destroy_model_parallel()
    return result, {**seen, "num_batches": len(batches)}


def _before_the_optimizer(actor: Actor, wire: Wire) -> dict[str, Any]:
    """Filled with what forward and backward sent when the optimizer starts, which gathers parameters of its own."""
    seen: dict[str, Any] = {}
    assert actor.optimizer is not None
    real = actor.optimizer.step

    def step() -> Any:
        seen.update(launches=wire.launches, sent=list(wire.sent))
        return real()

    actor.optimizer.step = step  # type: ignore[method-assign]
    return seen
