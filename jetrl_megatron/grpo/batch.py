"""Samples to the tensors of packed micro-batches.

Enters: samples and a plan (`packing.py`). Leaves: `TrainBatch` (see `contracts` for the shift convention). A sequence is prompt then
completion, end to end with the next; positions restart in each; the zero padding behind the last is its own segment with mask 0.
Lengths, the end-of-sequence token and truncation all come from the engine's token ids and finish reason, never from a token's value;
text is never encoded again.

Loss denominators, over all samples of the minibatch on all data-parallel ranks:
`token`: each counted token weighs 1 / (counted tokens). `sequence`: 1 / (counted tokens of its sequence * sequences that have one).
A token counts when its loss mask is 1. Without any counted token every weight is 0, with a warning.
"""

import logging
from collections.abc import Sequence

import torch

from jetrl_megatron.config import LossNorm
from jetrl_megatron.contracts import Completion, Prompt, Sample, TrainBatch

_LOG = logging.getLogger(__name__)


def sequence_length(sample: Sample) -> int:
    """Tokens of prompt and completion together."""
    return len(sample.prompt.token_ids) + len(sample.completion.token_ids)


def token_weights(samples: Sequence[Sample], norm: LossNorm) -> list[float]:
    """Return for each sample the weight of one counted token, over the denominator of the whole minibatch.

    samples: all samples of one optimizer step, of every data-parallel rank.
    """
    counted = [sum(sample.loss_mask) for sample in samples]
    if not any(counted):
        _LOG.warning("no token of %d samples counts (all are masked): the loss of this step is 0", len(samples))
        return [0.0] * len(samples)
    if norm is LossNorm.token:
        return [1.0 / sum(counted)] * len(samples)
    num_sequences = sum(1 for count in counted if count)
    return [1.0 / (count * num_sequences) if count else 0.0 for count in counted]


def build_train_batch(samples: Sequence[Sample], indices: Sequence[int], length: int, weights: Sequence[float]) -> TrainBatch:
    """Pack some samples into one micro-batch of CPU tensors.

    samples: all samples of the step. indices: those to pack here, in order; empty gives padding only. length: T of the plan.
    weights: `token_weights(samples, norm)`, one a sample. Raises ValueError for an empty prompt, whose first completion token nothing
    predicts, and asserts that ids, log-probs and mask of each completion have one length.
    """
    tokens, positions, labels = [0] * length, [0] * length, [0] * length
    mask, weight, advantages, rollout = ([0.0] * length for _ in range(4))
    cu_seqlens = [0]
    for index in indices:
        sample, start = samples[index], cu_seqlens[-1]
        prompt, completion = sample.prompt.token_ids, sample.completion.token_ids
        _check(sample)
        ids, first = [*prompt, *completion], start + len(prompt) - 1
        end = start + len(ids)
        assert end <= length, f"sample {index} ends at {end}, behind the micro-batch length {length}"
        tokens[start:end] = ids
        positions[start:end] = range(len(ids))
        labels[start : end - 1] = ids[1:]
        for offset, (counts, logprob) in enumerate(zip(sample.loss_mask, sample.completion.logprobs, strict=True)):
            if counts:
                mask[first + offset] = 1.0
                weight[first + offset] = weights[index]
                advantages[first + offset] = sample.advantage
                rollout[first + offset] = logprob
        cu_seqlens.append(end)
    num_real = cu_seqlens[-1]
    if num_real < length:
        cu_seqlens.append(length)
    return TrainBatch(
        tokens_T=torch.tensor(tokens, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        cu_seqlens_S=torch.tensor(cu_seqlens, dtype=torch.int32),
        labels_T=torch.tensor(labels, dtype=torch.int64),
        loss_mask_T=torch.tensor(mask, dtype=torch.float32),
        loss_weight_T=torch.tensor(weight, dtype=torch.float32),
        advantages_T=torch.tensor(advantages, dtype=torch.float32),
        rollout_logprobs_T=torch.tensor(rollout, dtype=torch.float32),
        num_real_toks=num_real,
        sample_index_S=tuple(indices),
    )


def completion_positions(batch: TrainBatch, samples: Sequence[Sample]) -> torch.Tensor:
    """Return [T] int64: at each position that predicts a completion token, the token's index in its completion; 0 elsewhere."""
    positions_T = torch.zeros_like(batch.tokens_T)
    for _, first, end in completion_spans(batch, samples):
        positions_T[first:end] = torch.arange(end - first, device=positions_T.device)
    return positions_T


def supervised_sample(prompt: Prompt, target_ids: Sequence[int]) -> Sample:
    """Return a sample that teaches a given answer, for the warm start: every target token counts, log-probs and advantage are unused.

    target_ids: token ids of the answer, with the end-of-sequence token.
    """
    count = len(target_ids)
    completion = Completion(
        prompt_id=prompt.id,
        sample_index=0,
        token_ids=tuple(target_ids),
        logprobs=(0.0,) * count,
        finish_reason="stop",
        versions=(0,) * count,
    )
    return Sample(prompt=prompt, completion=completion, reward=0.0, advantage=0.0, loss_mask=(1,) * count)


def completion_spans(batch: TrainBatch, samples: Sequence[Sample]) -> list[tuple[int, int, int]]:
    """Return for each packed sample its index and the range of positions that predict its completion; samples: the list that was packed."""
    spans, start = [], 0
    for index in batch.sample_index_S:
        sample = samples[index]
        end = start + sequence_length(sample)
        spans.append((index, start + len(sample.prompt.token_ids) - 1, end - 1))
        start = end
    assert start == batch.num_real_toks, f"the samples hold {start} tokens, the batch {batch.num_real_toks}: not the list that was packed"
    return spans


def _check(sample: Sample) -> None:
    completion = sample.completion
    if not sample.prompt.token_ids:
        raise ValueError(f"prompt {sample.prompt.id} has no tokens; its first answer token would have nothing to predict it from")
    counts = (len(completion.token_ids), len(completion.logprobs), len(sample.loss_mask))
    assert len(set(counts)) == 1, f"{completion.prompt_id}/{completion.sample_index}: ids, log-probs and mask have {counts} entries"
