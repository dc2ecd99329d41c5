"""Core attention over packed sequences and over the decoding cache: rope, causal softmax, grouped kv heads.

    o_i = sum_j p_ij v_j,   p_i = softmax_j<=i(q_i . k_j / sqrt(d))

Enters: q [T, Hq, D], k and v [T, Hkv, D], BF16, before rope, and a PackedContext. Leaves: [T, Hq * D] BF16. Everything between is
computed in the accumulation type (float64 on a CPU) and rounded once, so that a token's output is the same from the training forward
(all its sequence at once) as from decoding (one query against the cache): the invariant that the rollout is a subgraph of training. The
backward keeps only q, k, v and computes the probabilities again. On CUDA a packed batch runs a flash attention kernel instead (flash.py).

Legend: n queries, m keys, g query heads a kv head.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from jetrl_megatron.actor.device import accumulate_dtype
from jetrl_megatron.actor.flash import attend
from jetrl_megatron.actor.packed import PackedContext, with_zero_padding
from jetrl_megatron.config import AttentionKernel


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """[n, Hq, D] -> [Hkv, g * n, D], query head h of kv head h // g."""
    n, num_heads, dim = x.shape
    return x.reshape(n, num_kv_heads, num_heads // num_kv_heads, dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, dim)


def _ungrouped(x: Tensor, n: int) -> Tensor:
    """[Hkv, g * n, D] -> [n, Hq, D]."""
    num_kv_heads, _, dim = x.shape
    return x.reshape(num_kv_heads, -1, n, dim).permute(2, 0, 1, 3).reshape(n, -1, dim)


def _causal_weights(q_hgnd: Tensor, k_hmd: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Unnormalised weights exp(s - max) [Hkv, g * n, m] and their sums [Hkv, g * n, 1]; q is already scaled, m == n."""
    scores = q_hgnd @ k_hmd.transpose(1, 2)
    hidden = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)
    scores = scores.view(scores.shape[0], -1, n, n).masked_fill(hidden, -math.inf).view(scores.shape)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights, weights.sum(-1, keepdim=True)


class _CausalAttention(torch.autograd.Function):
    """Causal attention of one sequence; saves q, k, v only."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        wide, n, heads = accumulate_dtype(q.device), q.shape[0], k.shape[1]
        k_h, v_h = (x.to(wide).transpose(0, 1) for x in (k, v))
        weights, total = _causal_weights(_grouped(q.to(wide) * scale, heads), k_h, n)
        return _ungrouped((weights @ v_h) / total, n).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        wide, n, heads = accumulate_dtype(q.device), q.shape[0], k.shape[1]
        q_h = _grouped(q.to(wide) * ctx.scale, heads)
        k_h, v_h = (x.to(wide).transpose(0, 1) for x in (k, v))
        weights, total = _causal_weights(q_h, k_h, n)
        probs = weights / total
        do_h = _grouped(grads[0].to(wide), heads)
        dv = probs.transpose(1, 2) @ do_h
        dp = do_h @ v_h.transpose(1, 2)
        ds = probs * (dp - (dp * probs).sum(-1, keepdim=True))
        dq = _ungrouped(ds @ k_h, n) * ctx.scale
        dk = ds.transpose(1, 2) @ q_h
        return dq.to(q.dtype), dk.transpose(0, 1).to(k.dtype), dv.transpose(0, 1).to(v.dtype), None


def _decode(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """One query a sequence against its slot: q [B, Hq, D], keys and values [B, L, Hkv, D], lengths [B] -> [B, Hq, D]."""
    wide = accumulate_dtype(q.device)
    batch, num_heads, dim = q.shape
    heads = keys.shape[2]
    q_bhgd = (q.to(wide) * scale).view(batch, heads, num_heads // heads, dim)
    scores = q_bhgd @ keys.to(wide).permute(0, 2, 3, 1)
    beyond = torch.arange(keys.shape[1], device=q.device)[None, :] >= lengths[:, None]
    scores = scores.masked_fill(beyond[:, None, None, :], -math.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = (weights @ values.to(wide).transpose(1, 2)) / weights.sum(-1, keepdim=True)
    return out.reshape(batch, num_heads, dim).to(q.dtype)


class CoreAttention(Module):
    """The `core_attention` of Megatron's SelfAttention; needs a PackedContext at every call.

    Args:
        config: the actor's transformer config; gives head width and the rope table.
        layer_number: 1-based number inside the model chunk; the cache's key.
        softmax_scale: 1 / sqrt(head width) when None.
    """

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        """Keep the scale and the shared rope table."""
        super().__init__()
        self.layer_number = layer_number
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.rope = config.flow_rope
        self.kernel, self.backward_kernel = config.flow_attention, config.flow_attention_backward

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        packed_seq_params: PackedContext,
        **_: Any,
    ) -> Tensor:
        """Attend: query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq * D]; the mask is the context's causal one."""
        ctx = packed_seq_params
        assert isinstance(ctx, PackedContext) and ctx.positions_T is not None, type(ctx)
        query = self.rope.rotate(query, ctx.positions_T, ctx.num_positions)
        key = self.rope.rotate(key, ctx.positions_T, ctx.num_positions)
        out = self._decode_step(query, key, value, ctx) if ctx.decode else self._prefill(query, key, value, ctx)
        return out.reshape(query.shape[0], -1)

    def _prefill(self, query: Tensor, key: Tensor, value: Tensor, ctx: PackedContext) -> Tensor:
        """Every segment is a whole sequence from position 0; writes the cache when there is one."""
        if self.kernel is AttentionKernel.reference:
            out = with_zero_padding(self._by_segment(query, key, value, ctx), ctx.num_real_toks, query.shape[0])
        else:
            out = attend(query, key, value, ctx, self.scale, self.kernel, self.backward_kernel)
        if ctx.cache is not None and ctx.slots_S is not None:
            keys, values = ctx.cache.layer(self.layer_number, key, value)
            for (a, b), slot in zip(ctx.segments, ctx.slots_S.tolist(), strict=True):
                keys[slot, : b - a] = key[a:b].to(keys.dtype)
                values[slot, : b - a] = value[a:b].to(values.dtype)
        return out

    def _by_segment(self, query: Tensor, key: Tensor, value: Tensor, ctx: PackedContext) -> Tensor:
        """Attend sequence by sequence in the accumulation type; returns the real rows only."""
        pieces = [_CausalAttention.apply(query[a:b], key[a:b], value[a:b], self.scale) for a, b in ctx.segments]
        return torch.cat(pieces) if pieces else query[:0]

    def _decode_step(self, query: Tensor, key: Tensor, value: Tensor, ctx: PackedContext) -> Tensor:
        """Every segment is one token: write it into its slot, then attend to the slot."""
        assert ctx.cache is not None and ctx.slots_S is not None and ctx.lengths_S is not None and ctx.positions_T is not None
        num = len(ctx.segments)
        keys, values = ctx.cache.layer(self.layer_number, key, value)
        keys[ctx.slots_S, ctx.positions_T[:num]] = key[:num].to(keys.dtype)
        values[ctx.slots_S, ctx.positions_T[:num]] = value[:num].to(values.dtype)
        bound = ctx.num_positions
        out = _decode(query[:num], keys[ctx.slots_S, :bound], values[ctx.slots_S, :bound], ctx.lengths_S, self.scale)
        return with_zero_padding(out, num, query.shape[0])
