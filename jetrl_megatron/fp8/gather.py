"""A quantised matrix of which every tensor-parallel rank holds a part: made whole as FP8 codes and scales, never as BF16.

Enters: this rank's part of a linear's X, quantised. Leaves: the operand of a GEMM, [T, K] for fprop or the transposed copy [K, T128] for
wgrad, with the bytes that quantising the whole BF16 X would give.
Where it is exact: a scale belongs to one rank where the part is a whole number of groups along the axis that is put together, which is
`exact_in_fp8`. Elsewhere, and where the backward reads X in BF16, the caller gathers BF16: the same numbers, more bytes.
When: fprop's operand in the forward, and again in a backward that makes Y again; wgrad's in the backward, beside dgrad (exchange.py), so
that a rank keeps its own part of what the forward saves, 1/TP of it.

What it costs, in units of T * K bytes, scales (1/32) left out: what is gathered, and the passes over a rank's memory (the gather's writes
and the quantiser's reads and writes among them). BF16: the whole X is gathered in BF16 and every rank quantises all of it.

| X is cut along | gathered: BF16 | gathered: FP8 | memory: BF16 | memory: FP8 |
|---|---|---|---|---|
| K, no gradients | 2 | 1 | 9 | 3 + 3/TP |
| K, with gradients | 2 | 1 + 1 | 10 | 4 + 4/TP |
| T, no gradients | 2 | 1 | 5 | 1 + 3/TP |
| T, with gradients | 2 | 1 + 1 | 6 | 4 + 4/TP |
| either, recompute=full; fc1 in recompute=fc1 | 2 + 2 | 1 + 1 + 1 | | |

Where X comes quantised (quantized_input.py), as behind a norm or SwiGLU, the quantiser's read is spared, 2/TP of the FP8 columns, and so is
the write of X in front of it, which no column counts.

So FP8 is gathered in training too, along either axis: as many bytes (fewer with recompute), no more passes, and 1/TP of the memory between
forward and backward, for one launch more.
Layout: a gather leaves the parts one behind the other. Codes cut along their rows are whole then; codes cut along their columns take one
copy. Scales of 1x128 groups leave column-major with a leading stride rounded up to 4, zero-filled, as DeepGEMM reads them, on the CPU too;
scales of 128x128 blocks row-major.
Invariants: codes and scales of one gather are one launch; both travel as 32-bit words, since not every backend has float8 and a GPU copies
single bytes slowly; on CUDA nothing waits on the host; a started gather holds its tensors until it is waited for.
Left out: which linears have a cut X (actor/linears.py), when gathers start and end, and the gradient's way back (exchange.py).

Legend: R rows, C columns of codes; T tokens, K input features of the whole X.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.distributed_c10d import AllgatherOptions

from jetrl_megatron.config import LinearPrecision, SavedActivation
from jetrl_megatron.fp8.block_scaled import BlockScaled, leading_rows
from jetrl_megatron.fp8.precision import GemmPrecision
from jetrl_megatron.fp8.quantize import GROUP, ROW_BLOCK
from jetrl_megatron.fp8.words import side_by_side

WORD = torch.int32
"""What four codes, or a scale, travel as. No float: to torch's NaN check of collectives (TORCH_NCCL_NAN_CHECK) some codes look like NaN."""


def exact_in_fp8(part: Sequence[int], axis: int, precision: GemmPrecision, *, for_wgrad: bool) -> bool:
    """Whether parts that are quantised and then gathered have the bytes of the gathered X, and nothing needs X in BF16.

    part: shape of a rank's X, [T/TP, K] or [T, K/TP]. axis: along which X is cut, 0 tokens or 1 features. precision: the side's switches.
    for_wgrad: whether the weight's gradient will be asked for, which reads groups along T.
    False for a BF16 linear; for `wgrad` and `saved_activation` both bf16; for K/TP, or with gradients T/TP, not a multiple of 128.
    """
    if precision.linear is LinearPrecision.bf16:
        return False
    if for_wgrad and precision.wgrad is LinearPrecision.bf16 and precision.saved_activation is SavedActivation.bf16:
        return False
    return part[axis] % GROUP == 0 or (axis == 0 and not for_wgrad)


def gather_blocks(x: BlockScaled, axis: int, group: Any) -> BlockScaled:
    """Every rank's matrix put together along `axis`, in rank order.

    x: [R, C] in blocks 1x128 or 128x128, the same shape on every rank, a whole number of blocks along `axis`. axis: 0 or 1.
    Returns [size * R, C] or [R, size * C].
    """
    return _start(x, axis, group, async_ops=False)()


def start_gather_blocks(x: BlockScaled, axis: int, group: Any) -> Callable[[], BlockScaled]:
    """`gather_blocks`, started: what runs before the call of what returns runs beside it."""
    return _start(x, axis, group, async_ops=True)


def _start(x: BlockScaled, axis: int, group: Any, *, async_ops: bool) -> Callable[[], BlockScaled]:
    """Send this rank's codes and scales in one launch; what returns waits for the others' and puts all of them together."""
    assert x.shape[axis] % x.block[axis] == 0, f"{x.shape} in blocks {x.block} ends inside a block along axis {axis}"
    assert x.shape[1] % 4 == 0, f"rows of {x.shape[1]} codes are no whole number of words"
    by_column, size = x.block == ROW_BLOCK, group.size()
    parts = [_words(x.data), (x.scale.t() if by_column else x.scale).contiguous().view(WORD)]
    wholes = [part.new_empty((size * part.shape[0], part.shape[1])) for part in parts]
    options = AllgatherOptions()
    options.asyncOp = async_ops
    work = group.allgather_into_tensor_coalesced(wholes, parts, options)

    def wait() -> BlockScaled:
        if work is not None:  # NCCL gives none where nothing is to be waited for
            work.wait()
        parts.clear()  # held until here: the collective reads them
        codes, scales = wholes
        scales = scales.view(torch.float32)
        # The parts lie one behind the other: along axis 0 that is the whole, and for scales stored by column along axis 1.
        data = (codes if axis == 0 else side_by_side(codes, size)).view(x.data.dtype)
        scale = scales if axis == int(by_column) else side_by_side(scales, size)
        if by_column:
            rows = scale.shape[1]
            scale = F.pad(scale, (0, leading_rows(rows) - rows)).t()[:rows] if rows % 4 else scale.t()
        return BlockScaled(data, scale, x.block)

    return wait


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Codes [R, C] as words [R, C / 4]; by way of a vector where one row or none, contiguous with any strides, has others than a matrix."""
    rows, cols = codes.shape
    codes = codes.contiguous()
    return codes.view(WORD) if codes.stride(0) == cols else codes.view(-1).view(WORD).view(rows, cols // 4)
