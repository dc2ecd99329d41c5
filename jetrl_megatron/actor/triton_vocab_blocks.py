"""The sums of `triton_logprobs.row_sums` where tensor-parallel ranks hold a part of each row: one rank's bits at every TP degree.

Enters: FP32 logits [n, V_r] of this rank's vocabulary rows, chunk by chunk, on all ranks together. Leaves: (max, total, dot, picked) of the
whole rows, [N, 4], equal on all ranks.

One rank adds up blocks of SUMS_BLOCK columns, one behind the other. So here too: the rank that holds a block's first column sums the block,
relative to the maximum over all ranks, and every rank then adds the blocks of all of them in their order. Where a block ends beyond its
rank's columns, the leading columns of the ranks behind it are borrowed. Exchanged are a maximum a row, the borrowed logits (fewer than
SUMS_BLOCK a row, none where V_r is a multiple of it) and, once a call, two sums a block and row.

Legend: N rows, n of a chunk, V_r columns of this rank, R ranks.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from jetrl_megatron.actor.logprobs import VocabShard
from jetrl_megatron.actor.triton_logprobs import SUMS_BLOCK, SUMS_WARPS, block_sums, check_logits, divided, row_peak

_ROWS_A_PROGRAM = 128


def lent_columns(shard: VocabShard, width: int) -> int:
    """Return how many leading columns of a rank, which holds `width`, a rank before it may need."""
    return max((min(width, -rank * width % SUMS_BLOCK) for rank in range(1, shard.ranks)), default=0)


def chunk_columns(shard: VocabShard, width: int) -> int:
    """Return the logits that a row takes on a rank: its own `width`, and where ranks share rows what all of them lend."""
    return width + shard.ranks * lent_columns(shard, width)


class SharedRowSums:
    """Collects the sums of rows whose columns R > 1 ranks hold; every rank makes the same calls.

    Args:
        shard: which columns are this rank's.
        width: V_r, the same on all ranks.
        num_rows: N.
        temperature: that logits are divided by.
        device: where they are.
    """

    def __init__(self, shard: VocabShard, width: int, num_rows: int, temperature: float, device: torch.device) -> None:
        """Add nothing yet."""
        self._shard, self._width, self._temperature = shard, width, temperature
        self._rank = shard.start // width
        self._offset = -shard.start % SUMS_BLOCK
        self._begins = list(range(self._offset, shard.valid, SUMS_BLOCK))
        """Columns in which the blocks begin that this rank sums."""
        self._lent = lent_columns(shard, width)
        self._slots = -(-width // SUMS_BLOCK)
        self._peaks = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._parts = torch.zeros(2 * self._slots + 1, num_rows, dtype=torch.float32, device=device)
        """Total and dot of each block in turn, and the label's logit; a block that there is not adds 0."""

    def add(self, rows: slice, logits: Tensor, labels: Tensor) -> None:
        """Take the chunk `rows`: logits [n, V_r] float32, contiguous, and labels [n] int64."""
        check_logits(logits, labels, self._shard.valid)
        count, tempered = logits.shape[0], self._temperature != 1.0
        peaks = torch.empty(count, dtype=torch.float32, device=logits.device)
        constants = {"TEMPERED": tempered, "BLOCK": SUMS_BLOCK, "num_warps": SUMS_WARPS}
        _peaks_kernel[(count,)](logits, peaks, self._width, self._shard.valid, self._temperature, **constants)
        self._peaks[rows] = self._shard.reduce(peaks, dist.ReduceOp.MAX)
        last, last_valid = self._last_block(logits)
        own = len(self._begins) - (last_valid > 0)
        _blocks_kernel[(count,)](
            logits, last, labels, self._peaks[rows], self._parts[:, rows], self._parts.stride(0), self._width, self._offset,
            self._offset + own * SUMS_BLOCK, self._shard.start, self._shard.valid, last_valid, 2 * self._slots, self._temperature,
            BORROWS=last_valid > 0, **constants,
        )  # fmt: skip

    def _last_block(self, logits: Tensor) -> tuple[Tensor, int]:
        """Return the block of this rank that ends beyond its columns, [n, SUMS_BLOCK], and its columns that are tokens; 0 without one."""
        if self._lent == 0:
            return logits, 0
        lent = self._shard.gather(logits[:, : self._lent].contiguous())  # on all ranks, whoever needs them
        begin = self._begins[-1] if self._begins else self._width
        held = self._width - begin
        valid = min(SUMS_BLOCK, self._shard.vocab_size - self._shard.start - begin)
        if not 0 < held < valid:
            return logits, 0
        block = logits.new_empty(logits.shape[0], SUMS_BLOCK)
        block[:, :held] = logits[:, begin:]
        for part in lent[self._rank + 1 :]:
            taken = min(valid - held, self._width)
            block[:, held : held + taken] = part[:, :taken]
            held += taken
        return block, valid

    def result(self) -> Tensor:
        """Return (max, total, dot, picked) of all rows, [N, 4] float32."""
        parts = self._shard.gather(self._parts)
        num_rows = self._peaks.shape[0]
        out = torch.empty(num_rows, 4, dtype=torch.float32, device=parts.device)
        _add_up_kernel[(triton.cdiv(num_rows, _ROWS_A_PROGRAM),)](
            parts, self._peaks, out, num_rows, self._shard.ranks, self._slots, LANES=_ROWS_A_PROGRAM, num_warps=4
        )
        return out


