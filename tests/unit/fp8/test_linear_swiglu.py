"""A linear with SwiGLU in one autograd function: every arm gives the bits of the linear, SwiGLU and SwiGLU's gradient one by one."""

import itertools
import weakref
from dataclasses import replace

import pytest
import torch

from jetrl_megatron.config import Backend, GradFormat, LinearPrecision, SavedActivation, ScaleFormat, WgradGranularity
from jetrl_megatron.fp8 import GemmPrecision, WeightCache, bf16_linear, bf16_linear_swiglu, fp8_linear, fp8_linear_swiglu, linear_bf16
from jetrl_megatron.fp8.backend import ReferenceKernels
from jetrl_megatron.fp8.exchange import InputExchange
from jetrl_megatron.fp8.swiglu import swiglu, swiglu_backward

FP8, BF16 = LinearPrecision.fp8, LinearPrecision.bf16
REFERENCE = Backend.reference
T, F, K = 200, 256, 128


def layer(order: bool = False, toks: int = T, features: int = F, scale_format: ScaleFormat = ScaleFormat.fp32):
    g = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(2 * features, K, generator=g).bfloat16() / 8)
    x = torch.randn(toks, K, generator=g).bfloat16().requires_grad_()
    dh = torch.randn(toks, features, generator=g).bfloat16()
    row_order = torch.randperm(2 * features, generator=g) if order else None
    cache = WeightCache(scale_format)
    cache.register("w", weight, row_order)
    cache.refresh()
    return x, weight, dh, cache.get("w"), row_order


def one_by_one(linear, x, weight, dh):
    """(h, dX, dW) of the separate steps."""
    gate_up = linear(x, weight)
    gate_up.backward(swiglu_backward(dh, gate_up))
    found = swiglu(gate_up), x.grad, weight.grad
    x.grad = weight.grad = None
    return found


@pytest.fixture
def calls(monkeypatch):
    """Names of the gradients of SwiGLU that were asked for."""
    seen: list[str] = []

    def counted(name, function):
        def count(*args, **kwargs):
            seen.append(name)
            return function(*args, **kwargs)

        return staticmethod(count)

    for name in ("swiglu_backward", "swiglu_backward_dual"):
        monkeypatch.setattr(ReferenceKernels, name, counted(name, getattr(ReferenceKernels, name)))
    return seen


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(
    ("saved", "dgrad", "wgrad", "grad_format"), list(itertools.product(SavedActivation, [FP8, BF16], [FP8, BF16], GradFormat))
)
def test_every_arm_has_the_bits_of_the_steps_one_by_one(calls, order, saved, dgrad, wgrad, grad_format):
    x, weight, dh, cached, row_order = layer(order)
    precision = GemmPrecision(saved_activation=saved, dgrad=dgrad, wgrad=wgrad, grad_format=grad_format)
    want = one_by_one(lambda x, w: fp8_linear(x, w, cached, precision, REFERENCE, row_order), x, weight, dh)
    assert calls == []
    h = fp8_linear_swiglu(x, weight, cached, precision, REFERENCE, row_order)
    h.backward(dh)
    assert all(torch.equal(*pair) for pair in zip((h, x.grad, weight.grad), want, strict=True))
    assert want[1].abs().max() > 0 and want[2].abs().max() > 0
    fused = (dgrad, wgrad) == (FP8, FP8) and not order
    assert calls == ["swiglu_backward_dual" if fused else "swiglu_backward"]


@pytest.mark.parametrize("granularity", list(WgradGranularity))
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_granularity_and_scale_format_go_through(calls, granularity, scale_format):
    x, weight, dh, cached, _ = layer(scale_format=scale_format)
    precision = GemmPrecision(wgrad_granularity=granularity, scale_format=scale_format)
    want = one_by_one(lambda x, w: fp8_linear(x, w, cached, precision, REFERENCE), x, weight, dh)
    h = fp8_linear_swiglu(x, weight, cached, precision, REFERENCE)
    h.backward(dh)
    assert all(torch.equal(*pair) for pair in zip((h, x.grad, weight.grad), want, strict=True))
    assert calls == ["swiglu_backward_dual"]


