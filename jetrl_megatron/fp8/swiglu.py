"""SwiGLU and its gradient: this torch code defines the numbers; the kernels of triton_swiglu.py compute the same equations in FP32.

Enters: gate_up [T, 2F] BF16, the gate in the first F columns, and in the backward dh [T, F] BF16. Leaves: h [T, F] or d_gate_up [T, 2F],
each in BF16 or in FP8 along both axes.
Equations, sigmoid = 1 / (1 + exp(-gate)):
    silu = bf16(gate * sigmoid);  h = bf16(silu * up)
    d_up = bf16(dh * silu);  d_gate = bf16(dh * up * sigmoid * (1 + gate * (1 - sigmoid)))
The forward rounds twice, as the rollout engine's kernel does. The backward rounds once: d_up has the factor that the forward multiplied
by, d_gate the derivative of the silu before its rounding.
Inside it is float64 on a CPU, so that neither lanes of a vector nor the number of rows show in the rounded result, and FP32 on CUDA.
Invariants: elementwise; NaN and Inf stay visible; T = 0 works.
Left out: kernels for the GPU, autograd (linear.py).

Legend: T tokens, F features of h.
"""

import torch

from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.quantize import ROW_BLOCK, quantize, quantize_dual


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """h = silu(gate) * up.

    gate_up: [T, 2F] bfloat16, any strides. Returns [T, F] bfloat16. Raises ValueError on another shape or dtype.
    """
    check_gate_up(gate_up)
    gate, up = gate_up.detach().chunk(2, dim=1)
    return _silu(gate.to(_wide(gate))) * up


def swiglu_quantize(
    gate_up: torch.Tensor, *, scale_format: ScaleFormat = ScaleFormat.fp32, t_block: tuple[int, int] | None = ROW_BLOCK
) -> tuple[BlockScaled, BlockScaled | None]:
    """The operands of a linear that reads h: (codes [T, F] in groups along F, h^T [F, T128] in `t_block`, or None without one).

    gate_up: [T, 2F] bfloat16. Raises ValueError on another shape or dtype.
    """
    h = swiglu(gate_up)
    if t_block is None:
        return quantize(h, ROW_BLOCK, scale_format=scale_format), None
    return quantize_dual(h, scale_format=scale_format, t_block=t_block)


def swiglu_backward(dh: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """d_gate_up, rounded once.

    dh: [T, F] bfloat16. gate_up: [T, 2F] bfloat16. Returns [T, 2F] bfloat16. Raises ValueError on other shapes or dtypes.
    """
    check_gate_up(gate_up, dh)
    wide = _wide(gate_up)
    gate, up = (half.to(wide) for half in gate_up.detach().chunk(2, dim=1))
    grad, sigmoid = dh.detach().to(wide), torch.sigmoid(gate)
    d_gate = grad * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    return torch.cat((d_gate.to(torch.bfloat16), (grad * _silu(gate).to(wide)).to(torch.bfloat16)), dim=1)


def swiglu_backward_dual(
    dh: torch.Tensor, gate_up: torch.Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, scale_format: ScaleFormat = ScaleFormat.fp32
) -> tuple[BlockScaled, BlockScaled]:
    """`quantize_dual` of the BF16 d_gate_up: (codes [T, 2F] in groups along 2F, codes [2F, T128] in groups along T).

    dh: [T, F] bfloat16. gate_up: [T, 2F] bfloat16. Raises ValueError on other shapes or dtypes.
    """
    return quantize_dual(swiglu_backward(dh, gate_up), dtype=dtype, scale_format=scale_format)


def check_gate_up(gate_up: torch.Tensor, dh: torch.Tensor | None = None) -> None:
    """Raise ValueError unless gate_up is [T, 2F] and dh, where it is given, [T, F], both bfloat16."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype is not torch.bfloat16:
        raise ValueError(f"gate_up is {gate_up.dtype} {tuple(gate_up.shape)}; need bfloat16 [T, 2F], the gate in the first F columns")
    expected = (gate_up.shape[0], gate_up.shape[1] // 2)
    if dh is not None and (tuple(dh.shape) != expected or dh.dtype is not torch.bfloat16):
        raise ValueError(f"dh is {dh.dtype} {tuple(dh.shape)}; need bfloat16 {expected}, half as wide as gate_up")


def _silu(wide_gate: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(gate), rounded once to BF16."""
    return torch.nn.functional.silu(wide_gate).to(torch.bfloat16)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.device.type == "cpu" else torch.float32
