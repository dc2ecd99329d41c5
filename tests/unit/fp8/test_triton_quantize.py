"""The Triton quantisers against the reference, byte for byte; on a CPU in Triton's interpreter."""

import pytest
import torch

triton = pytest.importorskip("triton")

from jetrl_megatron.config import ScaleFormat  # noqa: E402
from jetrl_megatron.fp8 import (  # noqa: E402
    BlockScaled,
    triton_accumulate,
    triton_fused,
    triton_norm,
    triton_quantize,
    triton_requantize,
    triton_swiglu,
)
from jetrl_megatron.fp8.quantize import quantize, quantize_dual, quantize_weight  # noqa: E402
from jetrl_megatron.fp8.triton_cast import MAX_COLS, MAX_ROWS, MAX_STRIDE, contiguous_rows  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [(torch.float8_e4m3fn, ScaleFormat.fp32), (torch.float8_e4m3fn, ScaleFormat.ue8m0), (torch.float8_e5m2, ScaleFormat.fp32)]
SHAPES = [(128, 128), (1, 128), (130, 200)]


def on_cpu(q: BlockScaled) -> BlockScaled:
    return BlockScaled(q.data.cpu(), q.scale.cpu(), q.block)


def matrix(shape: tuple[int, int], kind: str = "normal") -> torch.Tensor:
    g = torch.Generator().manual_seed(shape[0] * 7 + shape[1])
    x = torch.randn(shape, generator=g)
    if kind == "wide":
        x = x * torch.exp(6 * torch.randn(shape, generator=g))
    x[0] = 0
    x[0, ::2] = -0.0
    if kind == "nonfinite":
        x[-1, -1], x[0, 0], x[-1, 1] = float("nan"), float("inf"), -float("inf")
    return x.bfloat16()