def test_features_that_are_no_multiple_of_128_are_quantised_from_bf16(calls):
    x, weight, dh, cached, _ = layer(features=192)
    want = one_by_one(lambda x, w: fp8_linear(x, w, cached, GemmPrecision(), REFERENCE), x, weight, dh)
    h = fp8_linear_swiglu(x, weight, cached, GemmPrecision(), REFERENCE)
    h.backward(dh)
    assert all(torch.equal(*pair) for pair in zip((h, x.grad, weight.grad), want, strict=True))
    assert calls == ["swiglu_backward"]


def test_frozen_weight_and_frozen_input(calls):
    x, weight, dh, cached, _ = layer()
    _, dx, dw = one_by_one(lambda x, w: fp8_linear(x, w, cached, GemmPrecision(), REFERENCE), x, weight, dh)
    fp8_linear_swiglu(x, weight.detach(), cached, GemmPrecision(), REFERENCE).backward(dh)
    assert torch.equal(x.grad, dx) and weight.grad is None
    fp8_linear_swiglu(x.detach(), weight, cached, GemmPrecision(), REFERENCE).backward(dh)
    assert torch.equal(weight.grad, dw)
    assert calls == ["swiglu_backward", "swiglu_backward_dual"]


def test_bf16_has_the_bits_of_the_steps_one_by_one(calls):
    x, weight, dh, _, _ = layer()
    want = one_by_one(bf16_linear, x, weight, dh)
    h = bf16_linear_swiglu(x, weight, REFERENCE)
    h.backward(dh)
    assert all(torch.equal(*pair) for pair in zip((h, x.grad, weight.grad), want, strict=True))
    assert calls == ["swiglu_backward"]


def test_gradients_add_up_in_main_grad():
    x, weight, dh, cached, _ = layer()
    weight.main_grad = torch.zeros(2 * F, K)
    fp8_linear_swiglu(x, weight, cached, GemmPrecision(), REFERENCE).backward(dh)
    once = weight.main_grad.clone()
    fp8_linear_swiglu(x, weight, cached, GemmPrecision(), REFERENCE).backward(dh)
    assert once.abs().max() > 0 and torch.equal(weight.main_grad, once + once)


def test_what_is_saved_is_x_and_gate_up_and_nothing_without_gradients():
    x, weight, _, cached, _ = layer(toks=256)
    plain = fp8_linear(x, weight, cached, GemmPrecision(), REFERENCE).grad_fn.saved_tensors
    h = fp8_linear_swiglu(x, weight, cached, GemmPrecision(), REFERENCE)
    *same, gate_up = h.grad_fn.saved_tensors
    assert [t.shape for t in same] == [t.shape for t in plain] and (gate_up.shape, gate_up.dtype) == ((256, 2 * F), torch.bfloat16)
    (_, _, kept) = bf16_linear_swiglu(x, weight, REFERENCE).grad_fn.saved_tensors
    assert kept.shape == (256, 2 * F)
    with torch.no_grad():
        for again, want in (
            (fp8_linear_swiglu(x, weight, cached, GemmPrecision(), REFERENCE), h),
            (bf16_linear_swiglu(x, weight, REFERENCE), swiglu(bf16_linear(x, weight))),
        ):
            assert again.grad_fn is None and torch.equal(again, want)


@pytest.mark.parametrize("saved", list(SavedActivation))
@pytest.mark.parametrize("frozen", ["", "weight", "x"])
def test_recompute_keeps_the_codes_of_x_in_place_of_gate_up_and_gives_the_same_bits(saved, frozen):
    x, weight, dh, cached, row_order = layer(order=True, toks=256)
    for name, tensor in (("weight", weight), ("x", x)):
        tensor.requires_grad_(name != frozen)
    precision, found, shapes = GemmPrecision(saved_activation=saved), [], []
    for recompute in (False, True):
        for run in (
            lambda again: fp8_linear_swiglu(x, weight, cached, precision, REFERENCE, row_order, recompute=again),
            lambda again: bf16_linear_swiglu(x, weight, REFERENCE, recompute=again),
        ):
            x.grad = weight.grad = None
            h = run(recompute)
            shapes.append([(t.dtype, tuple(t.shape)) for t in h.grad_fn.saved_tensors if t is not None])
            h.backward(dh[:1].expand(256, F))
            found.append([t for t in (h, x.grad, weight.grad) if t is not None])
    gate_up = (torch.bfloat16, (256, 2 * F))
    assert [gate_up in kept for kept in shapes] == [True, True, False, False]
    assert (torch.float8_e4m3fn, (256, K)) in shapes[2] and (torch.bfloat16, (256, K)) in shapes[3]
    for plain, again in (found[::2], found[1::2]):
        assert len(plain) == (2 if frozen else 3) and all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


