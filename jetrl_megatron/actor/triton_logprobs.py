"""The two passes over the logits of logprobs.py on a GPU: what the forward needs of a row, and the gradient of a row.

Enters: FP32 logits [n, V_r] of this rank's vocabulary rows, contiguous, as the GEMM left them. Leaves:

    row_sums:        max_v z, sum_v exp(z - max), sum_v (z - max) exp(z - max) and z[label] of rows that one rank holds whole
    logit_gradient:  (1[v = label] - exp((z - max) - log total)) * dlogp / temperature, rounded once to BF16

with z = logits / temperature, over the `valid` columns; padding has no part in a sum and gradient 0.
Invariants: no atomics and one order of summation, so a row's bits depend on that row alone and not on how many there are; NaN and Inf
stay visible. The sum of the exponentials is vLLM's (0.26, `compute_token_logprobs`): first the maximum, then blocks of as many columns,
each summed by as many threads and added to the one before it; and the division is the one that its sampler's kernel makes (Triton's `/`,
not rounded to nearest). So on one rank a log-prob is the engine's, bit for bit (tests/gpu/test_logprobs.py, and every token of
results/grpo-smollm2-1n1g-tp1pp1/ since).
Left out: the sums of rows that tensor-parallel ranks share (triton_vocab_blocks.py).

Legend: n rows, V_r columns of this rank.
"""

import torch
import triton
import triton.language as tl

from jetrl_megatron.fp8.triton_source import round_bf16

SUMS_BLOCK, SUMS_WARPS = 1024, 4
"""Columns at a time and warps; both fix the order of summation, and are vLLM's."""
GRADIENT_BLOCK = 4096
"""Columns of one program."""


def row_sums(logits: torch.Tensor, labels: torch.Tensor, valid: int, temperature: float) -> torch.Tensor:
    """Return (max, total, dot, picked) of each row, [n, 4] float32.

    logits: [n, V] float32, contiguous. labels: [n] int64, vocabulary ids. valid: columns that are tokens.
    A row without a finite or infinite logit has max -inf and total 0.
    """
    check_logits(logits, labels, valid)
    out = torch.empty(logits.shape[0], 4, dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        _sums_kernel[(logits.shape[0],)](
            logits, labels, out, logits.shape[1], valid, temperature,
            TEMPERED=temperature != 1.0, BLOCK=SUMS_BLOCK, num_warps=SUMS_WARPS,
        )  # fmt: skip
    return out


def logit_gradient(
    logits: torch.Tensor, labels: torch.Tensor, norm: torch.Tensor, dlogp: torch.Tensor, span: tuple[int, int], temperature: float
) -> torch.Tensor:
    """Return the gradient of the undivided logits, [n, V_r] bfloat16.

    logits: [n, V_r]; labels, temperature: as in `row_sums`. span: (id of column 0, columns that are tokens). norm: [n, 2] float32, the
    maximum over all ranks and the logarithm of the total. dlogp: [n] float32, the gradient of the label's log-prob.
    """
    start, valid = span
    check_logits(logits, labels, valid)
    rows, width = logits.shape
    assert norm.shape == (rows, 2) and norm.is_contiguous() and dlogp.shape == (rows,) and dlogp.is_contiguous(), (norm.shape, dlogp.shape)
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=logits.device)
    blocks = triton.cdiv(width, GRADIENT_BLOCK)
    if out.numel():
        _gradient_kernel[(rows * blocks,)](
            logits, labels, norm, dlogp, out, width, start, valid, temperature, blocks,
            TEMPERED=temperature != 1.0, SOFT=bool(triton.knobs.runtime.interpret), BLOCK=GRADIENT_BLOCK, num_warps=8,
        )  # fmt: skip
    return out


def check_logits(logits: torch.Tensor, labels: torch.Tensor, valid: int) -> None:
    """Assert what the kernels take for granted."""
    assert logits.dtype is torch.float32 and logits.is_contiguous(), (logits.dtype, logits.stride())
    assert labels.dtype is torch.int64 and labels.is_contiguous() and labels.shape == logits.shape[:1], (labels.dtype, labels.shape)
    assert 0 <= valid <= logits.shape[1], (valid, logits.shape)


@triton.jit
def divided(logit, temperature, TEMPERED: tl.constexpr):
    """The logit over the temperature, as vLLM's sampler divides."""
    return logit / temperature if TEMPERED else logit


@triton.jit
def row_peak(row_ptr, valid, temperature, TEMPERED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of a row's `valid` columns."""
    peak = float("-inf")
    for first in range(0, valid, BLOCK):
        c = first + tl.arange(0, BLOCK)
        z = divided(tl.load(row_ptr + c, mask=c < valid, other=float("-inf")), temperature, TEMPERED)
        peak = tl.max(tl.maximum(z, peak))
    return peak


@triton.jit
def block_sums(row_ptr, c, valid, peak, temperature, TEMPERED: tl.constexpr):
    """(sum of the exponentials, sum of exponential times exponent) of a block of columns `c`."""
    z = divided(tl.load(row_ptr + c, mask=c < valid, other=0.0), temperature, TEMPERED)
    # -inf less -inf is NaN, but a logit of -inf has no probability whatever the maximum; inf less inf has to stay NaN.
    gap = tl.where(z == float("-inf"), float("-inf"), z - peak)
    weight = tl.where(c < valid, tl.exp(gap), 0.0)
    return tl.sum(weight), tl.sum(tl.where(weight == 0.0, 0.0, gap * weight))  # an infinite gap adds nothing


@triton.jit
def _sums_kernel(logits_ptr, labels_ptr, out_ptr, width, valid, temperature, TEMPERED: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * width
    peak = row_peak(row_ptr, valid, temperature, TEMPERED, BLOCK)
    total = 0.0
    dot = 0.0
    for first in range(0, valid, BLOCK):
        block_total, block_dot = block_sums(row_ptr, first + tl.arange(0, BLOCK), valid, peak, temperature, TEMPERED)
        total += block_total
        dot += block_dot
    label = tl.load(labels_ptr + row)
    picked = tl.load(row_ptr + label, mask=(label >= 0) & (label < valid), other=0.0)
    tl.store(out_ptr + row * 4, peak)
    tl.store(out_ptr + row * 4 + 1, total)
    tl.store(out_ptr + row * 4 + 2, dot)
    tl.store(out_ptr + row * 4 + 3, divided(picked, temperature, TEMPERED))


@triton.jit
def _gradient_kernel(
    logits_ptr, labels_ptr, norm_ptr, dlogp_ptr, out_ptr, width, start, valid, temperature, blocks,
    TEMPERED: tl.constexpr, SOFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of columns of one row."""
    place = tl.program_id(0).to(tl.int64)
    row = place // blocks
    c = (place % blocks) * BLOCK + tl.arange(0, BLOCK)
    at = row * width + c
    z = divided(tl.load(logits_ptr + at, mask=c < valid, other=0.0), temperature, TEMPERED)
    prob = tl.exp((z - tl.load(norm_ptr + row * 2)) - tl.load(norm_ptr + row * 2 + 1))
    is_label = c == tl.load(labels_ptr + row) - start
    scale = divided(tl.load(dlogp_ptr + row), temperature, TEMPERED)
    # A select and not a product: padding columns may hold NaN.
    gradient = tl.where(c < valid, (tl.where(is_label, 1.0, 0.0) - prob) * scale, 0.0)
    tl.store(out_ptr + at, round_bf16(gradient, SOFT).to(tl.bfloat16), mask=c < width)
