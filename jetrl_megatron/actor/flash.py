"""Flash attention over packed sequences on CUDA: BF16 operands, FP32 accumulation, causal within every segment, grouped kv heads.

Enters: rotated q, k, v and the packed context. Leaves: [T, Hq, D] BF16, with its gradient. Two forward kernels: `flash2` is torch's,
`flash3` is the one that vLLM ships and decodes with, so that both engines round alike. The backward needs only the output and the
log-sum-exp of the forward: torch's FlashAttention-2 backward behind both, or, behind `flash3`, cuDNN's for long segments
(flash_backward.py). A query's row does not depend on the other segments.
"""

import importlib.util
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.actor.flash_backward import Operands, Segment, flash2_backward, segment_backward
from jetrl_megatron.actor.packed import PackedContext, with_zero_padding
from jetrl_megatron.config import AttentionBackward, AttentionKernel

_FLASH3 = "vllm.vllm_flash_attn"
_CUDNN_HEAD_DIMS = (64, 128)
"""cuDNN plans other widths too; their gradients were not compared with the reference."""


def resolve_attention(kernel: AttentionKernel, device: torch.device) -> AttentionKernel:
    """Return the kernel that will run on `device`.

    `auto` is `reference` on a CPU, `flash3` on a Hopper GPU where vLLM is installed, `flash2` on any other GPU.
    Raises ValueError, with the reason, where the one that is asked for cannot run.
    """
    on_cuda = device.type == "cuda"
    has_flash3 = on_cuda and torch.cuda.get_device_capability(device)[0] == 9 and importlib.util.find_spec("vllm") is not None
    if kernel is AttentionKernel.auto:
        if not on_cuda:
            return AttentionKernel.reference
        return AttentionKernel.flash3 if has_flash3 else AttentionKernel.flash2
    if (kernel is AttentionKernel.reference) == on_cuda:
        possible = "flash2, flash3" if on_cuda else "reference"
        raise ValueError(f"precision.attention is {kernel.value}, which does not run on {device.type}: use auto or one of {possible}")
    if kernel is AttentionKernel.flash3 and not has_flash3:
        raise ValueError("precision.attention is flash3, which needs a Hopper GPU and vLLM, which ships it: install vLLM or use flash2")
    return kernel


def resolve_backward(backward: AttentionBackward, forward: AttentionKernel, head_dim: int, *, deterministic: bool) -> AttentionBackward:
    """Return the backward that will run behind the resolved kernel `forward`.

    `auto` is `cudnn` behind `flash3` where heads are 64 or 128 wide and the run need not be deterministic, `reference` behind `reference`,
    else `flash2`. Deterministic: torch's own check (`can_use_cudnn_attention`) says that cuDNN's attention is not, and torch never asks
    cuDNN for the deterministic algorithm. Raises ValueError, with the reason, where the one that is asked for cannot run.
    """
    if forward is AttentionKernel.reference:
        if backward in (AttentionBackward.auto, AttentionBackward.reference):
            return AttentionBackward.reference
        raise ValueError(f"precision.attention_backward is {backward.value}, and precision.attention runs reference: use auto or reference")
    obstacle = _cudnn_obstacle(forward, head_dim, deterministic)
    if backward is AttentionBackward.auto:
        return AttentionBackward.flash2 if obstacle else AttentionBackward.cudnn
    if backward is AttentionBackward.reference:
        raise ValueError("precision.attention_backward is reference, which runs on a CPU only: use auto, flash2 or cudnn")
    if backward is AttentionBackward.cudnn and obstacle:
        raise ValueError(f"precision.attention_backward is cudnn, {obstacle}, or use auto or flash2")
    return backward


def _cudnn_obstacle(forward: AttentionKernel, head_dim: int, deterministic: bool) -> str:
    """Why cuDNN's backward is not run, with the way out; empty where nothing stands against it."""
    if forward is not AttentionKernel.flash3:
        return (
            f"which takes what flash3 saves, and precision.attention runs {forward.value}: use a Hopper GPU and precision.attention=flash3"
        )
    if head_dim not in _CUDNN_HEAD_DIMS:
        return f"and heads are {head_dim} wide; it is checked for widths 64 and 128: use such a model"
    if deterministic:
        return "which is not deterministic, and run.deterministic is true: set run.deterministic=false"
    return ""


def attend(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedContext, scale: float, kernel: AttentionKernel, backward: AttentionBackward
) -> Tensor:
    """Attend within every segment: query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq, D]; padding is zeros and passes no gradient on.

    packed: of T positions, not decoding. kernel, backward: resolved.
    """
    bounds, longest = packed.cu_seqlens, packed.num_positions
    assert bounds is not None, "a decoding step has no bounds"
    q, k, v = (x.contiguous() for x in (query, key, value))
    if kernel is AttentionKernel.flash3:
        by_segment = packed.segments if backward is AttentionBackward.cudnn else None
        out = _Flash3.apply(q, k, v, bounds, longest, scale, by_segment)
        return out if by_segment is not None else with_zero_padding(out, packed.num_real_toks, len(q))
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor), type(out)
    return with_zero_padding(out, packed.num_real_toks, len(q))


@cache
def _flash3_forward() -> Any:
    return importlib.import_module(_FLASH3).flash_attn_varlen_func


class _Flash3(torch.autograd.Function):
    """FlashAttention-3 forward; saves q, k, v, the output and its log-sum-exp [Hq, T] float32.

    segments: the real ones, for the backward by segment, with zeros behind them; None: FlashAttention-2's backward over all bounds.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, segments: tuple[Segment, ...] | None
    ) -> Tensor:
        out, lse = _flash3_forward()(
            q, k, v,
            max_seqlen_q=longest, cu_seqlens_q=bounds, max_seqlen_k=longest, cu_seqlens_k=bounds,
            softmax_scale=scale, causal=True, return_softmax_lse=True, num_splits=1, fa_version=3,
        )  # fmt: skip
        if segments is not None:
            real = segments[-1][1] if segments else 0
            out[real:].zero_()  # in place, where cutting them off and putting zeros there copies the rest in both directions
        ctx.save_for_backward(q, k, v, bounds, out, lse)
        ctx.longest, ctx.scale, ctx.segments = longest, scale, segments
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bounds, out, lse = ctx.saved_tensors
        x = Operands(grads[0].contiguous(), q, k, v, out, lse)
        if ctx.segments is None:
            dq, dk, dv = flash2_backward(x, bounds, ctx.longest, ctx.scale)
        else:
            dq, dk, dv = segment_backward(x, ctx.segments, ctx.scale)
        return dq, dk, dv, None, None, None, None
