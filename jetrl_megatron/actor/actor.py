"""The actor: model, optimizer and weight caches of one rank behind a few verbs.

Enters: a recipe, a Hugging Face directory, the ranks. Leaves: `train_step` (forward, backward, update, quantise), `logprobs`,
`reference_logprobs`, `state_dict`. The local rollout engine decodes with this object's own chunks. Left out: files of any kind but the
weights to start from (loop/persist.py).

Order inside `train_step`, which is the invariant of the loop: gradients of all micro-batches, reduction, clip and AdamW on FP32
masters, BF16 parameters, then one quantisation of every FP8 weight; only then does the version grow.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conversion.actor_io import load_hf_into_rank
from conversion.architecture import ModelArchitecture
from conversion.layout import check_layout
from jetrl_megatron.actor.device import megatron_scope
from jetrl_megatron.actor.model import PolicyModel, build_chunks, model_layout, transformer_config
from jetrl_megatron.actor.optimizer import ActorOptimizer, wrap_chunks
from jetrl_megatron.actor.parallel_state import Ranks
from jetrl_megatron.actor.pipeline_step import LossFunction, PipelineStep
from jetrl_megatron.actor.sides import FlowSides
from jetrl_megatron.config import Arm, OptimConfig, PrecisionConfig, Recipe
from jetrl_megatron.contracts import TrainBatch
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.fp8 import resolve_backend

PhaseTimer = Callable[[str], AbstractContextManager[Any]]


class Actor:
    """One rank's part of the policy being trained.

    Args:
        recipe: the run's config.
        arch: the model's dimensions, from the HF directory.
        hf_dir: the weights to start from; None: random ones, for benches.
        ranks: this process's place.
        device: where it runs.
        trainable: False leaves out the gradients' buffers, 4 bytes a parameter, and the transposed FP8 weights, 1 byte, for benches that
            only push and draw.
    """

    def __init__(
        self, recipe: Recipe, arch: ModelArchitecture, hf_dir: Path | None, ranks: Ranks, device: torch.device, *, trainable: bool = True
    ) -> None:
        """Build, load, wrap and quantise; raises ValueError on an illegal layout or weights that do not fit."""
        self.recipe, self.arch, self.ranks, self.device = recipe, arch, ranks, device
        self.layout = model_layout(recipe.parallel, recipe.precision.row_parallel)
        check_layout(arch, self.layout, fp8=recipe.precision.arm is not Arm.bf16, bf16_layers=recipe.precision.bf16_layers)
        self.backend = resolve_backend(recipe.precision.backend, device)
        self._config = transformer_config(arch, recipe.parallel, recipe.precision, device, deterministic=recipe.run.deterministic)
        with megatron_scope(device):
            self.chunks = self._build(hf_dir, trainable=trainable)
            self._wrapped: list[Any] = wrap_chunks(self._config, self.chunks) if trainable else self.chunks
        self.sides = self._sides(self.chunks, recipe.precision)
        self.sides.refresh()
        self._steps = PipelineStep(self._wrapped, arch.vocab_size, recipe.rollout.temperature)
        self._reference: tuple[list[PolicyModel], FlowSides] | None = None
        self.optimizer: ActorOptimizer | None = None
        self.version = 0

    def _build(self, hf_dir: Path | None, *, trainable: bool) -> list[PolicyModel]:
        """Build this rank's chunks and fill every parameter from the HF directory, or at random."""
        chunks = build_chunks(self.arch, self._config, self.layout, self.ranks, trainable=trainable)
        for stage, chunk in enumerate(chunks):
            if hf_dir is None:
                randomize_parameters(chunk)
                continue
            weights = load_hf_into_rank(
                hf_dir, self.arch, self.layout, pp_rank=self.ranks.pp_rank, tp_rank=self.ranks.tp_rank, vp_stage=stage
            )
            fill_parameters(chunk, weights)
        return chunks

    def _sides(self, chunks: list[PolicyModel], precision: PrecisionConfig) -> FlowSides:
        return FlowSides(chunks, arch=self.arch, layout=self.layout, precision=precision, backend=self.backend, pp_rank=self.ranks.pp_rank)

    def start_optimizer(self, config: OptimConfig, total_steps: int) -> None:
        """Make a fresh optimizer whose masters are the BF16 parameters as they are now (run start, and after the warm start)."""
        assert self._wrapped is not self.chunks, "an actor with trainable=False has no gradients: build it with trainable=True"
        with megatron_scope(self.device):
            self.optimizer = ActorOptimizer(config, self._wrapped, total_steps)

    def build_reference(self, hf_dir: Path) -> None:
        """Build the frozen reference policy from `hf_dir`, in the same precision flow as training."""
        with megatron_scope(self.device):
            chunks = self._build(hf_dir, trainable=False)
        sides = self._sides(chunks, self.recipe.precision)
        sides.refresh()
        self._reference = (chunks, sides)

    def train_step(self, batches: Sequence[TrainBatch], loss_function: LossFunction, phase: PhaseTimer) -> dict[str, Tensor]:
        """Run one optimizer step over this data-parallel rank's micro-batches; returns metric sums (see PipelineStep.train).

        Args:
            batches: equally many on every data-parallel rank, one packed length.
            loss_function: see `LossFunction`.
            phase: opens a timed phase by name; "update" and "quantise" are used.
        """
        assert self.optimizer is not None, "start_optimizer() comes before train_step()"
        with megatron_scope(self.device):
            with phase("update"):
                for chunk in self._wrapped:
                    chunk.train()
                    chunk.zero_grad_buffer()
                sums = self._steps.train(batches, loss_function)
                self.sides.invalidate()
                ok, norm = self.optimizer.step()
            if not ok:
                raise RunFailure(f"optimizer step {self.version + 1} was skipped: gradient norm {norm}; the last checkpoint is intact")
            with phase("quantise"):
                self.sides.refresh()
        self.version += 1
        sums["grad_norm"] = torch.tensor(norm, dtype=torch.float64)
        return sums

    def logprobs(self, batches: Sequence[TrainBatch]) -> list[tuple[Tensor, Tensor]]:
        """Return (log-probs, entropies) of the training forward at masked positions, each [T] float32, for every micro-batch."""
        with megatron_scope(self.device):
            for chunk in self._wrapped:
                chunk.eval()
            return self._steps.logprobs(batches)

    def reference_logprobs(self, batches: Sequence[TrainBatch]) -> list[Tensor]:
        """Return the reference policy's log-probs, [T] float32 each; needs `build_reference`."""
        assert self._reference is not None, "build_reference() comes before reference_logprobs()"
        steps = PipelineStep(self._reference[0], self.arch.vocab_size, self.recipe.rollout.temperature)
        with megatron_scope(self.device):
            return [logp for logp, _ in steps.logprobs(batches)]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parameters, masters, moments, curve and version."""
        assert self.optimizer is not None
        return {
            "parameters": [{n: p.detach().clone() for n, p in chunk.named_parameters()} for chunk in self.chunks],
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict` of the same layout bit for bit, and quantise once.

        Raises:
            ValueError: when the state is of another layout or model.
        """
        assert self.optimizer is not None
        self.sides.invalidate()
        for chunk, saved in zip(self.chunks, state["parameters"], strict=True):
            fill_parameters(chunk, saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = int(state["version"])
        self.sides.refresh()

    def weights_digest(self) -> str:
        """Return in hex the SHA-256 of each cache's FP8 bytes on this rank, joined, or of its BF16 parameters where no side is FP8."""
        if self.sides.caches:
            return "".join(cache.digest() for cache in self.sides.caches.values())
        sha = hashlib.sha256()
        for chunk in self.chunks:
            for _, p in sorted(chunk.named_parameters()):
                sha.update(p.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return sha.hexdigest()


def fill_parameters(chunk: torch.nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy `weights` into the parameters of the same names, every one of them.

    Raises:
        ValueError: listing parameters without a weight, weights without a parameter, and shapes that differ.
    """
    parameters = dict(chunk.named_parameters())
    missing, extra = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    wrong = [
        f"{n}: {tuple(weights[n].shape)} for {tuple(p.shape)}"
        for n, p in parameters.items()
        if n in weights and weights[n].shape != p.shape
    ]
    if missing or extra or wrong:
        raise ValueError(f"weights do not fit the model: missing {missing}, not in the model {extra}, wrong shape {wrong}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


@torch.no_grad()
def randomize_parameters(chunk: torch.nn.Module) -> None:
    """Draw every matrix on its device, normal with standard deviation 0.02; norms become 1 and biases 0.

    Matrices of one shape and device are equal: it takes no time, and every copy of a tied embedding is the same.
    """
    for name, parameter in chunk.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=torch.Generator(parameter.device).manual_seed(0))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
