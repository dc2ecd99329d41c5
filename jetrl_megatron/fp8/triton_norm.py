"""RMSNorm in one pass on a GPU, the kernel of both engines: y = bf16(x * rstd * w), rstd = 1 / sqrt(mean(x^2) + eps), FP32 inside.

Enters: BF16 rows of width D, in any strided arrangement [..., D] with neighbouring columns. Leaves: y, contiguous, and rstd.
Invariant: a row's bits depend on that row, the weight, eps and D alone. The order of a row's sum is the tile's, and the tile is chosen by
D; so neither the number of rows, nor how many heads lie in a token, nor their strides can change it. That is why no argument but D is
compiled in. vLLM's own kernel takes another order for batches of 256 tokens or more; one element that rounds the other way is enough to
move FP8 codes in every layer behind it.
The operator is `torch.ops.jetrl.rms_norm`, registered when this file is imported, so that a compiled graph can hold it.
"""

import torch
import triton
import triton.language as tl

from jetrl_megatron.fp8.triton_source import round_bf16

ALIGNED = 8
"""Elements of BF16 in 16 bytes: row addresses are multiples of it, or the rows are copied."""
TILE_ELEMENTS = 1024
"""Elements of one program, or one row where that is longer."""


@torch.library.custom_op("jetrl::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y [..., D] bfloat16, rstd [..., 1] float32) of x [..., D] bfloat16, weight [D] bfloat16, eps above 0.

    Raises ValueError on other shapes or dtypes.
    """
    if x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16 or weight.shape != x.shape[-1:]:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, weight {weight.dtype} {tuple(weight.shape)}; need bfloat16 [..., D] and [D]")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return y, _launch(x, weight, eps, y)


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def rms_rstd(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return rstd [..., 1] alone, the same bits as `rms_norm` gives."""
    return _launch(x, weight, eps, None)


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float, y: torch.Tensor | None) -> torch.Tensor:
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if x.numel():
        x_thd = _as_heads(x)
        toks, heads, dim = x_thd.shape
        padded = triton.next_power_of_2(dim)
        tile = max(1, TILE_ELEMENTS // padded)
        norm_kernel[(triton.cdiv(toks * heads, tile),)](
            x_thd, weight.contiguous(), rstd if y is None else y, rstd, toks * heads, heads, x_thd.stride(0), x_thd.stride(1), eps,
            DIM=dim, PADDED=padded, TILE=tile, WRITE=y is not None, SOFT=bool(triton.knobs.runtime.interpret),
            num_warps=4 if padded <= 2048 else 8,
        )  # fmt: skip
    return rstd


def _as_heads(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [T, heads, D] whose rows lie at multiples of 16 bytes; a copy only where the arrangement forbids a view."""
    dim = x.shape[-1]
    x_thd = x.reshape(-1, x.shape[-2], dim) if x.dim() > 2 else x.reshape(-1, 1, dim)
    strides = x_thd.stride(0) % ALIGNED == 0 and x_thd.stride(1) % ALIGNED == 0
    return x_thd if x_thd.stride(2) == 1 and strides and x_thd.data_ptr() % 16 == 0 else x_thd.clone(memory_format=torch.contiguous_format)


@triton.jit(do_not_specialize=["rows", "heads", "stride_t", "stride_h"])
def norm_kernel(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, rows, heads, stride_t, stride_h, eps,
    DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, WRITE: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """TILE rows of width DIM; row r is head r % heads of token r // heads."""
    r = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, PADDED)
    mask = (r < rows)[:, None] & (d < DIM)[None, :]
    row = (r // heads) * stride_t + (r % heads) * stride_h
    row = tl.multiple_of(row, 8)
    x = tl.load(x_ptr + row[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x, 1), DIM * 1.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd_ptr + r, rstd, mask=r < rows)
    if WRITE:
        weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
        y = round_bf16(x * rstd[:, None] * weight[None, :], SOFT)
        tl.store(y_ptr + r[:, None] * DIM + d[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
