"""The core attention of a packed batch, by segments and through a stand-in for torch's kernel that attends in the padding too.

Each is compared with the other where tokens are; nothing comes out of padding. The kernels themselves run on a GPU (tests/gpu).
"""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from jetrl_megatron.actor.attention import CoreAttention, _CausalAttention
from jetrl_megatron.actor.packed import packed_context
from jetrl_megatron.config import AttentionBackward, AttentionKernel

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, TOTAL = 4, 2, 16, 12
LENGTHS = [5, 4]


def varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, bounds_k: Tensor, longest: int, longest_k: int, **options: object
) -> Tensor:
    """The stand-in: every segment of the bounds, the padding's too, attends causally to itself."""
    assert options["window_size"] == (-1, 0) and torch.equal(bounds, bounds_k) and longest == longest_k
    out = torch.empty_like(q)
    for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert b - a <= longest
        heads = [x[a:b].transpose(0, 1) for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
        out[a:b] = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=options["scale"]).transpose(0, 1)
    return out


@pytest.fixture(params=[AttentionKernel.reference, AttentionKernel.flash2], ids=lambda k: k.value)
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CoreAttention:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    rope = SimpleNamespace(rotate=lambda x, positions, bound: x)
    backward = AttentionBackward(request.param.value)
    config = SimpleNamespace(kv_channels=DIM, flow_rope=rope, flow_attention=request.param, flow_attention_backward=backward)
    return CoreAttention(config, 1)


@pytest.mark.parametrize("lengths", [LENGTHS, [TOTAL], []])
def test_padding_rows_are_zero_and_pass_no_gradient(attention: CoreAttention, lengths: list[int]) -> None:
    """Padding has no zero keys and values where qkv has a bias (Qwen2): here all rows are ones or larger."""
    torch.manual_seed(0)
    q, k, v = (1.0 + torch.rand(TOTAL, h, DIM, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    context, _ = packed_context(lengths, TOTAL, CPU)
    out = attention(q, k, v, None, packed_seq_params=context).view(TOTAL, HEADS, DIM)
    real = sum(lengths)
    assert torch.equal(out[real:], torch.zeros(TOTAL - real, HEADS, DIM, dtype=torch.float64))
    if attention.kernel is AttentionKernel.reference:
        bounds = context.cu_seqlens
        expected = varlen_attn(q, k, v, bounds, bounds, TOTAL, TOTAL, scale=DIM**-0.5, window_size=(-1, 0))[:real]
    else:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        rows = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        expected = torch.cat([q[:0], *(_CausalAttention.apply(q[r], k[r], v[r], DIM**-0.5) for r in rows)])
    assert torch.allclose(out[:real], expected, rtol=0, atol=1e-14)  # float64 sums of 12 terms below 2
    out.sum().backward()
    for x in inputs:
        assert x.grad is None or torch.equal(x.grad[real:], torch.zeros_like(x[real:]))
