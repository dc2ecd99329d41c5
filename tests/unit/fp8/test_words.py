"""Copies by words have the bytes of copies by elements, whatever the strides."""

import pytest
import torch

from jetrl_megatron.fp8.words import columns_apart, copy_in_words, in_words, side_by_side


def matrix(rows, cols, dtype=torch.bfloat16):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 4), (torch.float8_e4m3fn, 8), (torch.float32, 2)])
def test_rows_of_whole_words_are_words(dtype, each):
    x = matrix(4, 32, dtype)
    assert in_words(x).dtype is torch.int64 and in_words(x).shape == (4, 32 // each) and in_words(x).data_ptr() == x.data_ptr()
    assert in_words(x, 32 // each).dtype is torch.int64 and in_words(x, 64 // each) is x, "a part of half a word"
    for other in (x[:, : each + 1], x.t(), matrix(4, 33, dtype)[:, :32], matrix(4, 40, dtype)[:, 1:33]):
        assert in_words(other) is other
    wide = x.to(torch.float64)
    assert in_words(wide) is wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize(("rows", "cols", "at"), [(4, 32, 0), (4, 32, 8), (4, 32, 1), (4, 7, 0), (1, 32, 8), (0, 32, 0)])
def test_a_copy_writes_its_target_and_nothing_else(dtype, rows, cols, at):
    source, held = matrix(rows, cols + 40, dtype)[:, at : at + cols], torch.full((rows, 2 * cols + 40), 9.0).to(dtype)
    copy_in_words(held[:, 8 : 8 + cols], source)
    expected = torch.full((rows, 2 * cols + 40), 9.0).to(dtype)
    expected[:, 8 : 8 + cols] = source
    assert torch.equal(held.float(), expected.float())


def test_another_dtype_or_shape_is_no_copy():
    for source in (matrix(4, 8, torch.float32), matrix(4, 16)):
        with pytest.raises(AssertionError):
            copy_in_words(matrix(4, 8), source)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("rows", "cols"), [(6, 16), (1, 16), (0, 16), (6, 5), (6, 6)])
def test_columns_are_cut_and_put_together_whatever_their_width(rows, cols, size):
    parts = [matrix(rows, cols) + i for i in range(size)]
    whole = torch.cat(parts, dim=1)
    assert torch.equal(columns_apart(whole, size), torch.cat(parts))
    assert torch.equal(side_by_side(torch.cat(parts), size), whole)
