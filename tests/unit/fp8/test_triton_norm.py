"""The norm kernel by value, in Triton's interpreter where there is no GPU: against float64, and a row against itself in other company."""

import pytest
import torch

pytest.importorskip("triton")

from jetrl_megatron.fp8 import triton_norm
from jetrl_megatron.fp8.block_scaled import num_blocks, power_of_two
from jetrl_megatron.fp8.triton_fused import rms_norm_quantize
from jetrl_megatron.fp8.triton_norm import rms_norm, rms_norm_backward, rms_rstd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5


def rows(shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.logspace(-2, 2, shape[0]).view(-1, *(1,) * (len(shape) - 1))).bfloat16().to(DEVICE)


def weight_of(dim: int) -> torch.Tensor:
    return torch.exp(torch.randn(dim, generator=torch.Generator().manual_seed(dim))).bfloat16().to(DEVICE)


@pytest.mark.parametrize("shape", [(5, 128), (3, 2, 64), (1, 768), (2, 1, 3, 128), (3, 1100), (130, 8)])
def test_values_are_those_of_float64_but_for_the_last_place(shape):
    x, w = rows(shape), weight_of(shape[-1])
    y, rstd = rms_norm(x, w, EPS)
    x64 = x.double()
    rstd64 = 1.0 / torch.sqrt(x64.square().mean(-1, keepdim=True) + EPS)
    want = (x64 * rstd64 * w.double()).bfloat16()
    # FP32 sums are right to about 2^-21: a value that close to the middle of two BF16 numbers may round the other way.
    assert rstd.shape == (*shape[:-1], 1) and torch.allclose(rstd.double(), rstd64, rtol=2**-20, atol=0)
    steps = (y.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    assert y.shape == x.shape and int(steps.max()) <= 1 and float((steps > 0).double().mean()) < 0.002


def test_a_row_has_the_same_bits_alone_among_many_and_inside_a_wider_tensor():
    dim, w = 128, weight_of(128)
    x = rows((37, 4 * dim + 64))
    heads = x[:, 64 : 64 + 3 * dim].unflatten(1, (3, dim))
    whole = rms_norm(heads, w, EPS)[0]
    assert torch.equal(whole, rms_norm(heads.contiguous(), w, EPS)[0])
    assert all(torch.equal(whole[i, h], rms_norm(heads[i, h][None].clone(), w, EPS)[0][0]) for i in (0, 17, 36) for h in range(3))
    odd = torch.cat((x[:, :1], heads.flatten(1)), 1)[:, 1:].unflatten(1, (3, dim))  # rows that do not begin at 16 bytes are copied
    assert torch.equal(whole, rms_norm(odd, w, EPS)[0])


def test_nan_and_infinity_stay_visible_and_nothing_is_launched_for_no_rows():
    x, w = rows((3, 128)), weight_of(128)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    y = rms_norm(x, w, EPS)[0]
    assert y[0].isnan().all() and y[1, 7].isnan() and y[2].isfinite().all()
    assert rms_norm(x[:0], w, EPS)[0].shape == (0, 128)


def test_the_quantiser_reads_the_bits_of_the_norm_itself():
    x, w = rows((70, 384)), weight_of(384)
    assert torch.equal(rms_rstd(x, w, EPS), rms_norm(x, w, EPS)[1])
    row_wise, _, _ = rms_norm_quantize(x, w, EPS, t_block=None)
    from jetrl_megatron.fp8.quantize import ROW_BLOCK, quantize

    wanted = quantize(rms_norm(x, w, EPS)[0], ROW_BLOCK)
    assert torch.equal(row_wise.data.view(torch.uint8), wanted.data.view(torch.uint8)) and torch.equal(row_wise.scale, wanted.scale)


def test_other_dtypes_and_widths_are_refused():
    with pytest.raises(ValueError, match=r"torch.float32 \(2, 128\)"):
        rms_norm(torch.zeros(2, 128, device=DEVICE), weight_of(128), EPS)
    with pytest.raises(ValueError, match=r"weight .*\(64,\)"):
        rms_norm(rows((2, 128)), weight_of(64), EPS)


@pytest.mark.parametrize("shape", [(5, 128), (3, 2, 64), (1, 768), (2, 1, 3, 128), (5, 1100), (1300, 8)])
def test_gradients_are_those_of_float64_but_for_one_rounding(shape, monkeypatch):
    monkeypatch.setattr(triton_norm, "PROGRAMS", 2)
    if shape in ((5, 1100), (1300, 8)):  # three tiles for two programs: two turns each, the last of them behind the end
        width = power_of_two(shape[-1])
        assert num_blocks(shape[0], max(1, triton_norm.BACKWARD_TILE_ELEMENTS // width)) == 3
    x, w = rows(shape), weight_of(shape[-1])
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(DEVICE)
    dx, dw = rms_norm_backward(dy, x, w, rms_rstd(x, w, EPS), want_dw=True)
    x64, w64 = (t.double().requires_grad_() for t in (x, w))
    (x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + EPS) * w64).backward(dy.double())
    assert dx.dtype is dw.dtype is torch.bfloat16
    for got, want in ((dx, x64.grad), (dw, w64.grad)):
        # Half a BF16 step, and what FP32 sums lose where terms cancel.
        slack = 2**-8 * want.abs() + 2**-20 * want.abs().amax(-1, keepdim=True)
        assert bool(((got.double() - want).abs() <= slack).all())
    assert rms_norm_backward(dy, x, w, rms_rstd(x, w, EPS), want_dw=False)[1] is None


@pytest.mark.parametrize("shape", [(528, 128), (300, 1100), (129, 40), (128, 32), (1, 8)])
def test_partial_sums_are_all_added_once(shape):
    parts = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(4)).float().to(DEVICE)  # sums are exact
    assert torch.equal(triton_norm._summed(parts), parts.sum(0).bfloat16())


def test_gradients_of_strided_heads_are_those_of_a_copy_and_no_rows_give_zeros():
    w = weight_of(128)
    wide, wide_dy = rows((21, 5 * 128)), rows((21, 4 * 128), seed=2)
    x, dy = (t[:, 128:384].unflatten(1, (2, 128)) for t in (wide, wide_dy))
    rstd = rms_rstd(x, w, EPS)
    got, want = rms_norm_backward(dy, x, w, rstd, want_dw=True), rms_norm_backward(dy.contiguous(), x.contiguous(), w, rstd, want_dw=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    one = rms_norm_backward(dy[7:8, 1:], x[7:8, 1:], w, rstd[7:8, 1:], want_dw=False)[0]
    assert torch.equal(one[0, 0], got[0][7, 1])  # a row's gradient does not depend on its company
    dx, dw = rms_norm_backward(dy[:0], x[:0], w, rstd[:0], want_dw=True)
    assert dx.shape == (0, 2, 128) and not dw.any()


def test_the_operator_for_compiled_graphs_is_the_same_function():
    x, w = rows((9, 128)), weight_of(128)
    assert all(torch.equal(a, b) for a, b in zip(torch.ops.jetrl.rms_norm(x, w, EPS), rms_norm(x, w, EPS), strict=True))
    torch.library.opcheck(torch.ops.jetrl.rms_norm.default, (x, w, EPS), test_utils=("test_schema", "test_faketensor"))
