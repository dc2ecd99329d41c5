"""`BlockScaled`: FP8 codes and their FP32 scales as one value, so that the two can never be taken apart or misread.

Enters: codes and scales from a quantiser or a checkpoint. Leaves: the operand of every FP8 GEMM and the unit of weight sync.
Equation: value[r, c] = code[r, c] * scale[r // br, c // bc] with block = (br, bc).
Invariant: scale is 2-D FP32 of shape [ceil(R / br), ceil(C / bc)]; the orientation of a block is declared by `block`, never guessed
from shapes that happen to fit. Strides are free: a scale may be stored column-major for the GEMM that reads it.
Left out: how codes are made (quantize.py), and how scales are laid out for a kernel (deepgemm.py).

Legend: R rows, C columns of the codes; br, bc rows and columns of one block.
"""

from dataclasses import dataclass

import torch

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest finite value of each supported FP8 dtype."""


def num_blocks(size: int, block: int) -> int:
    """Blocks of length `block` that cover `size` elements, the last one possibly partial."""
    return -(-size // block)


def leading_rows(rows: int) -> int:
    """Rows between two columns of scales of 1x128 groups in DeepGEMM's layout: rounded up to 4, 16 bytes, the rounding zero-filled."""
    return (rows + 3) // 4 * 4


def power_of_two(size: int) -> int:
    """The smallest power of two that holds `size`, 1 or more; Triton's own function of that kind takes as long as a small kernel."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, eq=False)
class BlockScaled:
    """A matrix in block-scaled FP8; see the module for the equation and the invariant."""

    data: torch.Tensor
    """[R, C] float8_e4m3fn or float8_e5m2."""
    scale: torch.Tensor
    """[ceil(R / br), ceil(C / bc)] float32, on the device of `data`."""
    block: tuple[int, int]
    """(br, bc): rows and columns that share one scale."""

    def __post_init__(self) -> None:
        """Check dtypes, ranks, the grid and the device; raises ValueError that names what is off."""
        if self.data.dtype not in FP8_MAX:
            raise ValueError(f"codes are {self.data.dtype}; they must be float8_e4m3fn or float8_e5m2")
        if self.scale.dtype is not torch.float32:
            raise ValueError(f"scales are {self.scale.dtype}; they must be float32: convert BF16 or e8m0 scales with .float() on reading")
        if self.data.dim() != 2 or self.scale.dim() != 2:
            raise ValueError(f"codes have shape {tuple(self.data.shape)}, scales {tuple(self.scale.shape)}; both must be 2-D")
        if len(self.block) != 2 or min(self.block) < 1:
            raise ValueError(f"block is {self.block}; it must be two positive lengths, (rows, columns)")
        grid = self.grid
        if tuple(self.scale.shape) != grid:
            raise ValueError(
                f"codes {tuple(self.data.shape)} in blocks {self.block} need a scale grid {grid}, got {tuple(self.scale.shape)}"
                + ("; that is the grid of the transposed matrix" if tuple(self.scale.shape) == grid[::-1] else "")
            )
        if self.scale.device != self.data.device:
            raise ValueError(f"codes are on {self.data.device}, scales on {self.scale.device}; move both together")

    @property
    def shape(self) -> tuple[int, int]:
        """(R, C) of the codes."""
        return self.data.shape[0], self.data.shape[1]

    @property
    def grid(self) -> tuple[int, int]:
        """(row blocks, column blocks)."""
        return num_blocks(self.data.shape[0], self.block[0]), num_blocks(self.data.shape[1], self.block[1])

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, padding of strides left out."""
        return self.data.numel() + 4 * self.scale.numel()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """code * scale in FP32, then rounded to `dtype`; [R, C]."""
        rows, cols = self.shape
        scale = self.scale.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :cols]
        return (self.data.to(torch.float32) * scale).to(dtype)

    def transpose(self) -> "BlockScaled":
        """The transposed matrix: bytes, scale grid and block transposed, nothing quantised again; contiguous codes [C, R]."""
        codes = self.data.view(torch.uint8).t().contiguous().view(self.data.dtype)
        return BlockScaled(codes, self.scale.t().contiguous(), (self.block[1], self.block[0]))

    def copy_(self, source: "BlockScaled") -> "BlockScaled":
        """Overwrite codes and scales in place with those of a matrix of the same shape, block and dtype; returns self."""
        same = self.shape == source.shape and self.block == source.block and self.data.dtype is source.data.dtype
        assert same, (self.shape, self.block, self.data.dtype, source.shape, source.block, source.data.dtype)
        self.data.view(torch.uint8).copy_(source.data.view(torch.uint8))
        self.scale.copy_(source.scale)
        return self

    def same_bytes(self, other: "BlockScaled") -> bool:
        """Whether dtype, block, shape, every code and every scale are bit-equal (NaN equals the same NaN); strides may differ."""
        if self.data.dtype is not other.data.dtype or self.block != other.block or self.shape != other.shape:
            return False
        same_codes = torch.equal(self.data.view(torch.uint8), other.data.view(torch.uint8))
        return same_codes and torch.equal(self.scale.view(torch.int32), other.scale.view(torch.int32))

    def rows(self, start: int, stop: int) -> "BlockScaled":
        """Rows [start, stop) as a view, cut at whole blocks.

        start, stop: rows; start must be a multiple of br, stop too unless it is R. Raises ValueError where a block would be cut.
        """
        br = self.block[0]
        total = self.shape[0]
        if not 0 <= start <= stop <= total:
            raise ValueError(f"rows [{start}, {stop}) are not inside [0, {total})")
        if start % br or (stop % br and stop != total):
            raise ValueError(f"rows [{start}, {stop}) cut a block of {br} rows; cut at multiples of {br}")
        return BlockScaled(self.data[start:stop], self.scale[start // br : num_blocks(stop, br)], self.block)
