"""SwiGLU on a Hopper GPU: every gate against torch's silu, the gradient against float64, FP8 against BF16 byte for byte."""

import pytest
import torch

from tests.gpu.hopper import E4M3, NEEDS_HOPPER, calc_diff, randn

pytestmark = NEEDS_HOPPER

import jetrl_megatron.fp8.swiglu as reference  # noqa: E402
from jetrl_megatron.config import Backend, LinearPrecision, ScaleFormat  # noqa: E402
from jetrl_megatron.fp8 import (  # noqa: E402
    GemmPrecision,
    WeightCache,
    bf16_linear,
    bf16_linear_swiglu,
    fp8_linear,
    fp8_linear_swiglu,
)


def operands(toks: int, features: int, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(toks, features, seed=seed), 2 * randn(toks, 2 * features, seed=seed + 1)


def steps_apart(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """BF16 numbers between two BF16 values."""
    bits = [x.view(torch.int16).int() for x in (got, want)]
    return (torch.where(bits[0] < 0, -(bits[0] & 0x7FFF), bits[0]) - torch.where(bits[1] < 0, -(bits[1] & 0x7FFF), bits[1])).abs()


def test_every_gate_has_the_silu_of_torch(kernels):
    """All finite BF16 gates; the unfused form is torch's silu, rounded, times up."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).cuda()
    gate = patterns[torch.isfinite(patterns)].view(1, -1)
    for up in (torch.ones_like(gate), torch.full_like(gate, -0.37)):
        got, want = kernels.swiglu(torch.cat((gate, up), dim=1)), torch.nn.functional.silu(gate) * up
        normal = gate.abs() >= 2.0**-125
        assert torch.equal(got.view(torch.int16)[normal], want.view(torch.int16)[normal])
        assert ((got - want).abs() <= 2.0**-126).all(), "subnormal gates"
    special = torch.tensor([[float("inf"), -float("inf"), float("nan"), -float("nan")]], dtype=torch.bfloat16, device="cuda")
    got, want = kernels.swiglu(torch.cat((special, torch.ones_like(special)), dim=1)), torch.nn.functional.silu(special)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("shape", [(16384, 12288), (1000, 1408), (129, 200), (5, 7), (1, 128)])
def test_swiglu_equals_the_unfused_form_and_its_gradient_the_reference(kernels, shape):
    dh, gate_up = operands(*shape)
    gate, up = gate_up.chunk(2, dim=1)
    assert torch.equal(kernels.swiglu(gate_up), torch.nn.functional.silu(gate) * up)
    got = kernels.swiglu_backward(dh, gate_up)
    for rows in range(0, shape[0], 2048):  # float64 of all rows at once would not fit
        part = slice(rows, rows + 2048)
        d_up = (dh[part].float() * torch.nn.functional.silu(gate[part]).float()).bfloat16()
        gate64, up64 = gate[part].double(), up[part].double()
        sigmoid = torch.sigmoid(gate64)
        d_gate = (dh[part].double() * up64 * sigmoid * (1 + gate64 * (1 - sigmoid))).bfloat16()
        assert torch.equal(got[part, shape[1] :], d_up)
        apart = steps_apart(got[part, : shape[1]], d_gate)
        assert apart.max() <= 1 and apart.float().mean() < 1e-3
        assert steps_apart(got[part], reference.swiglu_backward(dh[part], gate_up[part])).max() <= 1


@pytest.mark.parametrize("scale_format", list(ScaleFormat))
@pytest.mark.parametrize("shape", [(16384, 12288), (1000, 1408), (129, 256), (1, 128)])
def test_fp8_gradient_of_swiglu_has_the_bytes_of_the_unfused_kernels(kernels, shape, scale_format):
    dh, gate_up = operands(*shape)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        f = {"dtype": dtype, "scale_format": scale_format}
        fused = kernels.swiglu_backward_dual(dh, gate_up, **f)
        for got, want in zip(fused, kernels.quantize_dual(kernels.swiglu_backward(dh, gate_up), **f), strict=True):
            assert got.same_bytes(want) and got.scale.stride() == want.scale.stride()


def test_fp8_gradient_of_swiglu_reads_any_rows_and_shows_nan(kernels):
    dh, gate_up = operands(300, 256)
    dh[7, 3], gate_up[200, 256 + 130], gate_up[250, 5] = float("nan"), float("inf"), float("nan")
    wide = torch.zeros(300, 515, dtype=torch.bfloat16, device="cuda")
    wide[:, 1:513] = gate_up
    for grad, x in ((dh, gate_up), (dh, wide[:, 1:513]), (dh[:1].expand_as(dh), gate_up), (dh.t().contiguous().t(), gate_up)):
        fused = kernels.swiglu_backward_dual(grad, x, **E4M3)
        for got, want in zip(fused, kernels.quantize_dual(kernels.swiglu_backward(grad, x), **E4M3), strict=True):
            assert got.same_bytes(want)
    broken = torch.isnan(kernels.swiglu_backward_dual(dh, gate_up, **E4M3)[0].dequantize())
    assert set(broken.any(dim=1).nonzero().flatten().tolist()) == {7, 200, 250}


@pytest.mark.parametrize("dgrad", list(LinearPrecision))
@pytest.mark.parametrize("wgrad", list(LinearPrecision))
def test_linear_with_swiglu_has_the_bits_of_the_steps_one_by_one(kernels, dgrad, wgrad):
    x, weight, dh = randn(1000, 512).requires_grad_(), torch.nn.Parameter(randn(2 * 768, 512, seed=1) / 16), randn(1000, 768, seed=2)
    cache = WeightCache(backend=Backend.deepgemm)
    cache.register("w", weight)
    cache.refresh()
    precision = GemmPrecision(dgrad=dgrad, wgrad=wgrad)
    steps = {
        "fp8": lambda: fp8_linear(x, weight, cache.get("w"), precision, Backend.deepgemm),
        "bf16": lambda: bf16_linear(x, weight),
    }
    fused = {
        "fp8": lambda: fp8_linear_swiglu(x, weight, cache.get("w"), precision, Backend.deepgemm),
        "bf16": lambda: bf16_linear_swiglu(x, weight, Backend.deepgemm),
    }
    for arm in steps:
        found = []
        for run in (steps[arm], fused[arm]):
            x.grad = weight.grad = None
            weight.main_grad = torch.zeros(weight.shape, device="cuda")
            out = run()
            if run is steps[arm]:
                out.backward(kernels.swiglu_backward(dh, out.detach()))
                out = kernels.swiglu(out)
            else:
                out.backward(dh)
            found.append((out, x.grad, weight.main_grad))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
        assert calc_diff(found[0][2], found[1][2]) < 1e-12, "cuBLAS and DeepGEMM may order the sums over tokens by themselves"
        assert found[1][2].abs().max() > 0


def test_offsets_above_31_bits(kernels):
    toks, features = 74_900, 14_336
    dh, gate_up = operands(toks, features)
    row_wise, transposed = kernels.swiglu_backward_dual(dh, gate_up, **E4M3)
    for start in (0, 37_376, 74_752):
        part = kernels.quantize_dual(kernels.swiglu_backward(dh[start : start + 128], gate_up[start : start + 128]), **E4M3)
        assert row_wise.rows(start, start + 128).same_bytes(part[0])
        assert torch.equal(transposed.data[:, start : start + 128].view(torch.uint8), part[1].data.view(torch.uint8))
