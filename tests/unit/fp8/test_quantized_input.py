"""An input that is there in FP8 alone: the bytes, gradients and refusals of a linear that quantises it itself."""

import pytest
import torch

from jetrl_megatron.config import Backend, LinearPrecision, SavedActivation, WgradGranularity
from jetrl_megatron.fp8 import (
    GemmPrecision,
    QuantizedInput,
    WeightCache,
    bf16_linear,
    fp8_linear,
    fp8_linear_swiglu,
    input_format,
)
from jetrl_megatron.fp8.quantize import quantize, quantize_dual
from jetrl_megatron.fp8.quantized_input import stand_in

BF16 = LinearPrecision.bf16
REFERENCE = Backend.reference
T, K, N = 200, 256, 384


def layer(toks: int = T, seed: int = 3):
    g = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(N, K, generator=g).bfloat16() / 8)
    x = torch.randn(toks, K, generator=g).bfloat16().requires_grad_()
    dy = torch.randn(toks, N, generator=g).bfloat16()
    cache = WeightCache(GemmPrecision().scale_format)
    cache.register("w", weight)
    cache.refresh()
    return x, weight, dy, cache.get("w")


SAVED_IN_FP8 = [
    GemmPrecision(),
    GemmPrecision(wgrad_granularity=WgradGranularity.groups),
    GemmPrecision(saved_activation=SavedActivation.fp8_requant),
    GemmPrecision(dgrad=BF16),
    GemmPrecision(wgrad=BF16),
]


@pytest.mark.parametrize("precision", SAVED_IN_FP8)
@pytest.mark.parametrize("toks", [0, 1, T])
def test_a_linear_has_the_bits_and_gradients_of_quantising_by_itself(precision, toks):
    x, weight, dy, cached = layer(toks)
    found = []
    for ahead in (False, True):
        x.grad = weight.grad = None
        entered = QuantizedInput.of(x, input_format(precision, REFERENCE, for_wgrad=True)) if ahead else x
        y = fp8_linear(entered, weight, cached, precision, REFERENCE)
        y.backward(dy)
        found.append([y, x.grad, weight.grad])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert toks == 0 or all(t.abs().max() > 0 for t in found[0])
    with torch.no_grad():
        rows_alone = QuantizedInput.of(x, input_format(precision, REFERENCE, for_wgrad=False))
        assert rows_alone.operands[1] is None
        assert torch.equal(fp8_linear(rows_alone, weight, cached, precision, REFERENCE), found[0][0])


@pytest.mark.parametrize("precision", SAVED_IN_FP8)
def test_swiglu_gives_the_operands_of_quantising_its_product(precision):
    x, weight, dh, cached = layer()
    form = input_format(precision, REFERENCE, for_wgrad=True)
    h = fp8_linear_swiglu(x, weight, cached, precision, REFERENCE)
    h.backward(dh[:, : N // 2])
    want = x.grad, weight.grad
    x.grad = weight.grad = None
    quantised = fp8_linear_swiglu(x, weight, cached, precision, REFERENCE, h_format=form)
    rows, columns = quantised.operands
    assert rows.same_bytes(quantize(h, (1, 128))) and quantised.graph_TK.shape == h.shape
    if form.t_block is None:
        assert columns is None
    else:
        assert columns.same_bytes(quantize_dual(h, t_block=form.t_block)[1])
    quantised.graph_TK.backward(dh[:, : N // 2])
    assert torch.equal(x.grad, want[0]) and torch.equal(weight.grad, want[1])


def test_what_is_kept_for_the_backward_is_what_the_linear_alone_keeps():
    x, weight, _, cached = layer(256)
    quantised = QuantizedInput.of(x, input_format(GemmPrecision(), REFERENCE, for_wgrad=True))
    kept = fp8_linear(quantised, weight, cached, GemmPrecision(), REFERENCE).grad_fn.saved_tensors
    alone = fp8_linear(x, weight, cached, GemmPrecision(), REFERENCE).grad_fn.saved_tensors
    assert [(t.shape, t.dtype) for t in kept] == [(t.shape, t.dtype) for t in alone]
    assert kept[0].data_ptr() == quantised.operands[1].data.data_ptr()


def test_a_stand_in_is_nan_in_one_element_and_no_relative_of_another():
    a, b = (stand_in((300, 128), torch.device("cpu")) for _ in range(2))
    assert a.isnan().all() and a.untyped_storage().nbytes() == 2 and not a._is_view()
    x = torch.ones(300, 128, dtype=torch.bfloat16, requires_grad=True)
    graph = QuantizedInput.of(x, input_format(GemmPrecision(), REFERENCE, for_wgrad=True)).graph_TK
    assert graph.requires_grad and not b.requires_grad


def test_a_linear_that_wants_bf16_has_no_format_and_refuses_what_comes_quantised():
    for precision in (
        GemmPrecision(saved_activation=SavedActivation.bf16),
        GemmPrecision(linear=BF16, saved_activation=SavedActivation.bf16, dgrad=BF16, wgrad=BF16),
    ):
        assert input_format(precision, REFERENCE, for_wgrad=True) is None
    x, weight, _, cached = layer()
    quantised = QuantizedInput.of(x, input_format(GemmPrecision(), REFERENCE, for_wgrad=True))
    with pytest.raises(ValueError, match="its `input_format` is None"):
        fp8_linear(quantised, weight, cached, GemmPrecision(saved_activation=SavedActivation.bf16), REFERENCE)
    with pytest.raises(ValueError, match=r"blocks \(128, 128\), and wgrad of this linear reads \(1, 128\)"):
        fp8_linear(quantised, weight, cached, GemmPrecision(wgrad_granularity=WgradGranularity.groups), REFERENCE)
    rows_alone = QuantizedInput.of(x, input_format(GemmPrecision(), REFERENCE, for_wgrad=False))
    with pytest.raises(ValueError, match="blocks None"):
        fp8_linear(rows_alone, weight, cached, GemmPrecision(), REFERENCE)
    assert torch.isnan(bf16_linear(quantised.graph_TK, weight)).all(), "whoever takes the stand-in for values sees NaN"