@pytest.mark.parametrize("kind", ["wide", "nonfinite"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_quantiser_writes_the_bytes_of_the_reference(shape, kind):
    x = matrix(shape, kind)
    for dtype, scale_format in FORMATS:
        f = {"dtype": dtype, "scale_format": scale_format}
        for block in ((1, 128), (128, 128)):
            assert on_cpu(triton_quantize.quantize(x.to(DEVICE), block, **f)).same_bytes(quantize(x, block, **f)), (block, f)
        row_wise, transposed = map(on_cpu, triton_quantize.quantize_dual(x.to(DEVICE), **f))
        expected = quantize_dual(x, **f)
        assert row_wise.same_bytes(expected[0]) and transposed.same_bytes(expected[1]), f
        blocked = on_cpu(triton_quantize.quantize_dual(x.to(DEVICE), t_block=(128, 128), **f)[1])
        padded = torch.zeros((shape[0] + 127) // 128 * 128, shape[1], dtype=x.dtype)
        padded[: shape[0]] = x
        assert blocked.same_bytes(quantize(padded.t(), (128, 128), **f)), f


def test_fp32_input_and_strided_input():
    x = matrix((130, 256)).float() * 1.1
    for source in (x[:, 3:250], x[:, :128].bfloat16().t()):
        assert on_cpu(triton_quantize.quantize(source.to(DEVICE), (1, 128))).same_bytes(quantize(source, (1, 128)))
        assert on_cpu(triton_quantize.quantize_dual(source.to(DEVICE))[1]).same_bytes(quantize_dual(source)[1])


def test_rows_too_far_apart_for_32_bits_are_copied_and_too_many_refused():
    far = torch.as_strided(torch.zeros(MAX_STRIDE + 8, dtype=torch.bfloat16), (2, 8), (MAX_STRIDE, 1))
    for columns in (8, 2, 1):
        assert contiguous_rows(far[:, :columns]).stride() == (columns, 1)
    near = torch.as_strided(far, (2, 8), (MAX_STRIDE - 1, 1))
    assert contiguous_rows(near).stride() == (MAX_STRIDE - 1, 1)
    one = torch.zeros(1, 1, dtype=torch.bfloat16)
    for shape in ((1, MAX_COLS), (MAX_ROWS, 1)):
        with pytest.raises(ValueError, match=rf"x has shape \({shape[0]}, {shape[1]}\); a kernel takes .* quantise parts of it"):
            contiguous_rows(one.expand(shape))


@pytest.mark.parametrize("shape", [(300, 256), (130, 200)])
def test_tiles_have_the_same_bytes_in_either_order(shape, monkeypatch):
    """One order is taken for matrices with more rows of tiles than a grid's second axis holds."""
    x = matrix(shape).to(DEVICE)
    across = triton_quantize.quantize_dual(x)
    monkeypatch.setattr(triton_quantize, "MAX_GRID_Y", 0)
    for got, want in zip(triton_quantize.quantize_dual(x), across, strict=True):
        assert got.same_bytes(want)


def test_a_transpose_in_other_blocks_is_refused():
    x = matrix((128, 256)).to(DEVICE)
    row_wise = triton_quantize.quantize(x, (1, 128))
    calls = [
        lambda block: triton_quantize.quantize_dual(x, t_block=block),
        lambda block: triton_fused.swiglu_quantize(x, t_block=block),
        lambda block: triton_fused.rms_norm_quantize(x, x[0], 1e-6, t_block=block),
        lambda block: triton_requantize.requantize_transposed(row_wise, t_block=block),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"t_block is \(128, 1\); the GPU quantiser writes a transpose in \(1, 128\) and \(128, 128\)"):
            call((128, 1))


@pytest.mark.parametrize("shape", [(128, 256), (130, 128)])
@pytest.mark.parametrize("scale_format", list(ScaleFormat))
def test_weight_and_its_byte_transpose_in_one_read(shape, scale_format):
    w = torch.cat([matrix(shape), 50 * matrix(shape)], dim=1)
    expected = quantize_weight(w, scale_format=scale_format)
    got = triton_quantize.quantize_weight(w.to(DEVICE), scale_format=scale_format)
    assert on_cpu(got[0]).same_bytes(expected[0]) and on_cpu(got[1]).same_bytes(expected[1])
    assert triton_quantize.quantize_weight(w.to(DEVICE), with_transpose=False)[1] is None


@pytest.mark.parametrize("shape", [(128, 256), (130, 128)])
@pytest.mark.parametrize("with_transpose", [True, False])
@pytest.mark.parametrize("quantise", [quantize_weight, triton_quantize.quantize_weight], ids=["reference", "triton"])
def test_a_weight_is_quantised_into_the_buffers_of_before_and_torch_counts_the_change(shape, with_transpose, quantise):
    w = matrix(shape).to(DEVICE)
    old = quantise(w, with_transpose=with_transpose)
    tensors = [t for x in old if x is not None for t in (x.data, x.scale)]
    versions = [t._version for t in tensors]
    got = quantise(-3 * w, with_transpose=with_transpose, out=old)
    assert got[0] is old[0] and got[1] is old[1]
    assert all(t._version > version for t, version in zip(tensors, versions, strict=True))
    for x, expected in zip(got, quantize_weight(-3 * w.cpu(), with_transpose=with_transpose), strict=True):
        assert x is expected if expected is None else on_cpu(x).same_bytes(expected)
    with pytest.raises(AssertionError):
        quantise(w[:-1], with_transpose=with_transpose, out=old)


@pytest.mark.parametrize("shape", [(130, 128), (1, 1)])
def test_byte_transpose(shape):
    q = quantize(matrix(shape), (128, 128))
    moved = triton_quantize.transpose(BlockScaled(q.data.to(DEVICE), q.scale.to(DEVICE), q.block))
    assert on_cpu(moved).same_bytes(q.transpose())


def test_scales_are_column_major_with_a_leading_stride_of_a_multiple_of_4_and_zero_rounding():
    for rows in (1, 3, 5, 65, 129):
        scale = triton_quantize.quantize(matrix((rows, 256)).to(DEVICE), (1, 128)).scale
        leading = (rows + 3) // 4 * 4
        assert scale.stride() == (1, leading)
        whole = torch.as_strided(scale, (leading, 2), (1, leading))
        assert torch.equal(whole[rows:].cpu(), torch.zeros(leading - rows, 2))


@pytest.fixture
def no_launch(monkeypatch):
    """A launch fails the test: a GPU refuses an empty grid, Triton's interpreter takes it silently."""

    class Refusing:
        def __getitem__(self, grid):
            raise AssertionError(f"a kernel was launched on the grid {grid}")

    for name in ("row_kernel", "tile_kernel", "transpose_kernel"):
        monkeypatch.setattr(triton_quantize, name, Refusing())
    monkeypatch.setattr(triton_requantize, "requantize_kernel", Refusing())
    monkeypatch.setattr(triton_norm, "norm_kernel", Refusing())
    monkeypatch.setattr(triton_accumulate, "_accumulate_kernel", Refusing())
    for name in ("swiglu_kernel", "swiglu_backward_kernel"):
        monkeypatch.setattr(triton_swiglu, name, Refusing())


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("shape", [(0, 256), (5, 0)])
def test_empty_input_launches_nothing(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    padded = (shape[1], (shape[0] + 127) // 128 * 128)
    for t_block in ((1, 128), (128, 128)):
        row_wise, transposed = triton_quantize.quantize_dual(x, t_block=t_block)
        assert row_wise.shape == shape and transposed.shape == padded
        assert triton_requantize.requantize_transposed(row_wise, t_block=t_block).shape == padded
    for block in ((1, 128), (128, 128)):
        assert triton_quantize.quantize(x, block).shape == shape
    weight, weight_t = triton_quantize.quantize_weight(x)
    assert weight.shape == shape and weight_t.shape == shape[::-1]
    row_wise, transposed, rstd = triton_fused.rms_norm_quantize(x, x.new_ones(shape[1]), 1e-6)
    assert row_wise.shape == shape and transposed.shape == padded and rstd.shape == (shape[0], 1)
    row_wise, transposed = triton_fused.swiglu_quantize(torch.cat((x, x), 1))
    assert row_wise.shape == shape and transposed.shape == padded
    assert triton_swiglu.swiglu(torch.cat((x, x), 1)).shape == shape
    assert triton_swiglu.swiglu_backward(x, torch.cat((x, x), 1)).shape == (shape[0], 2 * shape[1])
    row_wise, transposed = triton_swiglu.swiglu_backward_dual(x, torch.cat((x, x), 1))
    assert row_wise.shape == (shape[0], 2 * shape[1]) and transposed.shape == (2 * shape[1], padded[1])
    sums = x.float()
    assert triton_accumulate.accumulate(sums, x) is sums
    with pytest.raises(AssertionError, match="was launched"):
        triton_quantize.quantize(matrix((1, 128)).to(DEVICE), (1, 128))


def test_another_block_is_refused():
    with pytest.raises(ValueError, match="128, 1"):
        triton_quantize.quantize(matrix((128, 128)).to(DEVICE), (128, 1))
