"""Flash attention of packed segments on a GPU against the float64 reference: outputs, gradients, grouped heads, rows that stand alone.

The last test prints the time of both backwards at 8192 tokens.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from jetrl_megatron.actor.attention import _CausalAttention  # noqa: E402
from jetrl_megatron.actor.flash import attend, resolve_attention, resolve_backward  # noqa: E402
from jetrl_megatron.actor.packed import packed_context  # noqa: E402
from jetrl_megatron.config import AttentionBackward, AttentionKernel  # noqa: E402

LENGTHS = (1, 130, 7, 374)
KERNELS = [AttentionKernel.flash2, AttentionKernel.flash3]
LONG = (600, 2100, 3072, 2200)
"""One for FlashAttention-2, two of the bucket 2304 that do not lie end to end, one that is a bucket."""
CUDNN, FLASH2 = AttentionBackward.cudnn, AttentionBackward.flash2


def operands(heads: int, kv_heads: int, dim: int, total: int = sum(LENGTHS)) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(dim)
    return [torch.randn(total, n, dim, generator=g).bfloat16() for n in (heads, kv_heads, kv_heads, heads)]


def packed(lengths: Sequence[int] = LENGTHS, total: int = 0):
    return packed_context(list(lengths), total or sum(lengths), torch.device("cuda"))[0]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float) -> torch.Tensor:
    """The real rows, segment by segment in float64 on the CPU."""
    parts = [_CausalAttention.apply(q[a:b], k[a:b], v[a:b], scale) for a, b in pairwise(accumulate(lengths, initial=0))]
    return torch.cat(parts)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double().cpu() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.value)
@pytest.mark.parametrize("shape", [(8, 8, 64), (12, 4, 64), (8, 2, 128)])
def test_outputs_and_gradients_are_those_of_float64(kernel, shape):
    resolve_attention(kernel, torch.device("cuda"))
    q, k, v, grad = operands(*shape)
    scale = shape[2] ** -0.5
    mine = [x.cuda().requires_grad_() for x in (q, k, v)]
    out = attend(*mine, packed(), scale, kernel, FLASH2)
    out.backward(grad.cuda())
    theirs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = reference(*theirs, LENGTHS, scale)
    expected.backward(grad)
    # BF16 outputs round at 2^-9 each, and the probabilities are BF16 in the kernels' second product and in their backward.
    assert relative(out.detach(), expected.detach()) < 0.005
    for got, want in zip(mine, theirs, strict=True):
        assert relative(got.grad, want.grad) < 0.01


@pytest.mark.parametrize("shape", [(4, 4, 64), (6, 2, 64), (4, 1, 128), (4, 4, 128)])
def test_gradients_of_long_segments_are_those_of_float64(shape):
    kernel = resolve_attention(AttentionKernel.flash3, torch.device("cuda"))
    assert resolve_backward(AttentionBackward.auto, kernel, shape[2], deterministic=False) is CUDNN
    real, padding = sum(LONG), 100
    q, k, v, grad = operands(*shape, real + padding)
    grad[real:] = 0
    scale = shape[2] ** -0.5
    mine, other = ([x.cuda().requires_grad_() for x in (q, k, v)] for _ in range(2))
    context = packed(LONG, real + padding)
    out = attend(*mine, context, scale, kernel, CUDNN)
    assert torch.equal(out, attend(*other, context, scale, kernel, FLASH2)), "the forward does not know of the backward"
    assert not out[real:].any()
    out.backward(grad.cuda())
    theirs = [x[:real].clone().requires_grad_() for x in (q, k, v)]
    reference(*theirs, LONG, scale).backward(grad[:real])
    for got, want in zip(mine, theirs, strict=True):
        assert not got.grad[real:].any()
        for a, b in context.segments:  # each by itself: the longest would hide a short one
            assert relative(got.grad[a:b], want.grad[a:b]) < 0.01, (a, b)


def test_the_backward_by_segment_does_not_wait_for_the_device():
    q, k, v, grad = (x.cuda() for x in operands(4, 1, 128, sum(LONG)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, packed(LONG), 0.1, AttentionKernel.flash3, CUDNN)
    for mode in ("default", "error"):  # the first call plans and takes host memory
        torch.cuda.set_sync_debug_mode(mode)
        try:
            torch.autograd.grad(out, leaves, grad, retain_graph=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_micro_batch_is_laid_out_without_waiting_for_the_device():
    torch.zeros(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        context, positions = packed_context(list(LENGTHS), 600, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu, expected = packed_context(list(LENGTHS), 600, torch.device("cpu"))
    assert torch.equal(positions.cpu(), expected) and torch.equal(context.cu_seqlens.cpu(), on_cpu.cu_seqlens)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.value)
def test_a_segments_rows_do_not_depend_on_the_others(kernel):
    q, k, v, _ = (x.cuda() for x in operands(8, 2, 128))
    whole = attend(q, k, v, packed(), 0.1, kernel, FLASH2)
    alone = attend(q[138:], k[138:], v[138:], packed(LENGTHS[3:]), 0.1, kernel, FLASH2)
    assert torch.equal(whole[138:], alone)


def test_the_rope_kernel_gives_the_bytes_of_the_torch_form():
    from jetrl_megatron.actor.rope import RopeTable, inverse_frequencies

    on_cpu, on_gpu = (RopeTable(inverse_frequencies(128, 1e6, None).to(d), torch.device(d), torch.bfloat16) for d in ("cpu", "cuda"))
    x = torch.randn(300, 5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    positions = torch.arange(300) * 7 % 1001
    on_gpu._cos_sin = tuple(t.cuda() for t in on_cpu._table(1001))  # cosines of two devices may round apart; the rotation must not
    assert torch.equal(on_gpu.rotate(x.cuda(), positions.cuda(), 1001).cpu(), on_cpu.rotate(x, positions, 1001))


def test_time_of_the_backward_of_8192_tokens(capsys):
    """Median of 10; dq, dk and dv of the two must be near each other, the time is only printed."""
    q, k, v, grad = (x.cuda() for x in operands(32, 8, 128, 8192))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grads, times = {}, {}
    for backward in (FLASH2, CUDNN):
        out = attend(*leaves, packed([8192]), 128**-0.5, AttentionKernel.flash3, backward)
        spans = []
        for _ in range(13):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            grads[backward] = torch.autograd.grad(out, leaves, grad, retain_graph=True)
            end.record()
            torch.cuda.synchronize()
            spans.append(start.elapsed_time(end))
        times[backward] = median(spans[3:])
    with capsys.disabled():
        print(f"\nbackward of 8192 tokens, 32 / 8 heads of 128: {', '.join(f'{b.value} {t:.3f} ms' for b, t in times.items())}")
    for got, want in zip(grads[CUDNN], grads[FLASH2], strict=True):
        assert relative(got, want.cpu()) < 0.01