@pytest.mark.parametrize("fp8", [True, False])
def test_gate_and_up_that_were_made_again_are_free_before_the_gemms_of_the_gradients(fp8, monkeypatch):
    """And the rows that they were made of, which are a gathered copy where X is cut."""
    x, weight, dh, cached, _ = layer(toks=256)
    alive, seen = [], []

    def noted(function):
        return staticmethod(lambda dy, gate_up, **kwargs: (alive.append(weakref.ref(gate_up)), function(dy, gate_up, **kwargs))[1])

    def looked(function):
        return lambda *args: (seen.extend(ref() is None for ref in alive), function(*args))[1]

    for name in ("swiglu_backward", "swiglu_backward_dual"):
        monkeypatch.setattr(ReferenceKernels, name, noted(getattr(ReferenceKernels, name)))
    for name in ("dgrad", "wgrad"):
        monkeypatch.setattr(ReferenceKernels, name, staticmethod(looked(getattr(ReferenceKernels, name))))
    for name in ("mm", "wgrad_bf16"):
        monkeypatch.setattr(linear_bf16, name, looked(getattr(linear_bf16, name)))

    class Gathered(InputExchange):
        def start_rows(self, x):
            rows = replace(x, data=x.data.clone())
            alive.append(weakref.ref(rows.data))
            return lambda: rows

    if fp8:
        exchange = Gathered(axis=None, group=None)
        h = fp8_linear_swiglu(x, weight, cached, GemmPrecision(), REFERENCE, exchange=exchange, recompute=True)
    else:
        h = bf16_linear_swiglu(x, weight, REFERENCE, recompute=True)
    h.backward(dh[:1].expand(256, F))
    assert len(alive) == (2 if fp8 else 1) and len(seen) >= 2 and all(seen)


def test_recompute_of_a_weight_that_was_quantised_anew_in_between_is_refused():
    x, weight, dh, cached, _ = layer()
    h = fp8_linear_swiglu(x, weight, cached, GemmPrecision(), REFERENCE, recompute=True)
    cached.w.data.view(torch.uint8).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.backward(dh)


@pytest.mark.parametrize("main_grad", [False, True])
def test_zero_tokens_give_empty_output_and_zero_gradient(main_grad):
    x, weight, dh, cached, _ = layer(toks=0)
    if main_grad:
        weight.main_grad = torch.ones(2 * F, K)
    for run in (
        lambda: fp8_linear_swiglu(x, weight, cached, GemmPrecision(), REFERENCE),
        lambda: bf16_linear_swiglu(x, weight, REFERENCE),
    ):
        x.grad = weight.grad = None
        h = run()
        h.backward(dh)
        assert h.shape == (0, F) and x.grad.shape == (0, K)
        assert torch.equal(weight.main_grad, torch.ones(2 * F, K)) if main_grad else torch.equal(weight.grad, torch.zeros_like(weight))


def test_what_does_not_fit_is_refused():
    x, weight, _, cached, _ = layer()
    with pytest.raises(ValueError, match="2F"):
        bf16_linear_swiglu(x, weight[:-1], REFERENCE)
    with pytest.raises(ValueError, match="must be \\[T, K\\]"):
        fp8_linear_swiglu(x[:, :64], weight, cached, GemmPrecision(), REFERENCE)
    with pytest.raises(ValueError, match="resolve_backend"):
        bf16_linear_swiglu(x, weight, Backend.auto)
