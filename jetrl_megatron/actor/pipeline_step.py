"""Forward and backward over micro-batches through Megatron's pipeline schedules, and the forward that only reads log-probs.

Enters: TrainBatches of one packed length. Leaves: gradients in `main_grad` and sums of metrics, or per-position log-probs [T] FP32 of each
micro-batch. Invariant: the loss of a micro-batch is a plain weighted sum, so the gradient does not depend on how the batch was cut.

Alignment: position j of a packed array speaks of labels_T[j] (see `contracts`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import mappings
from torch import Tensor

from jetrl_megatron.actor.logprobs import VocabShard, token_logprobs, vocab_shard
from jetrl_megatron.actor.model import PolicyModel
from jetrl_megatron.actor.packed import packed_context
from jetrl_megatron.contracts import TrainBatch

LossFunction = Callable[[Tensor, Tensor, TrainBatch], tuple[Tensor, dict[str, Tensor]]]
"""(logp_T, entropy_T, batch) -> (loss, sums of metrics); log-probs are 0 outside the loss mask. The loss is made of logp_T even where no
position counts: through it every rank's backward runs with the same collectives."""


def unwrap(chunk: Any) -> PolicyModel:
    """Return the PolicyModel inside Megatron's data-parallel wrapper, or the chunk itself."""
    return chunk if isinstance(chunk, PolicyModel) else chunk.module


def gathered_hidden(model: PolicyModel, hidden: Tensor) -> Tensor:
    """Return [T, H] on every TP rank from the last stage's output [T/TP or T, 1, H]; its gradient is summed over TP ranks."""
    group = model.tp_group
    if model.config.sequence_parallel:
        hidden = mappings.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    else:
        hidden = mappings.copy_to_tensor_model_parallel_region(hidden, group=group)
    return hidden.squeeze(1)


def head_shard(model: PolicyModel, vocab_size: int) -> VocabShard:
    """Return where this rank's lm_head rows lie."""
    return vocab_shard(vocab_size, model.head_weight().shape[0], mpu.get_tensor_model_parallel_rank(), model.tp_group)


def empty_like(batch: TrainBatch) -> TrainBatch:
    """Return a micro-batch of padding only, of the same packed length: it adds nothing to loss or gradient."""
    total, device = batch.tokens_T.numel(), batch.tokens_T.device
    ints, floats = torch.zeros(total, dtype=torch.int64, device=device), torch.zeros(total, device=device)
    return TrainBatch(
        tokens_T=ints,
        positions_T=ints,
        cu_seqlens_S=torch.tensor([0, total], dtype=torch.int32),
        labels_T=ints,
        loss_mask_T=floats,
        loss_weight_T=floats,
        advantages_T=floats,
        rollout_logprobs_T=floats,
        old_logprobs_T=floats,
        ref_logprobs_T=floats,
        loss_rows_L=ints[:0],
    )


class PipelineStep:
    """Runs batches through one set of model chunks.

    Args:
        chunks: this pipeline rank's chunks, wrapped for training or bare.
        vocab_size: real tokens of the vocabulary.
        temperature: the rollout's sampling temperature: both sides speak of one distribution.
    """

    def __init__(self, chunks: Sequence[Any], vocab_size: int, temperature: float) -> None:
        """Keep the chunks; nothing runs yet."""
        self._chunks = list(chunks)
        self._vocab_size, self._temperature = vocab_size, temperature

    def train(self, batches: Sequence[TrainBatch], loss_function: LossFunction) -> dict[str, Tensor]:
        """Accumulate gradients over `batches`; returns sums of metrics, added up over micro-batches (empty but on the last stage)."""
        outputs = self._run(batches, partial(self._loss, loss_function=loss_function), forward_only=False)
        sums: dict[str, Tensor] = {}
        for metrics in outputs:
            for name, value in metrics.items():
                sums[name] = sums[name] + value if name in sums else value
        return sums

    @torch.no_grad()
    def logprobs(self, batches: Sequence[TrainBatch]) -> list[tuple[Tensor, Tensor]]:
        """Return (logp_T, entropy_T) of each batch, [T] float32, 0 outside the loss mask, on every pipeline rank."""
        outputs = self._run(batches, self._read_logprobs, forward_only=True)
        outputs = outputs[: len(batches)]
        if mpu.get_pipeline_model_parallel_world_size() == 1:
            return list(outputs)
        device = batches[0].tokens_T.device
        pairs = outputs or [tuple(torch.empty(b.tokens_T.numel(), device=device) for _ in range(2)) for b in batches]
        source = mpu.get_pipeline_model_parallel_last_rank()
        for pair in pairs:
            for tensor in pair:
                dist.broadcast(tensor, src=source, group=mpu.get_pipeline_model_parallel_group())
        return list(pairs)

    def _run(self, batches: Sequence[TrainBatch], finish: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        lengths = {b.tokens_T.numel() for b in batches}
        assert len(lengths) == 1, f"micro-batches of one step must have one packed length, got {sorted(lengths)}"
        batches = self._whole_rounds(batches)
        iterators = [iter(batches) for _ in self._chunks]
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward, finish=finish),
            data_iterator=iterators if len(self._chunks) > 1 else iterators[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(batches),
            seq_length=lengths.pop(),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _whole_rounds(self, batches: Sequence[TrainBatch]) -> Sequence[TrainBatch]:
        """Append empty micro-batches where the interleaved schedule needs a multiple of the pipeline's depth."""
        missing = -len(batches) % mpu.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 0
        return [*batches, *(empty_like(batches[0]) for _ in range(missing))]

    def _forward(self, iterator: Iterator[TrainBatch], chunk: Any, *, finish: Callable[..., Any]) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(iterator)
        bounds = batch.cu_seqlens_S.tolist()
        lengths = [b - a for a, b in pairwise(bounds) if b <= batch.num_real_toks]
        context, positions = packed_context(lengths, batch.tokens_T.numel(), batch.tokens_T.device)
        hidden = chunk(batch.tokens_T[None], positions[None], None, packed_seq_params=context)
        return hidden, partial(finish, batch=batch, model=unwrap(chunk))

    def _masked_logprobs(self, hidden: Tensor, batch: TrainBatch, model: PolicyModel) -> tuple[Tensor, Tensor]:
        """Compute log-probs at masked positions only and scatter them into [T]."""
        rows = batch.loss_rows_L
        assert rows is not None, "TrainBatch makes them"
        flat = gathered_hidden(model, hidden)
        logp, entropy = token_logprobs(
            flat[rows], model.head_weight(), batch.labels_T[rows], head_shard(model, self._vocab_size), self._temperature
        )
        zeros = torch.zeros(batch.tokens_T.numel(), dtype=torch.float32, device=flat.device)
        return zeros.index_copy(0, rows, logp), zeros.index_copy(0, rows, entropy)

    def _loss(
        self, hidden: Tensor, *, batch: TrainBatch, model: PolicyModel, loss_function: LossFunction
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logp, entropy = self._masked_logprobs(hidden, batch, model)
        loss, metrics = loss_function(logp, entropy, batch)
        return loss, torch.ones((), dtype=torch.int, device=hidden.device), metrics

    def _read_logprobs(self, hidden: Tensor, *, batch: TrainBatch, model: PolicyModel, non_loss_data: bool = True) -> tuple[Tensor, Tensor]:
        return self._masked_logprobs(hidden, batch, model)
