"""Flash attention over packed sequences on CUDA: BF16 operands, FP32 accumulation, causal within every segment, grouped kv heads.

Enters: rotated q, k, v and the segment bounds. Leaves: [T, Hq, D] BF16, with its gradient. Two forward kernels: `flash2` is torch's,
`flash3` is the one that vLLM ships and decodes with, so that both engines round alike. Both go through torch's FlashAttention-2
backward, which needs only the output and the log-sum-exp of the forward. A query's row does not depend on the other segments.
"""

import importlib.util
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.config import AttentionKernel

_FLASH3 = "vllm.vllm_flash_attn"


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


def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, kernel: AttentionKernel) -> Tensor:
    """Attend within every segment: query [T, Hq, D], key and value [T, Hkv, D], bounds [S + 1] int32 from 0 to T -> [T, Hq, D].

    longest: host-side bound of the segments' lengths.
    """
    q, k, v = (x.contiguous() for x in (query, key, value))
    if kernel is AttentionKernel.flash3:
        return _Flash3.apply(q, k, v, bounds, longest, scale)
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor), type(out)
    return out


@cache
def _flash3_forward() -> Any:
    return importlib.import_module(_FLASH3).flash_attn_varlen_func


class _Flash3(torch.autograd.Function):
    """FlashAttention-3 forward, torch's FlashAttention-2 backward; saves q, k, v, the output and its log-sum-exp [Hq, T] float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float) -> Tensor:
        out, lse = _flash3_forward()(
            q, k, v,
            max_seqlen_q=longest, cu_seqlens_q=bounds, max_seqlen_k=longest, cu_seqlens_k=bounds,
            softmax_scale=scale, causal=True, return_softmax_lse=True, num_splits=1, fa_version=3,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, bounds, out, lse)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bounds, out, lse = ctx.saved_tensors
        unused = torch.empty(0, device=q.device)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q, k, v, out, lse, bounds, bounds, ctx.longest, ctx.longest, 0.0, True, no_dropout, unused,
            scale=ctx.scale,
        )  # fmt: skip
        return dq, dk, dv, None, None, None
