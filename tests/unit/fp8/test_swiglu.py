"""SwiGLU and its gradient: the reference against float64 autograd, the kernels against the reference, FP8 against BF16 byte for byte."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8 import BlockScaled, swiglu, triton_swiglu
from jetrl_megatron.fp8.backend import ReferenceKernels
from jetrl_megatron.fp8.deepgemm import DeepGemmKernels
from jetrl_megatron.fp8.quantize import quantize_dual
from jetrl_megatron.fp8.triton_fused import swiglu_quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
SHAPES = [(13, 256), (1, 128), (5, 200), (3, 7), (2, 1500), (1, 1)]
"""[T, F]: one token and odd numbers of tokens, F odd, F above one program's block."""


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(BF16)


def operands(toks: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(toks, features, seed=1), randn(toks, 2 * features, seed=2, scale=3.0)


def steps_apart(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance of BF16 values, in BF16 numbers between them."""

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.cpu().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(got) - ordered(want)).abs()


def on_cpu(q: BlockScaled) -> BlockScaled:
    return BlockScaled(q.data.cpu(), q.scale.cpu(), q.block)


def test_the_forward_rounds_the_silu_and_then_the_product():
    _, gate_up = operands(64, 100)
    gate, up = gate_up.chunk(2, dim=1)
    gate64 = gate.double()
    twice = (gate64 / (1 + torch.exp(-gate64))).to(BF16) * up
    once = (gate64 / (1 + torch.exp(-gate64)) * up.double()).to(BF16)
    assert torch.equal(swiglu.swiglu(gate_up), twice)
    assert (once != twice).float().mean() > 0.1, "the check above can tell one rounding from two"


def test_the_backward_is_the_derivative_rounded_once():
    dh, gate_up = operands(64, 100)
    gate, up = (half.double().requires_grad_() for half in gate_up.chunk(2, dim=1))
    (torch.nn.functional.silu(gate) * up).backward(dh.double())
    d_gate, d_up = swiglu.swiglu_backward(dh, gate_up).chunk(2, dim=1)
    assert torch.equal(d_gate, gate.grad.to(BF16))
    silu = torch.nn.functional.silu(gate.detach()).to(BF16)
    assert torch.equal(d_up, (dh.double() * silu.double()).to(BF16)), "the factor is the one that the forward multiplied by"
    chained = torch.ops.aten.silu_backward((dh * gate_up.chunk(2, dim=1)[1]).double(), gate.detach()).to(BF16)
    assert (chained != d_gate).float().mean() > 0.05, "the check above can tell one rounding from a chain"


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compute_the_reference(shape):
    dh, gate_up = operands(*shape)
    h = triton_swiglu.swiglu(gate_up.to(DEVICE))
    assert h.shape == shape and h.is_contiguous() and torch.equal(h.cpu(), swiglu.swiglu(gate_up))
    apart = steps_apart(triton_swiglu.swiglu_backward(dh.to(DEVICE), gate_up.to(DEVICE)), swiglu.swiglu_backward(dh, gate_up))
    # FP32 inside against float64: a value on the edge of two BF16 numbers may go to the other one.
    assert apart.shape == gate_up.shape and apart.max() <= 1 and apart.float().mean() < 1e-3


def test_every_gate_has_the_reference_silu_and_derivative():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16).float()
    # Below -88 exp(-gate) leaves FP32 and the silu is nearer to zero than 1e-36; subnormal gates are as small.
    gate = patterns[(patterns.abs() >= 2.0**-125) & (patterns >= -88) & (patterns < float("inf"))].to(BF16).view(1, -1)
    gate_up, dh = torch.cat((gate, torch.ones_like(gate)), dim=1), torch.ones_like(gate)
    assert gate.numel() > 48_000
    assert torch.equal(triton_swiglu.swiglu(gate_up.to(DEVICE)).cpu(), swiglu.swiglu(gate_up))
    got = triton_swiglu.swiglu_backward(dh.to(DEVICE), gate_up.to(DEVICE)).cpu()
    apart = steps_apart(got, swiglu.swiglu_backward(dh, gate_up))
    assert apart.max() <= 1 and apart.float().mean() < 1e-3


def test_the_fused_quantiser_of_the_forward_sees_the_same_bytes():
    _, gate_up = operands(9, 128)
    fused = swiglu_quantize(gate_up.to(DEVICE))
    for got, want in zip(fused, quantize_dual(triton_swiglu.swiglu(gate_up.to(DEVICE)).cpu()), strict=True):
        assert on_cpu(got).same_bytes(want)


@pytest.mark.parametrize(
    ("shape", "scale_format", "dtype"),
    [
        *(((5, 128), *rest) for rest in itertools.product(ScaleFormat, (torch.float8_e4m3fn, torch.float8_e5m2))),
        ((130, 256), ScaleFormat.fp32, torch.float8_e4m3fn),
        ((1, 384), ScaleFormat.fp32, torch.float8_e4m3fn),
        ((128, 128), ScaleFormat.fp32, torch.float8_e4m3fn),
    ],
)
def test_fp8_gradients_are_those_of_quantising_the_bf16_gradient(shape, scale_format, dtype):
    dh, gate_up = (x.to(DEVICE) for x in operands(*shape))
    f = {"dtype": dtype, "scale_format": scale_format}
    got = triton_swiglu.swiglu_backward_dual(dh, gate_up, **f)
    for part, want in zip(got, quantize_dual(triton_swiglu.swiglu_backward(dh, gate_up).cpu(), **f), strict=True):
        assert on_cpu(part).same_bytes(want)
    for part, want in zip(
        swiglu.swiglu_backward_dual(dh, gate_up, **f), quantize_dual(swiglu.swiglu_backward(dh, gate_up), **f), strict=True
    ):
        assert part.same_bytes(want)


def test_any_strides_are_read():
    toks, features = 6, 128
    dh, gate_up = operands(toks, features)
    wide = torch.zeros(toks, 2 * features + 3, dtype=BF16, device=DEVICE)
    wide[:, 1:-2] = gate_up.to(DEVICE)
    dh, gate_up = dh.to(DEVICE), gate_up.to(DEVICE)
    views = {
        "odd row stride, odd offset": (dh, wide[:, 1:-2]),
        "transposed": (dh.t().contiguous().t(), gate_up.t().contiguous().t()),
        "one row for all": (dh[:1].expand(toks, features), gate_up),
        "one value for all": (dh[:1, :1].expand(toks, features), gate_up),
    }
    for name, given in views.items():
        grad, x = (tensor.contiguous() for tensor in given)
        assert torch.equal(triton_swiglu.swiglu(given[1]), triton_swiglu.swiglu(x)), name
        assert torch.equal(swiglu.swiglu_backward(*given), swiglu.swiglu_backward(grad, x)), name
        backward = triton_swiglu.swiglu_backward(grad, x)
        assert torch.equal(triton_swiglu.swiglu_backward(*given), backward), name
        for got, want in zip(triton_swiglu.swiglu_backward_dual(*given), quantize_dual(backward.cpu()), strict=True):
            assert on_cpu(got).same_bytes(want), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["gate", "up", "dh"])
def test_nan_and_inf_stay_visible_and_stay_where_they_are(bad, where):
    dh, gate_up = operands(9, 128)
    target = dh if where == "dh" else gate_up
    target[4, 128 + 17 if where == "up" else 17] = bad
    for kernels in (swiglu, triton_swiglu):
        grad = kernels.swiglu_backward(dh.to(DEVICE), gate_up.to(DEVICE)).cpu()
        h = kernels.swiglu(gate_up.to(DEVICE)).cpu()
        broken = ~torch.isfinite(torch.cat((h, grad), dim=1))
        rows, columns = broken.nonzero(as_tuple=True)
        assert set(rows.tolist()) == {4} and {c % 128 for c in columns.tolist()} == {17}, kernels.__name__
        assert len(columns) == {"gate": 3, "up": 2, "dh": 2}[where], "of h, d_gate and d_up"
    row_wise, transposed = triton_swiglu.swiglu_backward_dual(dh.to(DEVICE), gate_up.to(DEVICE))
    assert torch.isnan(row_wise.dequantize()[4, :128]).all() and torch.isnan(transposed.dequantize()[17]).all()
    assert torch.isfinite(row_wise.dequantize()[[0, 1, 2, 3, 5, 6, 7, 8]]).all()


def test_gradients_of_saturated_gates_are_finite():
    gate = torch.tensor([[-100.0, -88.5, -30.0, -1.28, 0.0, -0.0, 30.0, 88.5, 100.0, 3e38, -3e38, 1e-39]]).to(BF16)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    for kernels in (swiglu, triton_swiglu):
        assert torch.isfinite(kernels.swiglu(gate_up.to(DEVICE))).all()
        assert torch.isfinite(kernels.swiglu_backward(torch.ones_like(gate).to(DEVICE), gate_up.to(DEVICE))).all()


def test_zero_tokens():
    dh, gate_up = operands(0, 128)
    for kernels in (swiglu, triton_swiglu):
        assert kernels.swiglu(gate_up).shape == (0, 128) and kernels.swiglu_backward(dh, gate_up).shape == (0, 256)
        row_wise, transposed = kernels.swiglu_backward_dual(dh, gate_up)
        assert row_wise.shape == (0, 256) and transposed.shape == (256, 0)


def test_what_does_not_fit_is_refused():
    dh, gate_up = operands(4, 100)
    for kernels in (swiglu, triton_swiglu):
        with pytest.raises(ValueError, match=r"need bfloat16 \[T, 2F\]"):
            kernels.swiglu(gate_up[:, :-1])
        with pytest.raises(ValueError, match=r"gate_up is torch\.float32"):
            kernels.swiglu_backward(dh, gate_up.float())
        with pytest.raises(ValueError, match=r"dh is torch\.bfloat16 \(4, 99\); need bfloat16 \(4, 100\)"):
            kernels.swiglu_backward(dh[:, :-1], gate_up)
    with pytest.raises(ValueError, match="100 features; a scale group of 128"):
        triton_swiglu.swiglu_backward_dual(dh, gate_up)


def test_both_backends_offer_the_same_operations():
    public = {name for name in vars(ReferenceKernels) if not name.startswith("_")}
    assert public == {name for name in vars(DeepGemmKernels) if not name.startswith("_")}
    assert {"swiglu", "swiglu_backward", "swiglu_backward_dual"} <= public
