"""The reference quantiser: exact codes and scales of zero blocks, power-of-two and BF16 scales, transposes and second roundings."""

import pytest
import torch

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.quantize import NAN_CODE, quantize, quantize_dual

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = [(1, 128), (128, 128), (128, 1)]


def by_hand(x: torch.Tensor, block: tuple[int, int], dtype: torch.dtype = E4M3) -> BlockScaled:
    """The definition, one block at a time."""
    limit = torch.finfo(dtype).max
    rows, cols = x.shape
    codes = torch.empty(rows, cols, dtype=dtype)
    grid = -(-rows // block[0]), -(-cols // block[1])
    scale = torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            cut = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            part = x[cut].float()
            s = torch.tensor(max(part.abs().max().item(), 1e-10)) / torch.tensor(limit)
            codes[cut] = (part / s).clamp(-limit, limit).to(dtype)
            scale[i, j] = s
    return BlockScaled(codes, scale, block)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(256, 256), (250, 256), (3, 200), (1, 1), (129, 385)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_bytes_equal_the_definition_at_whole_and_partial_blocks(block, shape, dtype):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    assert quantize(x, block, dtype=dtype).same_bytes(by_hand(x, block, dtype))


def test_partial_block_equals_zero_padding_and_strides_do_not_matter():
    x = torch.randn(100, 200).bfloat16()
    padded = torch.zeros(128, 256, dtype=torch.bfloat16)
    padded[:100, :200] = x
    q, q_padded = quantize(x, (128, 128)), quantize(padded, (128, 128))
    assert torch.equal(q.scale, q_padded.scale) and torch.equal(q.data.float(), q_padded.data[:100, :200].float())
    assert quantize(x.t(), (1, 128)).same_bytes(quantize(x.t().contiguous(), (1, 128)))


def test_zero_blocks_have_zero_codes_and_positive_scales():
    x = torch.zeros(256, 256)
    x[0, 0] = 1.0
    for block in BLOCKS:
        q = quantize(x, block)
        assert (q.scale > 0).all() and torch.isfinite(q.scale).all()
        assert torch.equal(q.dequantize(), x)
        assert int((q.data.view(torch.uint8) != 0).sum()) == 1
    assert quantize(torch.zeros(1, 128), (1, 128)).scale.item() == (torch.tensor(1e-10) / torch.tensor(448.0)).item()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block", BLOCKS)
def test_nan_and_inf_stay_visible_in_their_own_block_only(bad, block):
    x = torch.randn(256, 256).bfloat16()
    x[130, 5] = bad
    q = quantize(x, block)
    grid = torch.isnan(q.scale)
    assert int(grid.sum()) == 1 and bool(grid[130 // block[0], 5 // block[1]])
    value = q.dequantize()
    assert int(torch.isnan(value).sum()) == block[0] * block[1]
    assert (q.data.view(torch.uint8)[torch.isnan(value)] == NAN_CODE).all()


def test_huge_and_tiny_values():
    big = torch.full((1, 128), torch.finfo(torch.bfloat16).max).bfloat16()
    assert quantize(big, (1, 128)).data.float().eq(448).all()
    tiny = torch.full((1, 128), 1e-12).bfloat16()
    q = quantize(tiny, (1, 128))
    assert torch.equal(q.data.float(), (tiny.float() / q.scale).to(E4M3).float()) and q.data.float().max() == 4.5


def test_power_of_two_scale_is_rounded_up_before_dividing():
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = quantize(x, (128, 128), scale_format=ScaleFormat.ue8m0)
    exact = quantize(x, (128, 128)).scale
    assert torch.equal(torch.frexp(q.scale)[0], torch.full_like(q.scale, 0.5))
    assert (q.scale >= exact).all() and (q.scale < 2 * exact).all()
    assert ((q.dequantize() - x.float()).norm() / x.float().norm()).item() < 0.03
    power = torch.full((1, 128), 448.0)
    assert quantize(power, (1, 128), scale_format=ScaleFormat.ue8m0).scale.item() == 1.0


@pytest.mark.parametrize("scale_format, codes, scales", [(ScaleFormat.fp32, 0, 0), (ScaleFormat.ue8m0, 16384, 1)])
def test_requantising_changes_this_many_codes_and_scales(scale_format, codes, scales):
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    once = quantize(x, (128, 128), scale_format=scale_format)
    twice = quantize(once.dequantize(), (128, 128), scale_format=scale_format)
    assert int((once.data.view(torch.uint8) != twice.data.view(torch.uint8)).sum()) == codes
    assert int((once.scale != twice.scale).sum()) == scales
    # A power of two was one step too high for the rounded values: half the scale, twice the codes, the same values.
    assert torch.equal(once.dequantize(), twice.dequantize())


def test_dual_is_both_quantisations_of_the_same_values_padded_with_zero_codes():
    x = torch.randn(200, 384).bfloat16()
    row_wise, transposed = quantize_dual(x)
    assert row_wise.same_bytes(quantize(x, (1, 128)))
    alone = quantize(x.t(), (1, 128))
    assert transposed.shape == (384, 256) and torch.equal(transposed.scale, alone.scale)
    assert torch.equal(transposed.data[:, :200].float(), alone.data.float())
    assert (transposed.data[:, 200:].view(torch.uint8) == 0).all()
    assert transposed.data.is_contiguous()


def test_transpose_moves_bytes_and_grid_and_declares_its_orientation():
    x = torch.cat([torch.randn(125, 256), 10 * torch.randn(125, 256)]).bfloat16()
    q = quantize(x, (128, 128))
    t = q.transpose()
    assert t.shape == (256, 250) and t.block == (128, 128)
    assert torch.equal(t.dequantize(), q.dequantize().t())
    assert t.transpose().same_bytes(q)
    square_grid_misread = BlockScaled(t.data, q.scale, (128, 128))
    assert not torch.equal(square_grid_misread.dequantize(), t.dequantize())
    assert quantize(x, (1, 128)).transpose().block == (128, 1)


def test_bad_scales_and_inputs_are_refused():
    q = quantize(torch.randn(100, 100), (128, 128))
    assert q.scale.shape == (1, 1)
    with pytest.raises(ValueError, match="must be float32"):
        BlockScaled(q.data, q.scale.bfloat16(), (128, 128))
    with pytest.raises(ValueError, match="2-D"):
        BlockScaled(q.data, q.scale.squeeze(), (128, 128))
    with pytest.raises(ValueError, match="scale grid"):
        BlockScaled(q.data, torch.ones(1, 2), (128, 128))
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        quantize(torch.ones(2, 2, dtype=torch.float16), (1, 128))
    with pytest.raises(ValueError, match="matrix"):
        quantize(torch.ones(2, 2, 2), (1, 128))


def test_rows_cut_whole_blocks_only():
    q = quantize(torch.randn(300, 256), (128, 128))
    assert q.rows(128, 300).same_bytes(BlockScaled(q.data[128:], q.scale[1:], (128, 128)))
    with pytest.raises(ValueError, match="cut a block"):
        q.rows(100, 300)
    assert q.nbytes == 300 * 256 + 4 * 3 * 2
