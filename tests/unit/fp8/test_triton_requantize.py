"""FP8 quantised anew along the other axis by the Triton kernel, against the reference; on a CPU in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8 import BlockScaled, triton_requantize
from jetrl_megatron.fp8.quantize import quantize, requantize_transposed
from jetrl_megatron.fp8.triton_quantize import scaled_buffer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def codes(shape: tuple[int, int], seed: int = 0) -> BlockScaled:
    """Every code but NaN, under scales of any mantissa and many magnitudes."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 255, shape, generator=g, dtype=torch.int16)
    data = torch.where(data % 128 == 127, 0, data).to(torch.uint8).view(torch.float8_e4m3fn)
    groups = (shape[1] + 127) // 128
    return BlockScaled(data, torch.exp(4 * torch.randn((groups, shape[0]), generator=g)).t(), (1, 128))


def there(x: BlockScaled) -> BlockScaled:
    return BlockScaled(x.data.to(DEVICE), x.scale.to(DEVICE), x.block)


def check(x: BlockScaled, **f) -> None:
    got = triton_requantize.requantize_transposed(there(x), **f)
    assert BlockScaled(got.data.cpu(), got.scale.cpu(), got.block).same_bytes(requantize_transposed(x, **f)), f


@pytest.mark.parametrize("t_block", [(1, 128), (128, 128)])
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
@pytest.mark.parametrize("shape", [(200, 128), (1, 128), (127, 130), (100, 36)])
def test_the_bytes_are_those_of_dequantising_and_quantising(shape, scale_format, t_block):
    check(codes(shape), scale_format=scale_format, t_block=t_block)


@pytest.mark.parametrize("t_block", [(1, 128), (128, 128)])
def test_nan_huge_tiny_and_zero(t_block):
    x = quantize(torch.randn(128, 256, generator=torch.Generator().manual_seed(3)).bfloat16(), (1, 128))
    x.data.view(torch.uint8)[0, :4] = torch.tensor([0x00, 0x80, 0x01, 0x81], dtype=torch.uint8)
    x.scale[10, 0], x.scale[11, 1], x.scale[3] = float("nan"), 1e38, 1e-35
    check(x, t_block=t_block)
    x.scale[10, 0], x.scale[11, 1] = 1.0, 1.0
    x.data.view(torch.uint8)[7, 5] = 0x7F
    check(x, t_block=t_block)
    x.data.view(torch.uint8)[:] = 0
    x.data.view(torch.uint8)[::2] = 0x80
    check(x, t_block=t_block)


@pytest.mark.parametrize("t_block", [(1, 128), (128, 128)])
def test_zeros_under_an_infinite_scale_are_nan_and_scales_may_have_any_strides(t_block):
    """Zero times infinity has a sign on a CPU, which must not make the NaN the smallest of its group."""
    x = codes((5, 130))
    wide = torch.ones(10, 5)
    x = BlockScaled(x.data, wide[::2, 1::2], (1, 128))
    x.scale.copy_(codes((5, 130), seed=1).scale)
    x.scale[2, 0], x.scale[4], x.scale[1] = float("inf"), 0.0, 1e-42
    x.data.view(torch.uint8)[2] = torch.arange(130, dtype=torch.uint8) % 2 * 128
    check(x, t_block=t_block)


def test_codes_with_a_stride_and_off_a_words_boundary():
    # The third: words end inside a tile, and codes lie behind them in memory. The last: rows do not begin at words.
    for width, start, stop in ((384, 4, 132), (384, 3, 131), (384, 4, 136), (386, 4, 132)):
        wide = codes((130, width))
        data = there(wide).data[:, start:stop]
        scale = there(wide).scale[:, : -(-(stop - start) // 128)]
        whole = BlockScaled(wide.data[:, start:stop].contiguous(), scale.cpu(), (1, 128))
        for t_block in ((1, 128), (128, 128)):
            got = triton_requantize.requantize_transposed(BlockScaled(data, scale, (1, 128)), t_block=t_block)
            expected = requantize_transposed(whole, t_block=t_block)
            assert BlockScaled(got.data.cpu(), got.scale.cpu(), got.block).same_bytes(expected), (width, start, stop, t_block)


@pytest.mark.parametrize("t_block", [(1, 128), (128, 128)])
def test_nothing_is_written_behind_the_result(t_block, monkeypatch):
    """Codes and scales end where the columns do, not where a tile does; the rounding of the scales stays zero."""
    guards = []

    def guarded(old, mode, *args):
        out = scaled_buffer(old, mode, *args)
        found = []
        for x in (out.data, out.scale):
            bytes_ = x.untyped_storage().nbytes()
            raw = torch.full((bytes_ + 128 * 1024,), 0x5A, dtype=torch.uint8, device=x.device)
            raw[:bytes_] = 0
            guards.append(raw[bytes_ // x.itemsize * x.itemsize :])
            found.append(raw.view(x.dtype).as_strided(x.shape, x.stride()))
        return BlockScaled(*found, out.block)

    monkeypatch.setattr(triton_requantize, "scaled_buffer", guarded)
    for shape in ((130, 5), (3, 130)):
        x = codes(shape)
        check(x, t_block=t_block)
    assert len(guards) == 4 and all(bool((guard == 0x5A).all()) for guard in guards)
