"""The reference GEMMs against float64, their independence of M and N, and empty batches."""

import pytest
import torch

from jetrl_megatron.fp8.gemm_reference import dgrad, fprop, matmul_bf16_reference, wgrad
from jetrl_megatron.fp8.quantize import quantize, quantize_dual


def operands(t=200, n=384, k=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w, dy = (torch.randn(s, generator=g).bfloat16() for s in ((t, k), (n, k), (t, n)))
    return x, w, dy


def calc_diff(a: torch.Tensor, b: torch.Tensor) -> float:
    """1 - 2ab / (aa + bb) in float64: 0 for equal tensors."""
    a, b = a.double(), b.double()
    return 1 - float(2 * (a * b).sum() / (a * a + b * b).sum())


def test_three_gemms_equal_float64_on_the_dequantised_operands():
    x, w, dy = operands()
    qx, qx_t = quantize_dual(x)
    qdy, qdy_t = quantize_dual(dy)
    qw = quantize(w, (128, 128))
    f64 = {name: q.dequantize().double() for name, q in (("x", qx), ("x_t", qx_t), ("dy", qdy), ("dy_t", qdy_t), ("w", qw))}
    assert calc_diff(fprop(qx, qw), f64["x"] @ f64["w"].t()) < 3e-6
    assert calc_diff(dgrad(qdy, qw.transpose()), f64["dy"] @ f64["w"]) < 3e-6
    assert calc_diff(wgrad(qdy_t, qx_t), f64["dy_t"] @ f64["x_t"].t()) < 1e-13


def test_rows_and_columns_are_bit_equal_at_any_m_and_any_cut_of_n():
    x, w, _ = operands(t=64)
    qx, qw = quantize(x, (1, 128)), quantize(w, (128, 128))
    whole = fprop(qx, qw)
    for m in (1, 2, 3, 17, 33):
        assert torch.equal(fprop(qx.rows(0, m), qw), whole[:m])
        assert torch.equal(matmul_bf16_reference(x[:m], w, torch.float32), matmul_bf16_reference(x, w, torch.float32)[:m])
    assert torch.equal(torch.cat([fprop(qx, qw.rows(0, 128)), fprop(qx, qw.rows(128, 384))], dim=1), whole)


def test_block_sums_are_added_in_fp32_in_order_of_k():
    x, w, _ = operands(t=3, n=128, k=384)
    qx, qw = quantize(x, (1, 128)), quantize(w, (128, 128))
    expected = torch.zeros(3, 128)
    for k in range(3):
        cut = slice(128 * k, 128 * (k + 1))
        part = (qx.data[:, cut].double() @ qw.data[:, cut].double().t()).float()
        expected = expected + part * (qx.scale[:, k : k + 1] * qw.scale[0, k])
    assert torch.equal(fprop(qx, qw), expected.bfloat16())


def test_wgrad_accumulates_in_place_and_zero_padded_tokens_change_nothing():
    x, _, dy = operands(t=200)
    (_, x_t), (_, dy_t) = quantize_dual(x), quantize_dual(dy)
    base = torch.randn(384, 256)
    out = base.clone()
    assert wgrad(dy_t, x_t, out) is out
    assert torch.equal(out, base + wgrad(dy_t, x_t))
    unpadded = wgrad(quantize(dy.t(), (1, 128)), quantize(x.t(), (1, 128)))
    assert torch.equal(unpadded, wgrad(dy_t, x_t))
    with pytest.raises(ValueError, match="float32"):
        wgrad(dy_t, x_t, out.bfloat16())


def test_empty_batch():
    x, w, dy = operands(t=0)
    (qx, x_t), (qdy, dy_t) = quantize_dual(x), quantize_dual(dy)
    qw = quantize(w, (128, 128))
    assert fprop(qx, qw).shape == (0, 384) and dgrad(qdy, qw.transpose()).shape == (0, 256)
    assert torch.equal(wgrad(dy_t, x_t), torch.zeros(384, 256))
    assert matmul_bf16_reference(x, w).shape == (0, 384)


def test_an_operand_in_the_other_orientation_is_refused():
    x, w, _ = operands()
    qx, qw = quantize(x, (1, 128)), quantize(w, (128, 128))
    with pytest.raises(ValueError, match="orientation"):
        dgrad(quantize(torch.randn(4, 384), (1, 128)), qw)
    with pytest.raises(ValueError, match="blocks"):
        fprop(quantize(x, (128, 1)), qw)
    with pytest.raises(ValueError, match="blocks"):
        wgrad(qw, qx)


def test_nan_in_one_token_poisons_its_row_only():
    x, w, _ = operands(t=8)
    x[3, 7] = float("nan")
    y = fprop(quantize(x, (1, 128)), quantize(w, (128, 128)))
    assert torch.isnan(y).all(dim=1).tolist() == [i == 3 for i in range(8)] and not torch.isnan(y[[0, 1, 2, 4]]).any()


def test_bf16_reference_is_correctly_rounded_float64():
    x, w, _ = operands(t=50, k=4500)
    x[:, ::7] *= 2.0**-30
    exact = x.double() @ w.double().t()
    got = matmul_bf16_reference(x, w, torch.float32)
    assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-23).all()
    x[1, 5] = float("inf")
    finite = torch.isfinite(matmul_bf16_reference(x, w)).all(dim=1)
    assert finite.tolist() == [i != 1 for i in range(50)]
