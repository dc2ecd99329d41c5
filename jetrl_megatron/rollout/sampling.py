"""Drawing a token from logits: temperature, top-k, top-p, greedy; one uniform number a token from a generator of the request's own.

Enters: full-vocabulary logits [B, V] FP32 (already divided by the temperature; padding at -inf) and uniforms [B]. Leaves: token ids [B]
and, where the distribution was truncated, the log-probs [B] under the renormalised one. Invariant: row b depends on row b alone.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from jetrl_megatron.contracts import SamplingParams


def request_generator(seed: int, prompt_id: str, sample_index: int) -> np.random.Generator:
    """Return the generator of one request: counter-based, keyed by seed, prompt and sample, so that batching cannot change a draw."""
    digest = hashlib.sha256(f"{seed}\0{prompt_id}\0{sample_index}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def _truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Put -inf at tokens outside top-k, then outside top-p of what is left; the most probable token always stays."""
    if params.top_k and params.top_k < logits.shape[1]:
        kth = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if params.top_p < 1.0:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        logits = logits.masked_fill((before >= params.top_p).scatter(1, index, before >= params.top_p), -math.inf)
    return logits


def draw(logits_BV: Tensor, params: SamplingParams, uniforms_B: Tensor) -> tuple[Tensor, Tensor | None]:
    """Draw one token a row.

    Args:
        logits_BV: [B, V] float32, divided by the temperature (by 1 when greedy), -inf where no token is.
        params: temperature 0 takes the largest logit (lowest id among equals).
        uniforms_B: [B] float64 in [0, 1).

    Returns:
        ids [B] int64, and log-probs [B] float32 under the truncated distribution, or None where nothing was cut off (the caller then asks
        `token_logprobs`, as the trainer does).
    """
    if params.temperature == 0.0:
        return logits_BV.argmax(-1), None
    truncated = params.top_k > 0 or params.top_p < 1.0
    wide = logits_BV.double()
    if truncated:
        wide = _truncate(wide, params)
    weights = torch.exp(wide - wide.amax(-1, keepdim=True))
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, uniforms_B.to(wide.device)[:, None] * total, right=True).squeeze(1)
    ids = ids.clamp(max=logits_BV.shape[1] - 1)
    if not truncated:
        return ids, None
    return ids, torch.log(weights.gather(1, ids[:, None]).squeeze(1) / total.squeeze(1)).float()
