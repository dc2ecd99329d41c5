"""The kernel that quantises FP8 anew, on a Hopper GPU: its division, for every mantissa of a scale where a code changes; bytes at size."""

import pytest
import torch

from tests.gpu.hopper import NEEDS_HOPPER

pytestmark = NEEDS_HOPPER

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from jetrl_megatron.config import ScaleFormat  # noqa: E402
from jetrl_megatron.fp8 import triton_requantize  # noqa: E402
from jetrl_megatron.fp8.block_scaled import BlockScaled  # noqa: E402
from jetrl_megatron.fp8.quantize import requantize_transposed  # noqa: E402
from jetrl_megatron.fp8.triton_cast import cast_format, divided, pack_words, reciprocal  # noqa: E402

BLOCK, MANTISSAS = 1024, 1 << 23
NEIGHBOURS = 3
"""FP32 numbers on each side of scale * boundary that are divided."""


@triton.jit
def divide_kernel(x_ptr, scale_ptr, codes_ptr, SHORT: tl.constexpr, F: tl.constexpr):
    """Codes of x / scale, 1024 a program, in the lowest byte of a word; SHORT: without the correction."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x, scale = tl.load(x_ptr + at), tl.load(scale_ptr + at)
    inverse = reciprocal(scale, F)
    q = x * inverse if SHORT else divided(x, scale, inverse, F)
    tl.store(codes_ptr + at, pack_words(q, q, q, q, F) & 0xFF)


def boundaries() -> list[float]:
    """Halfway between neighbouring codes of E4M3, one binade of normal codes, the subnormal ones, and where the limit begins."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (codes[1:] + codes[:-1]) / 2
    return [v for v in halves.tolist() if v < 2**-6 or 1 <= v <= 2] + [448.0, 464.0]


def differing(exponent: int, *, short: bool = False) -> int:
    """Codes that differ from those of torch's division, over every mantissa of the scale under one exponent, as FP32 stores it."""
    scale = (torch.arange(MANTISSAS, dtype=torch.int32, device="cuda") | (exponent << 23)).view(torch.float32)
    codes = torch.empty(MANTISSAS, dtype=torch.int32, device="cuda")
    form = cast_format(True, torch.float8_e4m3fn, ScaleFormat.fp32)
    total = 0
    for boundary in boundaries():
        for step in range(-NEIGHBOURS, NEIGHBOURS + 1):
            x = ((scale * boundary).view(torch.int32) + step).view(torch.float32)
            divide_kernel[(MANTISSAS // BLOCK,)](x, scale, codes, SHORT=short, F=form)
            expected = (x / scale).clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)
            total += int((codes != expected).sum())
    return total


@pytest.mark.parametrize("exponent", [127 - 42, 127, 127 + 110], ids=["floor", "one", "huge"])
def test_codes_are_those_of_a_true_division_for_every_mantissa(exponent):
    assert differing(exponent) == 0


def test_without_the_correction_codes_differ():
    """In 3.7 divisions a mantissa, of 126, by FP32 arithmetic on a CPU: the test above sees a correction that is not there."""
    assert differing(127, short=True) > MANTISSAS


def test_bytes_at_size():
    g = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(0, 127, (8192, 4096), generator=g, device="cuda", dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, generator=g, device="cuda", dtype=torch.uint8) << 7
    scale = torch.exp(4 * torch.randn((32, 8192), generator=g, device="cuda")).t()
    x = BlockScaled(codes.view(torch.float8_e4m3fn), scale, (1, 128))
    for t_block in ((1, 128), (128, 128)):
        assert triton_requantize.requantize_transposed(x, t_block=t_block).same_bytes(requantize_transposed(x, t_block=t_block))


def test_offsets_above_31_bits():
    rows, cols = 74_900, 28_800
    codes = torch.zeros(rows, cols, dtype=torch.uint8, device="cuda")
    codes[74_752:] = torch.randint(0, 127, (148, cols), device="cuda", dtype=torch.uint8)
    x = BlockScaled(codes.view(torch.float8_e4m3fn), torch.ones(225, rows, device="cuda").t(), (1, 128))
    got = triton_requantize.requantize_transposed(x)
    last = requantize_transposed(BlockScaled(x.data[74_752:], x.scale[74_752:], x.block))
    assert torch.equal(got.data[:, 74_752:].view(torch.uint8), last.data.view(torch.uint8))
    assert torch.equal(got.scale[:, 584:], last.scale) and not got.data[:, :74_752].view(torch.uint8).any()
