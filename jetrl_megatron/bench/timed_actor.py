"""An actor with random weights and random packed tokens, as `bench step` times it.

Enters: a shape, a layout, a precision. Leaves: Megatron's model with the optimizer and the weight caches of a run, and its micro-batches.
Left out: the clock (step.py).
"""

from dataclasses import dataclass
from typing import Any

import torch

from conversion.architecture import ModelArchitecture
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import randomize_parameters
from jetrl_megatron.actor.model import build_chunks, model_layout, transformer_config
from jetrl_megatron.actor.optimizer import ActorOptimizer, wrap_chunks
from jetrl_megatron.actor.pipeline_step import PipelineStep
from jetrl_megatron.actor.sides import FlowSides
from jetrl_megatron.bench.shapes import MAX_POSITIONS, MODELS, VOCAB
from jetrl_megatron.config import Backend, OptimConfig, ParallelConfig, PrecisionConfig
from jetrl_megatron.contracts import TrainBatch
from jetrl_megatron.fp8 import resolve_backend


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """What is timed."""

    arch: ModelArchitecture
    parallel: ParallelConfig
    tokens: int
    seqs: int
    micro_batches: int
    repeats: int
    offload_fraction: float = 0.0
    """Of the optimizer's state."""
    optimizer: bool = True
    """False: its state, 12 bytes a parameter, is not there, so that a whole model fits on one GPU; an update is the rest of it."""


def architecture(name: str, layers: int) -> ModelArchitecture:
    """Return the architecture of a named shape with `layers` layers."""
    shape = MODELS[name]
    return ModelArchitecture(
        family="qwen3",
        num_layers=layers,
        hidden_size=shape.hidden,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        vocab_size=VOCAB,
        max_positions=MAX_POSITIONS,
        rms_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        qkv_bias=False,
        qk_norm=True,
        tie_embeddings=False,
    )


def random_batch(case: StepCase, device: torch.device, seed: int) -> TrainBatch:
    """Return one packed micro-batch of equal sequences, the second half of each a response."""
    generator = torch.Generator().manual_seed(seed)
    total, each = case.tokens, case.tokens // case.seqs
    tokens = torch.randint(0, case.arch.vocab_size, (total,), generator=generator)
    positions = torch.arange(total) % each
    mask = (positions >= each // 2).float() * (positions < each - 1)
    on_device: dict[str, torch.Tensor] = {
        "tokens_T": tokens,
        "positions_T": positions,
        "labels_T": tokens.roll(-1),
        "loss_mask_T": mask,
        "loss_weight_T": mask / mask.sum(),
        "advantages_T": torch.randn(total, generator=generator),
        "rollout_logprobs_T": torch.zeros(total),
    }
    bounds = torch.arange(0, total + 1, each, dtype=torch.int32)
    moved: dict[str, Any] = {name: value.to(device) for name, value in on_device.items()}
    return TrainBatch(**moved, cu_seqlens_S=bounds, num_real_toks=total)


class TimedActor:
    """Model, optimizer and caches of one arm with random weights.

    Args:
        case: what is timed. precision: the arm. ranks: this process's place. device: where it runs.
    """

    def __init__(self, case: StepCase, precision: PrecisionConfig, ranks: parallel_state.Ranks, device: torch.device) -> None:
        """Build and initialise; every arm has the same weights."""
        config = transformer_config(case.arch, case.parallel, precision, device, deterministic=False)
        layout = model_layout(case.parallel, precision.row_parallel)
        chunks = build_chunks(case.arch, config, layout, ranks, trainable=True)
        for chunk in chunks:
            randomize_parameters(chunk)
        self.wrapped = wrap_chunks(config, chunks)
        optim = OptimConfig(lr=1e-6, offload_fraction=case.offload_fraction)
        self.optimizer = ActorOptimizer(optim, self.wrapped, 1000) if case.optimizer else None
        backend = resolve_backend(Backend.auto, device)
        self.sides = FlowSides(chunks, arch=case.arch, layout=layout, precision=precision, backend=backend, pp_rank=ranks.pp_rank)
        self.sides.refresh()
        self.steps = PipelineStep(self.wrapped, case.arch.vocab_size, 1.0)
        self.allocated_in_loss = 0
        """Bytes that were allocated when the last micro-batch's forward had ended."""

    def gradients(self, batches: list[TrainBatch]) -> None:
        """Run forward and backward of all micro-batches, with the gradient reduction."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.steps.train(batches, self._loss)

    def update(self) -> None:
        """Clip, step, write BF16 parameters; without an optimizer the caches are stale behind it all the same."""
        self.sides.invalidate()
        if self.optimizer is not None:
            self.optimizer.step()

    def _loss(self, logp: torch.Tensor, entropy: torch.Tensor, batch: TrainBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.allocated_in_loss = torch.cuda.memory_allocated()
        return -(logp * batch.advantages_T * batch.loss_weight_T).sum(), {}
