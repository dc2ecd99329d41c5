"""The fused quantisers: their codes are those of quantising the BF16 result that they stand for."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from jetrl_megatron.fp8.quantize import ROW_BLOCK, WEIGHT_BLOCK, quantize, quantize_dual
from jetrl_megatron.fp8.triton_fused import rms_norm_quantize, swiglu_quantize
from jetrl_megatron.fp8.triton_swiglu import swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(130, 256), (1, 128)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """One BF16 rounding, as the rollout engine's kernel."""
    return (x.float() * rstd * weight.float()).bfloat16()


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_codes_are_those_of_the_bf16_norm(shape):
    x = (3 * torch.randn(shape)).bfloat16().to(DEVICE)
    weight = (1 + torch.randn(shape[1]) / 4).bfloat16().to(DEVICE)
    row_wise, transposed, rstd = rms_norm_quantize(x, weight, 1e-6)
    exact = (x.double().pow(2).mean(1, keepdim=True) + 1e-6).rsqrt()
    assert ((rstd.double() - exact).abs() <= exact * 2.0**-22).all()
    expected = quantize_dual(rms_norm(x, weight, rstd))
    assert row_wise.same_bytes(expected[0]) and transposed.same_bytes(expected[1])
    alone, nothing, _ = rms_norm_quantize(x, weight, 1e-6, t_block=None)
    assert alone.same_bytes(expected[0]) and nothing is None
    row_wise, blocks, _ = rms_norm_quantize(x, weight, 1e-6, t_block=WEIGHT_BLOCK)
    expected = quantize_dual(rms_norm(x, weight, rstd), t_block=WEIGHT_BLOCK)
    assert row_wise.same_bytes(expected[0]) and blocks.same_bytes(expected[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_codes_are_those_of_the_bf16_activation(shape):
    gate_up = (3 * torch.randn(shape[0], 2 * shape[1])).bfloat16().to(DEVICE)
    gate, up = gate_up.chunk(2, dim=1)
    expected = quantize_dual(F.silu(gate) * up)
    row_wise, transposed = swiglu_quantize(gate_up)
    # exp is the one operation whose last bit is a library's own: a code may move to its neighbour where BF16 rounding sits on the edge.
    for got, want in zip((row_wise, transposed), expected, strict=True):
        assert (got.data.view(torch.uint8) != want.data.view(torch.uint8)).float().mean() < 1e-3
        assert ((got.dequantize() - want.dequantize()).abs() <= want.dequantize().abs() / 7 + got.scale.max() / 256).all()
    assert swiglu_quantize(gate_up, t_block=None)[0].same_bytes(row_wise)
    again, blocks = swiglu_quantize(gate_up, t_block=WEIGHT_BLOCK)
    written = swiglu(gate_up)
    assert again.same_bytes(row_wise) and blocks.same_bytes(quantize_dual(written, t_block=WEIGHT_BLOCK)[1])
    assert row_wise.same_bytes(quantize(written, (1, 128))), "the kernel that writes h and the one that quantises it have one silu"


@pytest.mark.parametrize("cols", [256, 129])
@pytest.mark.parametrize("t_block", [ROW_BLOCK, WEIGHT_BLOCK])
def test_tokens_that_fill_a_group_up_are_plus_zero_under_a_negative_weight_too(cols, t_block):
    x, weight = torch.randn(130, cols).bfloat16().to(DEVICE), -torch.ones(cols).bfloat16().to(DEVICE)
    row_wise, transposed, rstd = rms_norm_quantize(x, weight, 1e-6, t_block=t_block)
    expected = quantize_dual(rms_norm(x, weight, rstd), t_block=t_block)
    assert row_wise.same_bytes(expected[0]) and transposed.same_bytes(expected[1])
    assert transposed.data[:, 130:].view(torch.uint8).count_nonzero() == 0


def test_zero_tokens_and_what_does_not_fit():
    empty = torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE)
    assert rms_norm_quantize(empty, empty.new_ones(256), 1e-6)[1].shape == (256, 0)
    assert swiglu_quantize(empty)[0].shape == (0, 128)
    with pytest.raises(ValueError, match="bfloat16"):
        rms_norm_quantize(empty, empty.new_ones(128), 1e-6)
    with pytest.raises(ValueError, match="2C"):
        swiglu_quantize(empty.float())


def test_norm_of_a_zero_row_and_a_poisoned_row():
    x = torch.randn(4, 128).bfloat16().to(DEVICE)
    x[1], x[2, 5] = 0, float("nan")
    row_wise, _, rstd = rms_norm_quantize(x, torch.ones_like(x[0]), 1e-6)
    value = row_wise.dequantize()
    assert torch.isnan(value).all(dim=1).tolist() == [False, False, True, False] and value[1].eq(0).all()
    assert row_wise.same_bytes(quantize(rms_norm(x, torch.ones_like(x[0]), rstd), (1, 128)))
