"""The autograd linears: every arm's forward and gradients against float64 on the operands that arm really has."""

import itertools
import math

import pytest
import torch

from jetrl_megatron.config import Backend, GradFormat, LinearPrecision, SavedActivation, WgradGranularity
from jetrl_megatron.fp8 import GemmPrecision, WeightCache, bf16_linear, deliver_weight_gradient, fp8_linear
from jetrl_megatron.fp8.quantize import quantize, quantize_dual

FP8, BF16 = LinearPrecision.fp8, LinearPrecision.bf16
REFERENCE = Backend.reference
T, N, K = 200, 384, 256


def layer(order: bool = False, t: int = T):
    g = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(N, K, generator=g).bfloat16())
    x = torch.randn(t, K, generator=g).bfloat16().requires_grad_()
    dy = torch.randn(t, N, generator=g).bfloat16()
    row_order = torch.randperm(N, generator=g) if order else None
    cache = WeightCache()
    cache.register("w", weight, row_order)
    cache.refresh()
    return x, weight, dy, cache.get("w"), row_order


def calc_diff(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return 1 - float(2 * (a * b).sum() / (a * a + b * b).sum())


def dequantized_weight(cached, row_order):
    w = cached.w.dequantize().double()
    return w if row_order is None else torch.empty_like(w).index_copy_(0, row_order, w)


@pytest.mark.parametrize("granularity", WgradGranularity)
@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(
    ("saved", "dgrad", "wgrad", "grad_format"),
    [
        *itertools.product(SavedActivation, [FP8, BF16], [FP8, BF16], [GradFormat.e4m3]),
        (SavedActivation.fp8_dual, FP8, FP8, GradFormat.e5m2),
    ],
)
def test_every_arm_matches_float64_on_its_own_operands(granularity, order, saved, dgrad, wgrad, grad_format):
    x, weight, dy, cached, row_order = layer(order)
    precision = GemmPrecision(saved_activation=saved, dgrad=dgrad, wgrad=wgrad, grad_format=grad_format, wgrad_granularity=granularity)
    y = fp8_linear(x, weight, cached, precision, REFERENCE, row_order)
    y.backward(dy)
    w64 = dequantized_weight(cached, row_order)
    x_row, x_t = quantize_dual(x, t_block=precision.x_t_block)
    assert calc_diff(y, x_row.dequantize().double() @ w64.t()) < 3e-6

    order_ = torch.arange(N) if row_order is None else row_order
    dy_n = quantize(dy[:, order_], (1, 128), dtype=precision.grad_dtype).dequantize().double()
    dx64 = dy_n @ cached.w.dequantize().double() if dgrad is FP8 else dy.double() @ weight.detach().double()
    assert calc_diff(x.grad, dx64) < 3e-6

    kept = {
        SavedActivation.fp8_dual: x_t.dequantize()[:, :T].t(),
        SavedActivation.fp8_requant: x_row.dequantize(),
        SavedActivation.bf16: x.detach(),
    }[saved]
    if wgrad is FP8:
        x64 = kept if saved is SavedActivation.fp8_dual else quantize_dual(kept, t_block=precision.x_t_block)[1].dequantize()[:, :T].t()
        dy64 = quantize(dy, (128, 1), dtype=precision.grad_dtype).dequantize()
    else:
        x64, dy64 = kept.bfloat16(), dy
    assert calc_diff(weight.grad, dy64.double().t() @ x64.double()) < 3e-6


@pytest.mark.parametrize("saved", SavedActivation)
def test_wgrad_in_blocks_reads_x_in_128x128_blocks_and_changes_nothing_else(saved):
    found = {}
    for granularity in WgradGranularity:
        x, weight, dy, cached, _ = layer()
        y = fp8_linear(x, weight, cached, GemmPrecision(saved_activation=saved, wgrad_granularity=granularity), REFERENCE)
        y.backward(dy)
        found[granularity] = (y.detach(), x.grad, weight.grad)
    (y, dx, dw), (y_blocks, dx_blocks, dw_blocks) = found[WgradGranularity.groups], found[WgradGranularity.blocks]
    assert torch.equal(y, y_blocks) and torch.equal(dx, dx_blocks)
    assert not torch.equal(dw, dw_blocks)
    source = quantize(x, (1, 128)).dequantize() if saved is SavedActivation.fp8_requant else x
    x64 = quantize_dual(source, t_block=(128, 128))[1].dequantize()[:, :T].t().double()
    assert calc_diff(dw_blocks, quantize(dy, (128, 1)).dequantize().double().t() @ x64) < 3e-6


def test_saved_tensors_are_what_the_switch_says():
    sizes = {}
    for saved in SavedActivation:
        x, weight, _, cached, _ = layer(t=256)
        y = fp8_linear(x, weight, cached, GemmPrecision(saved_activation=saved), REFERENCE)
        kept = [t for t in y.grad_fn.saved_tensors if t.data_ptr() not in (cached.w_t.data.data_ptr(), cached.w_t.scale.data_ptr())]
        sizes[saved] = sum(t.numel() * t.element_size() for t in kept)
    assert sizes == {
        SavedActivation.fp8_dual: 256 * K + 4 * (K // 128) * 2,
        SavedActivation.fp8_requant: 256 * K + 4 * 256 * (K // 128),
        SavedActivation.bf16: 2 * 256 * K,
    }


def test_nothing_is_saved_without_grad_and_the_forward_is_the_same():
    x, weight, _, cached, _ = layer()
    with torch.no_grad():
        y = fp8_linear(x, weight, cached, GemmPrecision(), REFERENCE)
    assert y.grad_fn is None and torch.equal(y, fp8_linear(x, weight, cached, GemmPrecision(), REFERENCE))


def test_main_grad_accumulates_in_fp32_over_micro_batches():
    x, weight, dy, cached, _ = layer()
    fp8_linear(x, weight, cached, GemmPrecision(), REFERENCE).backward(dy)
    single = weight.grad
    weight.grad = None
    weight.main_grad = torch.zeros(N, K)
    for _ in range(2):
        fp8_linear(x, weight, cached, GemmPrecision(), REFERENCE).backward(dy)
    assert weight.grad_added_to_main_grad is True
    assert torch.equal((weight.main_grad / 2).bfloat16(), single)
    assert weight.grad.shape == weight.shape and weight.grad.dtype is weight.dtype
    weight.grad, weight.zero_out_wgrad = None, True
    bf16_linear(x, weight).backward(dy)
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    bf16_grad = dy.double().t() @ x.detach().double()
    assert calc_diff(weight.main_grad - 2 * single.float(), bf16_grad) < 1e-4
    weight.main_grad = weight.main_grad.bfloat16()
    with pytest.raises(ValueError, match="float32"):
        bf16_linear(x, weight).backward(dy)


def test_a_gradient_is_added_once_and_the_stand_in_is_zeros_where_the_weight_has_another_one():
    """`zero_out_wgrad`: Megatron's mark of a weight that gets another gradient through autograd."""
    weight, gradient = torch.nn.Parameter(torch.ones(2, 3).bfloat16()), torch.full((2, 3), 0.1)

    def compute(out):
        return gradient if out is None else out.add_(gradient)

    weight.zero_out_wgrad = True
    returned = deliver_weight_gradient(weight, compute)
    assert torch.equal(returned, gradient.bfloat16()) and not hasattr(weight, "grad_added_to_main_grad")
    weight.main_grad = torch.ones(2, 3)
    stand_in = deliver_weight_gradient(weight, compute)
    assert torch.equal(weight.main_grad, torch.ones(2, 3) + gradient) and weight.grad_added_to_main_grad is True
    assert torch.equal(stand_in, torch.zeros(2, 3).bfloat16())


def test_anomaly_mode_finds_no_nan_in_the_stand_in(monkeypatch):
    x, weight, dy, cached, _ = layer()
    weight.main_grad = torch.zeros(N, K)
    unwritten = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda t, **options: unwritten(t, **options).fill_(math.nan))
    with torch.autograd.detect_anomaly(check_nan=True):
        fp8_linear(x, weight, cached, GemmPrecision(), REFERENCE).backward(dy)
    assert weight.main_grad.abs().max() > 0 and not weight.main_grad.isnan().any()


def test_bf16_linear_matches_float64_and_gives_fp32_logits():
    x, weight, dy, _, _ = layer()
    y = bf16_linear(x, weight, torch.float32)
    assert y.dtype is torch.float32 and calc_diff(y, x.detach().double() @ weight.detach().double().t()) < 1e-13
    y.backward(dy.float())
    assert calc_diff(x.grad, dy.double() @ weight.detach().double()) < 3e-6
    assert calc_diff(weight.grad, dy.double().t() @ x.detach().double()) < 3e-6


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("saved", list(SavedActivation))
def test_zero_tokens_give_empty_output_and_zero_gradient(saved, main_grad):
    x, weight, dy, cached, _ = layer(t=0)
    if main_grad:
        weight.main_grad = torch.ones(N, K)
    y = fp8_linear(x, weight, cached, GemmPrecision(saved_activation=saved), REFERENCE)
    y.backward(dy)
    assert y.shape == (0, N) and x.grad.shape == (0, K)
    assert torch.equal(weight.main_grad, torch.ones(N, K)) if main_grad else torch.equal(weight.grad, torch.zeros_like(weight))


def test_zero_input_gives_zero_output_and_zero_weight_gradient():
    x, weight, dy, cached, _ = layer()
    zero = torch.zeros_like(x).requires_grad_()
    y = fp8_linear(zero, weight, cached, GemmPrecision(), REFERENCE)
    y.backward(dy)
    assert torch.equal(y, torch.zeros_like(y)) and torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.isfinite(zero.grad).all() and zero.grad.abs().max() > 0


def test_zero_token_padding_changes_no_bit_of_the_weight_gradient():
    x, weight, dy, cached, _ = layer(t=256)
    weight.main_grad = torch.zeros(N, K)
    fp8_linear(x[:T], weight, cached, GemmPrecision(), REFERENCE).backward(dy[:T])
    short = weight.main_grad.clone()
    weight.main_grad.zero_()
    x2, dy2 = x.detach().clone(), dy.clone()
    x2[T:] = 0
    dy2[T:] = 0
    fp8_linear(x2.requires_grad_(), weight, cached, GemmPrecision(), REFERENCE).backward(dy2)
    assert torch.equal(weight.main_grad, short)


def test_frozen_weight_and_frozen_input():
    x, weight, dy, cached, _ = layer()
    weight.requires_grad_(False)
    fp8_linear(x, weight, cached, GemmPrecision(), REFERENCE).backward(dy)
    assert weight.grad is None and x.grad is not None
    frozen = x.detach()
    weight.requires_grad_(True)
    fp8_linear(frozen, weight, cached, GemmPrecision(), REFERENCE).backward(dy)
    assert weight.grad is not None and frozen.grad is None


def test_what_does_not_fit_is_refused():
    x, weight, _, cached, _ = layer()
    with pytest.raises(ValueError, match="must be \\[T, K\\]"):
        fp8_linear(x[:, :128], weight, cached, GemmPrecision(), REFERENCE)
    with pytest.raises(ValueError, match="bfloat16"):
        bf16_linear(x.float(), weight)
    bf16 = GemmPrecision(linear=BF16, saved_activation=SavedActivation.bf16, dgrad=BF16, wgrad=BF16)
    with pytest.raises(ValueError, match="bf16_linear"):
        fp8_linear(x, weight, cached, bf16, REFERENCE)
    cache = WeightCache(keep_transposed=False)
    cache.register("w", weight)
    cache.refresh()
    with pytest.raises(ValueError, match="keep_transposed"):
        fp8_linear(x, weight, cache.get("w"), GemmPrecision(), REFERENCE)
