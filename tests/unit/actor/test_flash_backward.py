"""The backward by segment: which rows go into which call, what they are filled up with, and that the filling adds nothing.

The two kernels are stand-ins that compute the formula in float64; they themselves run on a GPU (tests/gpu/test_attention.py).
"""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetrl_megatron.actor import flash, flash_backward
from jetrl_megatron.actor.attention import _CausalAttention
from jetrl_megatron.actor.flash_backward import Operands, bucket_length, plan_backward, segment_backward
from jetrl_megatron.actor.packed import packed_context
from jetrl_megatron.config import AttentionBackward, AttentionKernel

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = DIM**-0.5
SHORTEST = 16


def segments_of(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise(accumulate(lengths, initial=0)))


def operands(total: int, real: int) -> Operands:
    """Packed rows; the output's gradient is zero in the padding, and nothing else is."""
    g = torch.Generator().manual_seed(total)
    do, q, k, v, out = (1 + torch.randn(total, h, DIM, generator=g).double() for h in (HEADS, HEADS, KV_HEADS, KV_HEADS, HEADS))
    do[real:] = 0
    return Operands(do, q, k, v, out, torch.randn(HEADS, total, generator=g).double())


def causal_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One sequence [L, H, D] -> its output and lse [Hq, L]."""
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) * scale
    scores = scores.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(HEADS // KV_HEADS, 1)), scores.logsumexp(-1)


def formula(x: Operands, scale: float) -> tuple[Tensor, ...]:
    """The backward of flash_backward.py's docstring on a dense batch [B, H, L, D], lse [B, Hq, L, 1]."""
    group = x.q.shape[1] // x.k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (x.k, x.v))
    p = torch.exp(x.q @ k.mT * scale - x.lse).tril()
    ds = p * (x.do @ v.mT - (x.do * x.out).sum(-1, keepdim=True))
    dk, dv = ((t.unflatten(1, (-1, group)).sum(2)) for t in (ds.mT @ x.q * scale, p.mT @ x.do))
    return ds @ k * scale, dk, dv


def formula_by_bounds(x: Operands, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, ...]:
    """The same over packed rows, as the FlashAttention-2 backward takes them."""
    assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(x.q)
    assert longest == bounds.diff().max() and all(t.is_contiguous() for t in x)
    parts = []
    for a, b in pairwise(bounds.tolist()):
        dense = (t[a:b].transpose(0, 1)[None] for t in x[:-1])
        parts.append([g[0].transpose(0, 1) for g in formula(Operands(*dense, lse=x.lse[None, :, a:b, None]), scale)])
    return tuple(torch.cat(grads) for grads in zip(*parts, strict=True))


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_backward, "cudnn_backward", formula)
    monkeypatch.setattr(flash_backward, "flash2_backward", formula_by_bounds)


def test_buckets() -> None:
    lengths = [1, 256, 257, 2048, 2049, 4096, 4097, 8191, 8192, 8193, 16385]
    assert [bucket_length(n) for n in lengths] == [256, 256, 512, 2048, 2304, 4096, 4608, 8192, 8192, 9216, 18432]
    assert {bucket_length(n) for n in range(4097, 8193)} == {4096 + 512 * i for i in range(1, 9)}


@given(st.integers(1, 1 << 20))
def test_a_bucket_adds_at_most_an_eighth_or_255_rows(length: int) -> None:
    bucket = bucket_length(length)
    assert length <= bucket < length + max(256, length / 8 + 1) and bucket_length(bucket) == bucket


@given(st.lists(st.integers(0, 40_000), max_size=12))
def test_every_real_row_is_in_one_call(lengths: list[int]) -> None:
    segments = segments_of(lengths)
    plan = plan_backward(segments)
    called = [*plan.short, *(segment for batch in plan.batches.values() for segment in batch)]
    assert sorted(called) == [(a, b) for a, b in segments if b > a]
    assert all(b - a < flash_backward.SHORTEST_CUDNN_TOKS for a, b in plan.short)
    for bucket, batch in plan.batches.items():
        assert all(b - a >= flash_backward.SHORTEST_CUDNN_TOKS and bucket_length(b - a) == bucket for a, b in batch)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 3, 15, 16, 17, 255, 256, 257, 300, 512]), max_size=7), st.sampled_from([0, 1, 128]))
def test_rows_go_to_the_kernels_and_come_back_to_their_places(lengths: list[int], padding: int) -> None:
    """Each stand-in adds one to q, k and v: every real row must come back so, once, and padding as zeros."""
    real = sum(lengths)
    x = operands(real + padding + (real + padding == 0), real)
    x = x._replace(lse=x.q[..., 0].T.contiguous())  # so that a row's lse can be told
    seen = {"cudnn": 0, "flash2": 0}

    def cudnn(y: Operands, scale: float) -> tuple[Tensor, ...]:
        assert y.q.stride() == y.do.stride() == y.out.stride() and y.lse.is_contiguous() and y.lse.shape == (*y.q.shape[:3], 1)
        filled = y.q.abs().sum((1, 3)) == 0
        for t in y:
            assert not t.transpose(1, 2)[filled].any()
        seen["cudnn"] += int((~filled).sum())
        assert torch.equal(y.lse, y.q[..., :1])
        return y.q + 1, y.k + 1, y.v + 1

    def flash2(y: Operands, bounds: Tensor, longest: int, scale: float) -> tuple[Tensor, ...]:
        seen["flash2"] += len(y.q)
        short = [n for n in lengths if 0 < n < SHORTEST]
        assert bounds.diff().tolist() == short and longest == max(short) and torch.equal(y.lse, y.q[..., 0].T)
        return y.q + 1, y.k + 1, y.v + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_backward, "cudnn_backward", cudnn)
        patch.setattr(flash_backward, "flash2_backward", flash2)
        grads = segment_backward(x, segments_of(lengths), SCALE, SHORTEST)
    assert seen == {"cudnn": sum(n for n in lengths if n >= SHORTEST), "flash2": sum(n for n in lengths if n < SHORTEST)}
    for got, given_ in zip(grads, (x.q, x.k, x.v), strict=True):
        assert torch.equal(got[:real], given_[:real] + 1) and got.shape == given_.shape and not got[real:].any()


