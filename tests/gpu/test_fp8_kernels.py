"""FP8 kernels on a Hopper GPU: bytes against the reference, GEMMs against float64, rows at any M, zero blocks, empty M, large offsets."""

import pytest
import torch

from tests.gpu.hopper import E4M3, NEEDS_HOPPER, calc_diff, randn

pytestmark = NEEDS_HOPPER

import jetrl_megatron.fp8.quantize as reference  # noqa: E402
from jetrl_megatron.config import Backend, LinearPrecision, SavedActivation, ScaleFormat, WgradGranularity  # noqa: E402
from jetrl_megatron.fp8 import BlockScaled, GemmPrecision, WeightCache, bf16_linear, fp8_linear, gemm_reference  # noqa: E402

LIMIT = 1e-5


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 0.0])
@pytest.mark.parametrize("shape", [(1000, 1408), (1, 1024), (5, 200), (256, 512)])
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_bytes_equal_the_reference_on_a_cpu(kernels, shape, scale, scale_format):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale).bfloat16()
    x[0, 0], x[-1, -1] = float("nan"), -0.0
    f = {"dtype": torch.float8_e4m3fn, "scale_format": scale_format}
    row_wise, transposed = kernels.quantize_dual(x.cuda(), **f)
    expected = reference.quantize_dual(x, **f)
    weight, weight_t = kernels.quantize_weight(x.cuda(), scale_format=scale_format, with_transpose=True)
    expected_weight = reference.quantize_weight(x, scale_format=scale_format)
    for got, want in zip((row_wise, transposed, weight, weight_t), (*expected, *expected_weight), strict=True):
        assert BlockScaled(got.data.cpu(), got.scale.cpu(), got.block).same_bytes(want)
    assert kernels.quantize(x.cuda(), (1, 128), **f).same_bytes(row_wise)


def test_bytes_equal_the_reference_on_the_gpu_at_size(kernels):
    x = randn(8192, 4096)
    for got, want in zip(kernels.quantize_dual(x, **E4M3), reference.quantize_dual(x), strict=True):
        assert got.same_bytes(want)


