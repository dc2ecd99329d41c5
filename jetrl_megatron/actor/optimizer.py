"""Optimizer: Megatron's DistributedDataParallel, its distributed AdamW with FP32 masters, and the learning-rate curve.

Enters: model chunks with weights loaded, OptimConfig. Leaves: wrapped chunks and an `ActorOptimizer`. FP32 masters start from the BF16
parameters exactly and are sharded over data-parallel ranks; gradients are reduced in FP32. Left out: the loss's
denominator, which is already in the batch's weights, so nothing is divided by ranks or micro-batches here.
With `optim.offload_fraction` that share of masters and moments lies on the host, 12 bytes a parameter, and torch's AdamW updates it there:
Megatron's `HybridDeviceOptimizer`, which copies gradients out and BF16 parameters back beside the update of the parameters before.
"""

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from jetrl_megatron.actor.optimizer_state import load_shard_state, shard_state
from jetrl_megatron.config import OptimConfig


def wrap_chunks(config: TransformerConfig, chunks: list[Any]) -> list[DistributedDataParallel]:
    """Wrap each chunk for FP32 gradient reduction over data-parallel ranks; parameters move into flat buffers."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True, check_for_nan_in_grad=False
    )
    return [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]


class ActorOptimizer:
    """One AdamW step at a time on the chunks' accumulated `main_grad`.

    Args:
        config: the recipe's part.
        chunks: from `wrap_chunks`.
        total_steps: steps of the whole run; where the decay ends when `decay_steps` is 0.

    Raises:
        ValueError: when the state is to be offloaded and does not lie on a GPU.
    """

    def __init__(self, config: OptimConfig, chunks: list[DistributedDataParallel], total_steps: int) -> None:
        """Build masters and moments from the parameters as they are now."""
        options = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=0.0,  # `step` clips
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        if config.offload_fraction > 0.0:
            _offload(options, config.offload_fraction, chunks)
        self._inner = get_megatron_optimizer(options, chunks, use_gloo_process_groups=False)
        self._clip_grad, self._offloads = config.clip_grad, config.offload_fraction > 0.0
        for part in self._parts():
            _choose_fused(part.optimizer)
        self._schedule = OptimizerParamScheduler(
            self._inner,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.lr if config.decay.value == "constant" else config.min_lr,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=max(config.decay_steps or total_steps, config.warmup_steps + 1),
            lr_decay_style=config.decay.value,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )
        if config.warmup_steps:
            # Megatron's curve is 0 at step 0; the first update is worth 1/warmup of the peak instead.
            self._schedule.step(1)

    def step(self) -> tuple[bool, float]:
        """Clip, update masters, write BF16 parameters; returns (whether an update happened, global gradient norm before clipping)."""
        found_inf = self._inner.prepare_grads()
        assert not found_inf, "only a loss scale looks for infinities, and BF16 has none"
        norm = float(self._inner.get_grad_norm())
        self._clip(norm)
        ok = self._inner.step_with_ready_grads()
        self._schedule.step(1)
        return bool(ok), norm

    @torch.no_grad()
    def _clip(self, norm: float) -> None:
        """Scale every gradient in place where their norm is too large, to the bits of Megatron's clipping.

        Without Transformer Engine and Apex, Megatron's own makes a scaled copy of each and copies it back.
        """
        scale = self._clip_grad / (norm + 1e-6)
        # Where the state is offloaded, the groups hold BF16 parameters, to which an FP32 gradient cannot belong by torch's rules.
        name = "decoupled_grad" if self._offloads else "grad"
        found = [getattr(p, name, None) for part in self._parts() for p in part.get_parameters()]
        gradients = [gradient for gradient in found if gradient is not None]
        if gradients and self._clip_grad > 0.0 and scale < 1.0:
            torch._foreach_mul_(gradients, scale)

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self._inner.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's masters, moments and the curve's position; tensors are this rank's own shard, not gathered."""
        return {
            "shards": [shard_state(part) for part in self._parts()],
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` of the same layout returned; the masters are the saved ones, not rebuilt from BF16.

        Raises:
            ValueError: when the saved shards are of another layout.
        """
        parts = self._parts()
        if len(parts) != len(state["shards"]):
            raise ValueError(
                f"checkpoint holds {len(state['shards'])} optimizer parts, this layout has {len(parts)}: resume with the same layout"
            )
        for part, saved in zip(parts, state["shards"], strict=True):
            load_shard_state(part, saved)
        self._schedule.num_steps = 0  # Megatron adds the saved position to where the curve stands, and a warm-up stands at 1 already
        self._schedule.load_state_dict(state["schedule"])

    def _parts(self) -> list[Any]:
        return list(getattr(self._inner, "chained_optimizers", [self._inner]))


def _offload(options: OptimizerConfig, fraction: float, chunks: list[DistributedDataParallel]) -> None:
    """Set Megatron's options for a share of the state on the host."""
    if not all(p.is_cuda for chunk in chunks for p in chunk.parameters()):
        raise ValueError(
            f"optim.offload_fraction is {fraction}, but the actor runs on a CPU, where all of the optimizer's state is anyway: leave it 0"
        )
    options.optimizer_cpu_offload, options.optimizer_offload_fraction = True, fraction
    options.overlap_cpu_optimizer_d2h_h2d = True
    # The masters are the optimizer's own, so that those on the host have no twin on the GPU. Set here, because the constructor asks
    # Transformer Engine for its version first, which the hybrid optimizer does without.
    options.use_precision_aware_optimizer = options.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def _choose_fused(adam: torch.optim.Optimizer) -> None:
    """On CUDA let torch's AdamW update everything in one kernel a group; Transformer Engine's and Apex's are fused by themselves."""
    for group in adam.param_groups:
        if isinstance(adam, torch.optim.AdamW | torch.optim.Adam) and all(p.is_cuda for p in group["params"]):
            group["fused"], group["foreach"] = True, False
