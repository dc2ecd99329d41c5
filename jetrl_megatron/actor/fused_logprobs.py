"""Log-probs and entropy of labels where Triton runs: GEMM and one pass over each chunk of logits.

Enters and leaves: what `logprobs.token_logprobs` documents. With m, s, d, p of a row (`row_sums`):

    logp  = (p - m) - log s    entropy = log s - d / s

Invariants: a row's bits depend on its logits alone, not on how many ranks share them (triton_vocab_blocks.py); the log normaliser is kept
as (m, log s), since their sum would lose what is small beside a large m. The backward takes the first chunk's logits from the forward and
makes the others again, by the same GEMM of the same rows; it writes their gradient in BF16, the format of both GEMMs that read it, and the
GEMM adds dW into FP32 `main_grad` itself. No more than one chunk of logits is alive at any time, and none where no gradient is wanted.
Left out: the float64 reference (logprobs.py) and whether the GEMM's rows depend on how many it has, which is cuBLAS's matter.
"""

from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.actor.logprobs import VocabShard, head_gradients, plain_logits, row_chunks
from jetrl_megatron.actor.triton_logprobs import logit_gradient, row_sums
from jetrl_megatron.actor.triton_vocab_blocks import SharedRowSums, chunk_columns


def combine(sums_n4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logp [n], entropy [n] and (maximum, log total) [n, 2], float32, of `row_sums`, [n, 4]."""
    top, total, dot, picked = sums_n4.unbind(-1)
    log_total = total.log()
    return (picked - top) - log_total, log_total - dot / total, torch.stack((top, log_total), dim=-1)


class FusedTokenLogprobs(torch.autograd.Function):
    """Saves the hidden states, the log normaliser and, until the backward takes them, the logits of the first chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, shard: VocabShard, temperature: float) -> tuple[Tensor, Tensor]:
        """Return (logp, entropy), [n] float32 each; the arguments are those of `token_logprobs`."""
        sums = torch.empty(hidden.shape[0], 4, dtype=torch.float32, device=hidden.device)
        shared = SharedRowSums(shard, weight.shape[0], hidden.shape[0], temperature, hidden.device) if shard.ranks > 1 else None
        logits: Tensor | None = None
        # The first chunk, which no other is larger than, comes last: then it can be kept without a second one beside it.
        for rows in reversed(row_chunks(hidden, chunk_columns(shard, weight.shape[0]))):
            logits = None  # the next chunk takes their memory
            logits = plain_logits(hidden[rows], weight)
            if shared is None:
                sums[rows] = row_sums(logits, labels[rows], shard.valid, temperature)
            else:
                shared.add(rows, logits, labels[rows])
        logp, entropy, norm = combine(sums if shared is None else shared.result())
        ctx.save_for_backward(hidden, weight, labels, norm)
        ctx.first_logits = logits  # Where no gradient is wanted ctx has no owner, and they die with it.
        ctx.shard, ctx.temperature, ctx.weight_ref = shard, temperature, weight
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Return the gradients of hidden states and weight; that of the weight goes into `main_grad` where there is one."""
        return *head_gradients(ctx, grads[0].contiguous(), _backward_rows), None, None, None


def _backward_rows(ctx: Any, dlogp: Tensor, dhidden: Tensor, dweight: Tensor | None) -> None:
    """Write the gradient of the hidden states [n, H] and add that of the weight [V_r, H] float32."""
    hidden, weight, labels, norm = ctx.saved_tensors
    for rows in row_chunks(hidden, chunk_columns(ctx.shard, weight.shape[0])):
        _backward_chunk(ctx, (hidden[rows], weight, labels[rows], norm[rows]), dlogp[rows], dhidden[rows], dweight)


def _backward_chunk(ctx: Any, saved: tuple[Tensor, ...], dlogp: Tensor, dhidden: Tensor, dweight: Tensor | None) -> None:
    """One chunk; a function, so that the gradient of its logits is free when it returns."""
    hidden, weight, labels, norm = saved
    span = (ctx.shard.start, ctx.shard.valid)
    # No name holds the logits: they are free before the GEMMs. A second backward through a retained graph makes the first ones again too.
    dlogits = logit_gradient(_take_logits(ctx, hidden, weight), labels, norm, dlogp, span, ctx.temperature)
    torch.mm(dlogits, weight, out=dhidden)
    if dweight is None:
        return
    if dweight.is_cuda:
        torch.addmm(dweight, dlogits.t(), hidden, out_dtype=torch.float32, out=dweight)
    else:  # Triton's interpreter
        dweight += dlogits.t().float() @ hidden.float()


def _take_logits(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the first chunk's logits, which the forward left, to the first chunk that asks; make those of any other."""
    logits, ctx.first_logits = ctx.first_logits, None
    return plain_logits(hidden, weight) if logits is None else logits
