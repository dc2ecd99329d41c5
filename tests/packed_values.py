"""Per-position values of a packed micro-batch as values of each completion, and back."""

from collections.abc import Mapping, Sequence

import torch

from jetrl_megatron.contracts import Sample, TrainBatch
from jetrl_megatron.grpo.batch import completion_spans


def unpack_per_position(values_T: torch.Tensor, batch: TrainBatch, samples: Sequence[Sample]) -> dict[int, torch.Tensor]:
    """For each packed sample, by index in `samples`, its values aligned with the completion's tokens, masked or not."""
    return {index: values_T[first:end].clone() for index, first, end in completion_spans(batch, samples)}


def pack_per_position(values: Mapping[int, torch.Tensor], batch: TrainBatch, samples: Sequence[Sample]) -> torch.Tensor:
    """The inverse, [T] float32, 0 outside the completions."""
    packed_T = torch.zeros(batch.tokens_T.shape)
    for index, first, end in completion_spans(batch, samples):
        packed_T[first:end] = values[index]
    return packed_T
