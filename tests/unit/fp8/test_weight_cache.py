"""The weight cache: quantised once a step, never stale, addresses stable."""

import hashlib

import pytest
import torch

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8 import WeightCache
from jetrl_megatron.fp8.quantize import quantize


def make(scale_format=ScaleFormat.fp32, row_order=None):
    g = torch.Generator().manual_seed(5)
    weight = torch.nn.Parameter(torch.randn(250, 256, generator=g).bfloat16())
    cache = WeightCache(scale_format)
    cache.register("layer.weight", weight, row_order)
    return cache, weight


@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_bytes_are_the_quantised_parameter_and_its_byte_transpose(scale_format):
    cache, weight = make(scale_format)
    assert cache.refresh() == 1
    cached = cache.get("layer.weight")
    assert cached.w.same_bytes(quantize(weight, (128, 128), scale_format=scale_format))
    assert cached.w_t.same_bytes(cached.w.transpose())


def test_both_copies_follow_an_update_at_the_same_address():
    cache, weight = make()
    cache.refresh()
    cached = cache.get("layer.weight")
    places = [t.data_ptr() for b in (cached.w, cached.w_t) for t in (b.data, b.scale)]
    before, digest = cached.w_t.dequantize(), cache.digest()
    with torch.no_grad():
        weight.mul_(2.0)
    cache.refresh()
    again = cache.get("layer.weight")
    assert [t.data_ptr() for b in (again.w, again.w_t) for t in (b.data, b.scale)] == places
    assert torch.equal(again.w_t.dequantize(), 2 * before)
    assert cache.version == 2 and cache.digest() != digest


def test_stale_bytes_are_never_served():
    cache, weight = make()
    with pytest.raises(RuntimeError, match=r"'layer.weight' was never quantised"):
        cache.get("layer.weight")
    cache.refresh()
    with torch.no_grad():
        weight.add_(0.0)
    for read in (lambda: cache.get("layer.weight"), cache.digest):
        with pytest.raises(RuntimeError, match=r"'layer.weight' was modified"):
            read()
    cache.refresh()
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match="modified"):
        cache.get("layer.weight")
    cache.refresh()
    cache.invalidate()
    with pytest.raises(RuntimeError, match="modified"):
        cache.get("layer.weight")


def test_backward_after_a_refresh_is_refused():
    from jetrl_megatron.config import Backend
    from jetrl_megatron.fp8 import GemmPrecision, fp8_linear

    cache, weight = make()
    cache.refresh()
    x = torch.randn(4, 256).bfloat16().requires_grad_()
    y = fp8_linear(x, weight, cache.get("layer.weight"), GemmPrecision(), Backend.reference)
    cache.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_row_order_permutes_before_quantising():
    order = torch.randperm(250)
    cache, weight = make(row_order=order)
    cache.refresh()
    assert cache.get("layer.weight").w.same_bytes(quantize(weight[order], (128, 128)))
    assert torch.equal(cache.row_order("layer.weight"), order)


def test_digest_is_sha256_of_codes_and_scales_in_name_order():
    cache, weight = make()
    other = torch.nn.Parameter(torch.ones(128, 128).bfloat16())
    cache.register("a", other)
    cache.refresh()
    sha = hashlib.sha256()
    for w in (other, weight):
        q = quantize(w, (128, 128))
        sha.update(q.data.view(torch.uint8).numpy().tobytes())
        sha.update(q.scale.numpy().tobytes())
    assert cache.names == ("a", "layer.weight") and cache.digest() == sha.hexdigest()


def test_what_cannot_be_registered_is_refused():
    cache, weight = make()
    with pytest.raises(ValueError, match="twice"):
        cache.register("layer.weight", weight)
    with pytest.raises(ValueError, match="not FP32 masters"):
        cache.register("master", weight.float())
    with pytest.raises(ValueError, match="not a permutation"):
        cache.register("b", weight, torch.zeros(250, dtype=torch.int64))
