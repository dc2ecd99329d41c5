"""What DeepGEMM is given, in what layout, and when it is not called; the kernel is a stand-in that multiplies what it was given."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from jetrl_megatron.fp8 import BlockScaled, deepgemm, gemm_reference
from jetrl_megatron.fp8.deepgemm import DeepGemmKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N, K = 256, 128
LENGTHS = [1, 5, 64, 130]
"""Tokens: not a multiple of 4 (the stride of scales), not of 128 (a group), and some that are."""


class Recorder:
    """`fp8_gemm_nt`: keeps its arguments, writes the product of the dequantised operands, summed in float64, or adds it to `c`."""

    def __init__(self):
        self.calls = []

    def fp8_gemm_nt(self, a, b, out, c=None, recipe=None, compiled_dims=None):
        self.calls.append(SimpleNamespace(a=a, b=b, out=out, c=c, recipe=recipe, compiled_dims=compiled_dims))
        rows = 1 if recipe else 128
        x, w = (BlockScaled(*pair, block).dequantize().double() for pair, block in ((a, (1, 128)), (b, (rows, 128))))
        out.copy_(x @ w.t() if c is None else c.double() + x @ w.t())


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(deepgemm, "load_deep_gemm", lambda: made)
    return made


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def assert_codes(codes, shape):
    """K-major: the contraction is the contiguous axis."""
    assert (codes.shape, codes.stride(), codes.dtype) == (shape, (shape[1], 1), torch.float8_e4m3fn)


def assert_grouped(pair, rows, cols):
    """1x128 groups: scales column-major, the leading stride a multiple of 4, zeros between the last row and the stride."""
    codes, scale = pair
    assert_codes(codes, (rows, cols))
    leading = (rows + 3) // 4 * 4
    assert (scale.shape, scale.stride(), scale.dtype) == ((rows, cols // 128), (1, leading), torch.float32)
    whole = torch.as_strided(scale, (leading, cols // 128), (1, leading))
    assert not whole[rows:].any()


def assert_blocked(pair, rows, cols):
    codes, scale = pair
    assert_codes(codes, (rows, cols))
    assert scale.shape == (rows // 128, cols // 128) and scale.is_contiguous()


def calc_error(got, want):
    """Relative, of a whole matrix."""
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("toks", LENGTHS)
def test_fprop_and_dgrad_give_the_tokens_as_groups_and_the_weight_as_blocks(recorder, toks):
    kernels = DeepGemmKernels()
    w, w_t = kernels.quantize_weight(randn(N, K))
    for gemm, width, weight in ((kernels.fprop, K, w), (kernels.dgrad, N, w_t)):
        x, _ = kernels.quantize_dual(randn(toks, width, seed=toks))
        y = gemm(x, weight)
        (call,) = recorder.calls
        recorder.calls.clear()
        assert_grouped(call.a, toks, width)
        assert_blocked(call.b, weight.shape[0], width)
        assert call.out is y and (y.shape, y.dtype, call.c, call.recipe) == ((toks, weight.shape[0]), torch.bfloat16, None, None)
        assert call.compiled_dims == "nk", "the number of tokens is free"
        assert torch.equal(y, (x.dequantize().double() @ weight.dequantize().double().t()).bfloat16())


@pytest.mark.parametrize("toks", LENGTHS)
@pytest.mark.parametrize("x_block", [(1, 128), (128, 128)])
def test_wgrad_gives_both_sides_along_the_padded_tokens_and_adds(recorder, toks, x_block):
    kernels = DeepGemmKernels()
    padded = (toks + 127) // 128 * 128
    _, dy_t = kernels.quantize_dual(randn(toks, N, seed=1))
    _, x_t = kernels.quantize_dual(randn(toks, K, seed=2), t_block=x_block)
    out = randn(N, K, seed=3).float()
    before, address = out.clone(), out.data_ptr()
    assert kernels.wgrad(dy_t, x_t, out) is out and out.data_ptr() == address
    (call,) = recorder.calls
    assert_grouped(call.a, N, padded)
    assert call.compiled_dims == "mn", "the number of tokens is free"
    product = dy_t.dequantize().double() @ x_t.dequantize().double().t()
    if x_block == (1, 128):
        assert_grouped(call.b, K, padded)
        assert call.out is out and call.c is out and call.recipe == (1, 1, 128)
        assert torch.equal(out, (before.double() + product).float())
    else:
        assert_blocked(call.b, K, padded)
        assert (call.out.dtype, call.c, call.recipe) == (torch.bfloat16, None, None)
        assert torch.equal(out, before + product.bfloat16().float())
    alone = kernels.wgrad(dy_t, x_t)
    assert alone.dtype is torch.float32
    assert torch.equal(alone, product.float() if x_block == (1, 128) else product.bfloat16().float())


def test_without_tokens_it_is_never_called(recorder):
    kernels = DeepGemmKernels()
    w, w_t = kernels.quantize_weight(randn(N, K))
    x, x_t = kernels.quantize_dual(randn(0, K))
    dy, dy_t = kernels.quantize_dual(randn(0, N))
    blocked = kernels.quantize_dual(randn(0, K), t_block=(128, 128))[1]
    for y, width in ((kernels.fprop(x, w), N), (kernels.dgrad(dy, w_t), K)):
        assert (y.shape, y.dtype) == ((0, width), torch.bfloat16)
    for operand in (x_t, blocked):
        out = randn(N, K, seed=3).float()
        before = out.clone()
        assert kernels.wgrad(dy_t, operand, out) is out and torch.equal(out, before)
        assert torch.equal(kernels.wgrad(dy_t, operand), torch.zeros(N, K, device=DEVICE))
    assert recorder.calls == []


def test_what_the_kernel_would_misread_is_refused_before_the_call(recorder):
    kernels = DeepGemmKernels()
    w, _ = kernels.quantize_weight(randn(N, K))
    x, _ = kernels.quantize_dual(randn(4, K))
    wrong = [
        (kernels.fprop, (kernels.quantize(randn(4, K), (1, 128), dtype=torch.float8_e5m2), w), "reads float8_e4m3fn only"),
        (kernels.fprop, (w, w), r"in blocks \(128, 128\) and \(128, 128\)"),
        (kernels.fprop, (x, x), r"in blocks \(1, 128\) and \(1, 128\)"),
        (kernels.fprop, (kernels.quantize(randn(4, K + 128), (1, 128)), w), "lengths are 256 and 128"),
        (kernels.wgrad, (kernels.quantize(randn(4, 200), (1, 128)), kernels.quantize(randn(4, 200), (1, 128))), "multiples of 128"),
    ]
    for gemm, operands, words in wrong:
        with pytest.raises(ValueError, match=words):
            gemm(*operands)
    assert recorder.calls == []


def test_the_stand_in_agrees_with_the_reference(recorder):
    """Float64 sums within a block, then over blocks: one BF16 rounding may differ where the two sums straddle it."""
    kernels = DeepGemmKernels()
    w, _ = kernels.quantize_weight(randn(N, K))
    x, _ = kernels.quantize_dual(randn(5, K))
    assert calc_error(kernels.fprop(x, w), gemm_reference.fprop(x, w)) < 2**-8