@pytest.mark.parametrize(("lengths", "copied"), [([512], False), ([512, 512], False), ([500], True), ([512, 3, 512], True)])
def test_full_buckets_end_to_end_are_not_copied(monkeypatch: pytest.MonkeyPatch, lengths: list[int], copied: bool) -> None:
    x = operands(sum(lengths), sum(lengths))
    results: list[Tensor] = []

    def cudnn(y: Operands, scale: float) -> tuple[Tensor, ...]:
        assert all((given_.data_ptr() != own.data_ptr()) == copied for given_, own in zip(y[:-1], x[:-1], strict=True))
        results.extend(torch.empty_like(t) for t in (y.q, y.k, y.v))
        return tuple(results)

    monkeypatch.setattr(flash_backward, "cudnn_backward", cudnn)
    monkeypatch.setattr(flash_backward, "flash2_backward", formula_by_bounds)
    grads = segment_backward(x, segments_of(lengths), SCALE, SHORTEST)
    assert [g.data_ptr() == r.data_ptr() for g, r in zip(grads, results, strict=True)] == [len(lengths) == 1] * 3


@pytest.mark.parametrize("backward", [AttentionBackward.cudnn, AttentionBackward.flash2])
@pytest.mark.parametrize("padding", [1, 40, 0])
@pytest.mark.parametrize("lengths", [[5], [5, 40, 9, 200, 300, 256, 1], [300, 310], [256]])
def test_gradients_through_both_kernels_are_the_references(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, lengths: list[int], padding: int, backward: AttentionBackward
) -> None:
    monkeypatch.setattr(flash_backward.segment_backward, "__defaults__", (SHORTEST,))
    monkeypatch.setattr(flash, "flash2_backward", formula_by_bounds)

    def flash3(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        parts = [causal_forward(q[a:b], k[a:b], v[a:b], options["softmax_scale"]) for a, b in pairwise(options["cu_seqlens_q"].tolist())]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    monkeypatch.setattr(flash, "_flash3_forward", lambda: flash3)
    real = sum(lengths)
    x = operands(real + padding, real)
    packed, _ = packed_context(lengths, real + padding, torch.device("cpu"))
    mine = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out = flash.attend(*mine, packed, SCALE, AttentionKernel.flash3, backward)
    assert out[:real].any(dim=(1, 2)).all() and not out[real:].any()
    out.backward(torch.cat((x.do[:real], torch.ones_like(x.do[real:]))))  # what comes back to the padding goes nowhere
    theirs = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    torch.cat([_CausalAttention.apply(*(t[a:b] for t in theirs), SCALE) for a, b in packed.segments]).backward(x.do[:real])
    for got, want in zip(mine, theirs, strict=True):
        assert not got.grad[real:].any()
        assert torch.allclose(got.grad, want.grad, rtol=1e-10, atol=1e-11)  # float64 sums of at most 310 terms


def sums_in_order(x: Operands) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One head, [L, D], lse [L]: p, ds, and dk, dv added query by query, so that exact zeros change no bit."""
    p = torch.exp((x.q[:, None] * x.k[None]).sum(-1) * SCALE - x.lse[:, None]).tril()
    ds = p * ((x.do[:, None] * x.v[None]).sum(-1) - (x.do * x.out).sum(-1, keepdim=True))
    dk, dv = torch.zeros_like(x.k), torch.zeros_like(x.v)
    for i in range(len(x.q)):
        dk += ds[i, :, None] * x.q[i] * SCALE
        dv += p[i, :, None] * x.do[i]
    return p, ds, dk, dv


def test_rows_that_fill_a_bucket_add_exactly_nothing() -> None:
    length, bucket = 5, 8
    x = operands(length, length)
    whole = Operands(*(t[:, 0] for t in x[:-1]), lse=x.lse[0])
    filled = Operands(*(torch.cat((t, t.new_zeros(bucket - length, *t.shape[1:]))) for t in whole))
    p, ds, dk, dv = sums_in_order(filled)
    assert not p[:length, length:].any() and torch.equal(p[length:, :length], torch.ones(bucket - length, length).double())
    assert not ds[length:].any() and not dk[length:].any() and not dv[length:].any()
    _, _, expected_dk, expected_dv = sums_in_order(whole)
    assert torch.equal(dk[:length], expected_dk) and torch.equal(dv[:length], expected_dv)
    # The lse must be finite: an empty softmax's -inf makes p infinite and its products with zero NaN.
    filled.lse[length:] = -torch.inf
    assert sums_in_order(filled)[2].isnan().any()
