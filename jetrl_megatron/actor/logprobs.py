"""Log-probability and entropy of given tokens under the vocab-parallel lm_head, in FP32, without holding [T, V].

    logp_t = z_t[label] - log sum_v exp(z_tv),   z = (h W^T) / temperature

Enters: hidden states [n, H] BF16 behind the final norm, this rank's rows of lm_head [V_r, H] BF16, labels [n]. Leaves: logp and entropy [n]
FP32, equal on all TP ranks. Rows of the padded vocabulary are -inf: they have no probability and no gradient. The same
function serves the loss, the reference policy and the local rollout engine, so their numbers are equal bit for bit.

The lm_head GEMM is BF16 with FP32 logits on both sides. Rows are processed in chunks and the backward makes the logits again, on CUDA all
but the first chunk's. On a CPU the sums over the vocabulary run in float64, here; on CUDA in FP32, in one pass (fused_logprobs.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jetrl_megatron.fp8 import bf16_linear
from jetrl_megatron.fp8.main_grad import deliver_weight_gradient

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 29}
"""Logits of one chunk by device: 64 MiB and 2 GiB in FP32. On CUDA that is all the forward holds beside its sums, and where a gradient is
wanted it leaves the first chunk's, at most 2 GiB, to the backward; that holds a chunk's gradient in BF16 too, 3 GiB in all. A larger chunk
has more of the logits made once only, and passes fewer times over the FP32 gradient of the weight."""


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Which rows of lm_head this rank holds."""

    start: int
    """First vocabulary id of this rank."""
    valid: int
    """Rows of this rank that are real tokens; what follows is padding."""
    vocab_size: int
    """Real tokens of all ranks."""
    group: Any
    """The tensor-parallel group, or None for one rank."""

    @property
    def ranks(self) -> int:
        """How many share the vocabulary."""
        return 1 if self.group is None else int(self.group.size())

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Combine over TP ranks in place."""
        if self.ranks > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return what each TP rank has, [R, *shape], in rank order."""
        if self.ranks == 1:
            return tensor[None]
        parts = tensor.new_empty(self.ranks * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_into_tensor(parts, tensor, group=self.group)
        return parts.view(-1, *tensor.shape)


def vocab_shard(vocab_size: int, rows: int, rank: int, group: Any) -> VocabShard:
    """Return the shard of TP rank `rank` when every rank holds `rows` rows of a vocabulary of `vocab_size` real tokens."""
    start = rank * rows
    return VocabShard(start=start, valid=min(max(vocab_size - start, 0), rows), vocab_size=vocab_size, group=group)


def plain_logits(hidden_nH: Tensor, weight_VH: Tensor) -> Tensor:
    """Return h W^T of this rank's rows, [n, V_r] FP32: the one GEMM of loss, reference and rollout."""
    with torch.no_grad():
        return bf16_linear(hidden_nH, weight_VH, out_dtype=torch.float32)


def head_logits(hidden_nH: Tensor, weight_VH: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Return this rank's logits [n, V_r] FP32, divided by the temperature, padding rows at -inf."""
    logits = plain_logits(hidden_nH, weight_VH)
    if temperature != 1.0:
        logits = logits / torch.tensor(temperature, dtype=torch.float32, device=logits.device)
    logits[:, shard.valid :] = -math.inf
    return logits


def row_chunks(hidden_nH: Tensor, columns: int) -> list[slice]:
    """Return the rows to process together: as many as make `CHUNK_ELEMENTS` logits of `columns` a row."""
    num_rows = hidden_nH.shape[0]
    step = max(1, CHUNK_ELEMENTS[hidden_nH.device.type] // max(1, columns))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


def _pick(logits: Tensor, labels: Tensor, shard: VocabShard) -> Tensor:
    """Return each row's logit at its label where this rank holds it, else 0; [n], dtype of logits."""
    local = labels - shard.start
    mine = (local >= 0) & (local < shard.valid)
    picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    return torch.where(mine, picked, torch.zeros_like(picked))


class _TokenLogprobs(torch.autograd.Function):
    """The float64 reference. Saves the hidden states and the log normaliser; makes logits again in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, temperature: float) -> tuple[Tensor, Tensor]:
        logp, entropy, norm = (hidden.new_empty(hidden.shape[0], dtype=torch.float64) for _ in range(3))
        for rows in row_chunks(hidden, weight.shape[0]):
            logits = head_logits(hidden[rows], weight, shard, temperature)
            top = shard.reduce(logits.amax(-1), dist.ReduceOp.MAX)
            shifted = logits.double() - top.double()[:, None]
            weights = torch.exp(shifted)
            shifted.masked_fill_(shifted == -math.inf, 0.0)
            sums = torch.stack((weights.sum(-1), (weights * shifted).sum(-1), _pick(logits.double(), labels[rows], shard)))
            total, dot, picked = shard.reduce(sums).unbind()
            norm[rows] = top.double() + torch.log(total)
            logp[rows] = picked - norm[rows]
            entropy[rows] = torch.log(total) - dot / total
        ctx.save_for_backward(hidden, weight, labels, norm)
        ctx.shard, ctx.temperature, ctx.weight_ref = shard, temperature, weight
        out = logp.float(), entropy.float()
        ctx.mark_non_differentiable(out[1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        return *head_gradients(ctx, grads[0], _backward_rows), None, None, None


def head_gradients(
    ctx: Any, dlogp: Tensor, backward_rows: Callable[[Any, Tensor, Tensor, Tensor | None], None]
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of hidden states and of the weight, which goes into `main_grad` where there is one; None where not wanted.

    backward_rows: given (ctx, dlogp, dhidden, dweight), writes dhidden [n, H] and adds into dweight [V_r, H] float32, if that is wanted.
    """
    dhidden = torch.empty_like(ctx.saved_tensors[0])
    if not ctx.needs_input_grad[1]:
        backward_rows(ctx, dlogp, dhidden, None)
        return dhidden, None

    def accumulate(out: Tensor | None) -> Tensor:
        dweight = torch.zeros_like(ctx.weight_ref, dtype=torch.float32) if out is None else out
        backward_rows(ctx, dlogp, dhidden, dweight)
        return dweight

    return dhidden, deliver_weight_gradient(ctx.weight_ref, accumulate)


def _backward_rows(ctx: Any, dlogp: Tensor, dhidden: Tensor, dweight: Tensor | None) -> None:
    """Write the gradient of the hidden states [n, H] and add that of the weight [V_r, H] float32, making each chunk's logits again."""
    hidden, weight, labels, norm = ctx.saved_tensors
    for rows in row_chunks(hidden, weight.shape[0]):
        logits = head_logits(hidden[rows], weight, ctx.shard, ctx.temperature).double()
        dlogits = torch.exp(logits - norm[rows, None]).neg_()
        local = labels[rows] - ctx.shard.start
        mine = (local >= 0) & (local < ctx.shard.valid)
        dlogits.scatter_add_(1, local.clamp(0, dlogits.shape[1] - 1)[:, None], mine.double()[:, None])
        dlogits *= dlogp[rows].double()[:, None] / ctx.temperature
        dhidden[rows] = (dlogits @ weight.double()).to(hidden.dtype)
        if dweight is not None:
            dweight += (dlogits.t() @ hidden[rows].double()).float()


def token_logprobs(
    hidden_nH: Tensor, weight_VH: Tensor, labels_n: Tensor, shard: VocabShard, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities, entropies) of the labels, each [n] float32, nats; gradients flow through the first.

    Args:
        hidden_nH: [n, H] BF16, equal on all TP ranks (inside an autograd region that sums its gradient over them).
        weight_VH: [V_r, H] BF16, this rank's rows.
        labels_n: [n] int64 vocabulary ids.
        shard: where this rank's rows lie.
        temperature: the sampling temperature, above 0.

    Raises:
        AssertionError: when the temperature is not above 0.
    """
    assert temperature > 0.0, temperature
    if hidden_nH.shape[0] == 0:
        zero = hidden_nH.float().sum(-1)
        return zero, zero.detach()
    if hidden_nH.is_cuda:
        from jetrl_megatron.actor.fused_logprobs import FusedTokenLogprobs

        logp, entropy = FusedTokenLogprobs.apply(hidden_nH, weight_VH, labels_n, shard, temperature)
    else:
        logp, entropy = _TokenLogprobs.apply(hidden_nH, weight_VH, labels_n, shard, temperature)
    return logp, entropy
