"""Copies of narrow elements as 64-bit words: torch's copy and cat kernels take one element a thread, which is slow for a byte or two.

Enters: tensors of BF16, FP8 or other elements below 8 bytes, any strides. Leaves: views of them as words, where every row is whole words in
memory. The bytes are the same either way.
"""

from torch import Tensor, cat, int64


def in_words(x: Tensor, parts: int = 1) -> Tensor:
    """x as int64, a view, where each of `parts` equal parts of its last axis is whole 8-byte words in memory; else x itself."""
    each = 8 // x.element_size()
    *strides, last = x.stride()
    whole = last == 1 and x.shape[-1] % (each * parts) == 0 and x.storage_offset() % each == 0
    return x.view(int64) if whole and each > 1 and all(stride % each == 0 for stride in strides) else x


def copy_in_words(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)` of one shape and dtype, by words where both lie so."""
    assert target.dtype is source.dtype and target.shape == source.shape, (target.dtype, target.shape, source.dtype, source.shape)
    if target.is_contiguous() and source.is_contiguous():  # bytes in a row, whatever they mean
        target.copy_(source)
        return
    into, words = in_words(target), in_words(source)
    if into.dtype is words.dtype:
        into.copy_(words)
    else:
        target.copy_(source)


def side_by_side(parts: Tensor, size: int) -> Tensor:
    """`size` matrices one behind the other, [size * R, C], put side by side: [R, size * C], a copy."""
    return cat(in_words(parts).chunk(size), dim=1).view(parts.dtype)


def columns_apart(x: Tensor, size: int) -> Tensor:
    """The way back: [R, size * C] -> [size * R, C]."""
    return cat(in_words(x, size).chunk(size, dim=1)).view(x.dtype)