def test_every_bf16_value_against_many_amaxes(kernels):
    """All 65,536 BF16 patterns as x, each in groups of 4 amaxes of other magnitudes."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    finite = torch.where(torch.isfinite(patterns), patterns, torch.zeros_like(patterns))
    x = finite.reshape(512, 128).repeat(4, 1)
    for i, amax in enumerate((0.0, 3.0, 1e-3, 1e20)):
        x[512 * i : 512 * (i + 1), 0] = amax
    got = kernels.quantize(x, (1, 128), **E4M3)
    assert BlockScaled(got.data.cpu(), got.scale.cpu(), got.block).same_bytes(reference.quantize(x.cpu(), (1, 128)))


@pytest.mark.parametrize("nk", [(4096, 4096), (1024, 512)])
def test_gemms_equal_float64_on_dequantised_operands(kernels, nk):
    n, k = nk
    x, w, dy = randn(1024, k), randn(n, k, seed=1), randn(1024, n, seed=2)
    (qx, qx_t), (qdy, qdy_t) = kernels.quantize_dual(x, **E4M3), kernels.quantize_dual(dy, **E4M3)
    qw, qw_t = kernels.quantize_weight(w, scale_format=ScaleFormat.fp32, with_transpose=True)
    blocks = kernels.quantize_dual(x, t_block=(128, 128), **E4M3)[1]
    f64 = lambda a, b: a.dequantize().double() @ b.dequantize().double().t()  # noqa: E731
    assert calc_diff(kernels.fprop(qx, qw), f64(qx, qw)) < LIMIT
    assert calc_diff(kernels.dgrad(qdy, qw_t), f64(qdy, qw_t)) < LIMIT
    base = torch.randn(n, k, device="cuda")
    for x_t in (qx_t, blocks):
        out = base.clone()
        assert kernels.wgrad(qdy_t, x_t, out) is out
        assert calc_diff(out - base, f64(qdy_t, x_t)) < LIMIT
        assert calc_diff(kernels.wgrad(qdy_t, x_t), f64(qdy_t, x_t)) < LIMIT


@pytest.mark.parametrize("nk", [(4096, 4096), (6144, 4096)])
def test_rows_are_bit_equal_at_any_m(kernels, nk):
    x, w = randn(8192, nk[1]), randn(*nk, seed=1)
    qw, _ = kernels.quantize_weight(w, scale_format=ScaleFormat.fp32, with_transpose=False)
    whole = kernels.fprop(kernels.quantize(x, (1, 128), **E4M3), qw)
    for m in (1, 2, 3, 5, 16, 17, 33, 64, 65, 127, 129, 257, 512, 1000, 2048, 4096, 6000, 8191):
        assert torch.equal(kernels.fprop(kernels.quantize(x[:m], (1, 128), **E4M3), qw), whole[:m]), m
    for start, stop in ((0, 1024), (1024, nk[0])):
        assert torch.equal(kernels.fprop(kernels.quantize(x, (1, 128), **E4M3), qw.rows(start, stop)), whole[:, start:stop])


@pytest.mark.parametrize("m", [1, 3, 5, 65, 129])
def test_odd_m_and_poisoned_pad_rows(kernels, m):
    x, w = randn(m, 256), randn(256, 256, seed=1)
    qw, _ = kernels.quantize_weight(w, scale_format=ScaleFormat.fp32, with_transpose=False)
    qx = kernels.quantize(x, (1, 128), **E4M3)
    clean = kernels.fprop(qx, qw)
    assert clean.shape == (m, 256)
    leading = qx.scale.stride(1)
    torch.as_strided(qx.scale, (leading, 2), (1, leading))[m:] = float("nan")
    assert torch.equal(kernels.fprop(qx, qw), clean)
    assert calc_diff(clean, qx.dequantize().double() @ qw.dequantize().double().t()) < LIMIT


def test_empty_batch_and_zero_input(kernels):
    weight = torch.nn.Parameter(randn(512, 256))
    weight.main_grad = torch.ones(512, 256, device="cuda")
    cache = WeightCache(backend=Backend.deepgemm)
    cache.register("w", weight)
    cache.refresh()
    for granularity in WgradGranularity:
        precision = GemmPrecision(wgrad_granularity=granularity)
        for x in (torch.empty(0, 256, device="cuda").bfloat16(), torch.zeros(64, 256, device="cuda").bfloat16()):
            x.requires_grad_()
            y = fp8_linear(x, weight, cache.get("w"), precision, Backend.deepgemm)
            y.backward(torch.ones_like(y))
            assert torch.equal(y, torch.zeros_like(y)) and torch.equal(weight.main_grad, torch.ones_like(weight.main_grad))
            assert torch.isfinite(x.grad).all()


def test_dgrad_follows_the_optimizer_step(kernels):
    weight = torch.nn.Parameter(torch.cat([randn(128, 256), 9 * randn(128, 256, seed=1)]))
    cache = WeightCache(backend=Backend.deepgemm)
    cache.register("w", weight)
    for _ in range(2):
        cache.refresh()
        x = randn(128, 256, seed=2).requires_grad_()
        dy = randn(128, 256, seed=3)
        fp8_linear(x, weight, cache.get("w"), GemmPrecision(), Backend.deepgemm).backward(dy)
        assert (
            calc_diff(x.grad, kernels.quantize(dy, (1, 128), **E4M3).dequantize().double() @ cache.get("w").w.dequantize().double()) < LIMIT
        )
        with torch.no_grad():
            weight.mul_(-0.5)


def test_offsets_above_31_bits(kernels):
    rows, cols = 74_900, 28_672
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    row_wise, transposed = kernels.quantize_dual(x, **E4M3)
    assert kernels.quantize(x, (1, 128), **E4M3).same_bytes(row_wise)
    for start in (0, 37_376, 74_880):
        part = x[start : start + 128]
        expected = reference.quantize_dual(part)
        assert row_wise.rows(start, min(rows, start + 128)).same_bytes(expected[0])
        if start % 128 == 0:
            cut = BlockScaled(transposed.data[:, start : start + 128], transposed.scale[:, start // 128 : start // 128 + 1], (1, 128))
            assert cut.same_bytes(expected[1])
    last = reference.quantize(x[74_880:].t(), (1, 128))
    assert torch.equal(transposed.data[:, 74_880:74_900].view(torch.uint8), last.data.view(torch.uint8))
    assert (transposed.data[:, 74_900:].view(torch.uint8) == 0).all()


@pytest.mark.parametrize("saved", list(SavedActivation))
@pytest.mark.parametrize("granularity", list(WgradGranularity))
def test_linear_matches_the_reference_backend(saved, granularity):
    grads = {}
    order = torch.randperm(384, generator=torch.Generator().manual_seed(0)).cuda()
    for backend in (Backend.reference, Backend.deepgemm):
        x, weight, dy = randn(200, 256).requires_grad_(), torch.nn.Parameter(randn(384, 256, seed=1)), randn(200, 384, seed=2)
        weight.main_grad = torch.zeros(384, 256, device="cuda")
        cache = WeightCache(backend=backend)
        cache.register("w", weight, order)
        cache.refresh()
        precision = GemmPrecision(saved_activation=saved, wgrad_granularity=granularity)
        y = fp8_linear(x, weight, cache.get("w"), precision, backend, order)
        y.backward(dy)
        grads[backend] = (y, x.grad, weight.main_grad, cache.digest())
    for got, want in zip(grads[Backend.deepgemm][:3], grads[Backend.reference][:3], strict=True):
        assert calc_diff(got, want) < LIMIT
    assert grads[Backend.deepgemm][3] == grads[Backend.reference][3]


def test_bf16_linear_accumulates_into_main_grad():
    x, weight, dy = randn(256, 512).requires_grad_(), torch.nn.Parameter(randn(384, 512, seed=1)), randn(256, 384, seed=2)
    exact = dy.double().t() @ x.detach().double()
    weight.main_grad = torch.ones(384, 512, device="cuda")
    bf16_linear(x, weight).backward(dy)
    assert calc_diff(weight.main_grad - 1, exact) < 1e-9
    y = bf16_linear(x, weight, torch.float32)
    assert y.dtype is torch.float32 and calc_diff(y, x.detach().double() @ weight.detach().double().t()) < 1e-10


def test_mixed_arm_runs_its_bf16_gemms(kernels):
    x, weight, dy = randn(128, 256).requires_grad_(), torch.nn.Parameter(randn(384, 256, seed=1)), randn(128, 384, seed=2)
    cache = WeightCache(backend=Backend.deepgemm, keep_transposed=False)
    cache.register("w", weight)
    cache.refresh()
    bf16 = LinearPrecision.bf16
    fp8_linear(x, weight, cache.get("w"), GemmPrecision(dgrad=bf16, wgrad=bf16), Backend.deepgemm).backward(dy)
    assert calc_diff(x.grad, dy.double() @ weight.detach().double()) < LIMIT
    saved = kernels.quantize_dual(x, t_block=(128, 128), **E4M3)[1].dequantize(torch.bfloat16)
    assert calc_diff(weight.grad, dy.double().t() @ saved.double().t()) < LIMIT


def test_reference_backend_on_cuda_gives_the_cpu_bytes():
    x, w = randn(64, 256), randn(128, 256, seed=1)
    on_gpu = gemm_reference.fprop(reference.quantize(x, (1, 128)), reference.quantize(w, (128, 128)))
    on_cpu = gemm_reference.fprop(reference.quantize(x.cpu(), (1, 128)), reference.quantize(w.cpu(), (128, 128)))
    assert torch.equal(on_gpu.cpu(), on_cpu)