@triton.jit
def _peaks_kernel(logits_ptr, peaks_ptr, width, valid, temperature, TEMPERED: tl.constexpr, BLOCK: tl.constexpr):
    """The maximum of one row's own columns."""
    row = tl.program_id(0).to(tl.int64)
    tl.store(peaks_ptr + row, row_peak(logits_ptr + row * width, valid, temperature, TEMPERED, BLOCK))


@triton.jit
def _blocks_kernel(
    logits_ptr, last_ptr, labels_ptr, peaks_ptr, parts_ptr, stride, width, begin, end, start, valid, last_valid, picked_slot, temperature,
    BORROWS: tl.constexpr, TEMPERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The blocks of one row that begin in this rank's columns, [begin, end), and the one that borrows."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr, parts_ptr = logits_ptr + row * width, parts_ptr + row
    stride = tl.zeros((), tl.int64) + stride  # of one row it is a constant 1
    peak = tl.load(peaks_ptr + row)
    for first in range(begin, end, BLOCK):
        total, dot = block_sums(row_ptr, first + tl.arange(0, BLOCK), valid, peak, temperature, TEMPERED)
        slot = 2 * ((first - begin) // BLOCK)
        tl.store(parts_ptr + slot * stride, total)
        tl.store(parts_ptr + (slot + 1) * stride, dot)
    if BORROWS:
        total, dot = block_sums(last_ptr + row * BLOCK, tl.arange(0, BLOCK), last_valid, peak, temperature, TEMPERED)
        slot = 2 * ((end - begin) // BLOCK)
        tl.store(parts_ptr + slot * stride, total)
        tl.store(parts_ptr + (slot + 1) * stride, dot)
    local = tl.load(labels_ptr + row) - start
    picked = tl.load(row_ptr + local, mask=(local >= 0) & (local < valid), other=0.0)
    tl.store(parts_ptr + picked_slot * stride, divided(picked, temperature, TEMPERED))


@triton.jit
def _add_up_kernel(parts_ptr, peaks_ptr, out_ptr, num_rows, ranks, slots, LANES: tl.constexpr):
    """Add the blocks of LANES rows, in their order in the vocabulary."""
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    mask = row < num_rows
    total = tl.zeros((LANES,), tl.float32)
    dot = tl.zeros((LANES,), tl.float32)
    picked = tl.zeros((LANES,), tl.float32)
    line_ptr, step = parts_ptr + row, tl.zeros((), tl.int64) + num_rows
    for _ in range(ranks):
        for _ in range(slots):
            total += tl.load(line_ptr, mask=mask, other=0.0)
            dot += tl.load(line_ptr + step, mask=mask, other=0.0)
            line_ptr += 2 * step
        picked += tl.load(line_ptr, mask=mask, other=0.0)
        line_ptr += step
    tl.store(out_ptr + row * 4, tl.load(peaks_ptr + row, mask=mask, other=0.0), mask=mask)
    tl.store(out_ptr + row * 4 + 1, total, mask=mask)
    tl.store(out_ptr + row * 4 + 2, dot, mask=mask)
    tl.store(out_ptr + row * 4 + 3, picked, mask=mask)
