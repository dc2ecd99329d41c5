"""What passes between the stages of the loop: shapes, dtypes and the one shift convention.

Enters: token ids from `data`, completions from `rollout`, rewards and advantages from `grpo`. Leaves: a `TrainBatch` that
`actor` turns into gradients. Nothing here computes; these are the types that the stages agree on.

Shift convention, used everywhere: a per-token array of a *completion* (log-probs, versions) is aligned with its tokens:
`logprobs[i]` is log p(token_ids[i] | prompt, token_ids[:i]). A per-position array of a *packed* batch is aligned with the position
that predicts: at position j it speaks of `labels[j]`, the token at j + 1 of the same sequence. The last position of each
sequence predicts nothing: its label is 0 and its mask is 0.

Legend of shape suffixes: T packed positions of one micro-batch, S sequences.
"""

from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch

from jetrl_megatron.choices import check_temperature

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question, tokenised once; `id` is what advantages are grouped by."""

    id: str
    """Unique and stable across restarts: source name and row."""
    token_ids: tuple[int, ...]
    text: str
    answer: str
    """Gold answer, already in the form the reward function compares with."""
    source: str


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a completion is drawn. `temperature` 0 is greedy and its log-probs are those of temperature 1."""

    max_new_toks: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Every end-of-sequence id; the one drawn is kept as the last token of the completion."""

    def __post_init__(self) -> None:
        """Check ranges; raises ValueError that names the value."""
        if self.max_new_toks < 1:
            raise ValueError(f"max_new_toks is {self.max_new_toks}; it must be at least 1")
        check_temperature("temperature", self.temperature, greedy=True)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or above")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer to one prompt, as token ids: text is never encoded again."""

    prompt_id: str
    sample_index: int
    """0 .. group_size - 1 within the prompt."""
    token_ids: tuple[int, ...]
    """The end-of-sequence token is included when `finish_reason` is "stop"."""
    logprobs: tuple[float, ...]
    """FP32, nats, under the distribution each token was drawn from."""
    finish_reason: FinishReason
    versions: tuple[int, ...]
    """Weight version that each token was drawn with."""

    def __post_init__(self) -> None:
        """Check that the three per-token arrays keep step."""
        n = len(self.token_ids)
        if n < 1 or len(self.logprobs) != n or len(self.versions) != n:
            raise ValueError(
                f"completion {self.prompt_id}/{self.sample_index}: {n} token ids, {len(self.logprobs)} log-probs, "
                f"{len(self.versions)} versions; the three must be equal and at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A completion with what the loop learned about it; the unit that is packed into batches."""

    prompt: Prompt
    completion: Completion
    reward: float
    advantage: float
    """One number for the whole completion (GRPO)."""
    loss_mask: tuple[int, ...]
    """One entry a completion token: 0 takes it out of the loss (overlong handling, masks)."""


class WeightVersion(NamedTuple):
    """Which weights an engine holds: grows by one each optimizer step, across restarts too."""

    step: int
    sha256: str
    """Digest over every tensor's codes and scales, in name order."""


@dataclass(kw_only=True)
class TrainBatch:
    """One packed micro-batch: sequences end to end, then zero padding to a legal length. Equal on all TP and PP ranks of a replica."""

    tokens_T: torch.Tensor
    """[T] int64."""
    positions_T: torch.Tensor
    """[T] int64, restarting at 0 in each sequence; 0 in the padding."""
    cu_seqlens_S: torch.Tensor
    """[S + 1] int32, on the host; the padding behind the last sequence is one more segment, included here when it is not empty."""
    labels_T: torch.Tensor
    """[T] int64, the next token of the same sequence, 0 where there is none."""
    loss_mask_T: torch.Tensor
    """[T] float32, 1 where the label is a response token that counts."""
    loss_weight_T: torch.Tensor
    """[T] float32: the mask over the *global* denominator, so that the loss is a plain sum over ranks and micro-batches."""
    advantages_T: torch.Tensor
    """[T] float32."""
    rollout_logprobs_T: torch.Tensor
    """[T] float32, nats; 0 outside the mask."""
    old_logprobs_T: torch.Tensor | None = None
    """[T] float32: the actor's own log-probs before the first update on this batch."""
    ref_logprobs_T: torch.Tensor | None = None
    """[T] float32: the reference policy's, in the same precision flow."""
    loss_rows_L: torch.Tensor | None = None
    """[L] int64, the positions where `loss_mask_T` is not 0, ascending. Made of the mask when the batch is built: L is known on the host
    then, where asking a device for it in every step would stop the host. Who changes the mask builds the batch anew."""
    num_real_toks: int = 0
    """Positions before the padding."""
    sample_index_S: tuple[int, ...] = ()
    """For each real sequence its index in the list of samples that was packed."""

    def to(self, device: torch.device) -> "TrainBatch":
        """Return the batch with its tensors on `device`; the segment bounds stay on the host, which cuts the batch by them."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in moved.items():
            if isinstance(value, torch.Tensor) and name != "cu_seqlens_S":
                moved[name] = value.to(device)
        return TrainBatch(**moved)

    def __post_init__(self) -> None:
        """List the positions of the mask; assert that the packed arrays have one length and the segments cover it."""
        total = self.tokens_T.numel()
        for name in ("positions_T", "labels_T", "loss_mask_T", "loss_weight_T", "advantages_T", "rollout_logprobs_T"):
            assert getattr(self, name).shape == (total,), (name, getattr(self, name).shape, total)
        if self.loss_rows_L is None:
            self.loss_rows_L = self.loss_mask_T.nonzero().squeeze(1)
        assert int(self.cu_seqlens_S[0]) == 0 and int(self.cu_seqlens_S[-1]) == total, (self.cu_seqlens_S, total)
