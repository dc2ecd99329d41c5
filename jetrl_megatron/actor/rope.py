"""Rotary embedding with explicit positions: one table, used by the training forward and by decoding alike.

Enters: rope parameters of the model and positions [T]. Leaves: q and k rotated, BF16 in and out. The angle table is float32, cosine and
sine are rounded to BF16, products and sums are FP32 and rounded to BF16 once, as vLLM's kernel does; the gradient is the rotation back,
rounded once too. (Hugging Face's models round every product.) Supported scalings: none, `linear` (positions divided by the factor),
`llama3` (Llama 3.1 model card). `yarn` and `dynamic` are refused by name.
"""

import math
from typing import Any

import torch
from torch import Tensor

SUPPORTED_SCALING = ("default", "linear", "llama3")


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """Return the inverse frequencies [head_dim / 2], float32, radians a position.

    Args:
        head_dim: width of one head, even.
        theta: rope base, unitless.
        scaling: the `rope_scaling` entry of the HF config, or None.

    Raises:
        ValueError: for a scaling type that this project does not compute; names it and those it does.
    """
    inv = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    kind = "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind not in SUPPORTED_SCALING:
        raise ValueError(
            f"rope scaling {kind!r} is not supported; supported: {', '.join(SUPPORTED_SCALING)}. "
            "Remove rope_scaling from config.json (and stay within the original context length) or use another checkpoint"
        )
    if kind == "default" or scaling is None:
        return inv
    factor = float(scaling["factor"])
    if kind == "linear":
        return inv / factor
    return _llama3(inv, factor, scaling)


def _llama3(inv: Tensor, factor: float, scaling: dict[str, Any]) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, blend between (Llama 3.1's rule)."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv / factor + blend * inv
    stretched = torch.where(wavelength > original / low, inv / factor, inv)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, blended, stretched)


class RopeTable:
    """Cosine and sine of every position, grown when a longer sequence comes.

    Args:
        inv_freq: [head_dim / 2] float32 from `inverse_frequencies`.
        device: where the table lives.
        dtype: the dtype that cosine and sine are rounded to, that of q and k.
    """

    def __init__(self, inv_freq: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """Keep the parameters; the table is made at the first call."""
        self._inv_freq = inv_freq.to(device)
        self._dtype = dtype
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    def _table(self, num_positions: int) -> tuple[Tensor, Tensor]:
        if self._cos_sin is None or self._cos_sin[0].shape[0] < num_positions:
            length = max(256, 1 << (num_positions - 1).bit_length())
            angle = torch.arange(length, device=self._inv_freq.device).float()[:, None] * self._inv_freq[None, :]
            # float64 inside, so that a vector lane and a scalar tail of the CPU kernel round to the same float.
            cos, sin = (f(angle.double()).to(self._dtype) for f in (torch.cos, torch.sin))
            self._cos_sin = (cos, sin)
        return self._cos_sin

    def rotate(self, x: Tensor, positions_T: Tensor, num_positions: int) -> Tensor:
        """Rotate the two halves of each head.

        Args:
            x: [T, heads, head_dim] BF16.
            positions_T: [T] int64, position of each token in its own sequence.
            num_positions: host-side bound, larger than every position.
        """
        return _Rotation.apply(x, *self._table(num_positions), positions_T)


class _Rotation(torch.autograd.Function):
    """Rotation by given angles; the backward rotates back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions_T: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin, positions_T)
        return _rotated(x, cos, sin, positions_T, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _rotated(grads[0], *ctx.saved_tensors, inverse=True), None, None, None


def _rotated(x: Tensor, cos_PD: Tensor, sin_PD: Tensor, positions_T: Tensor, *, inverse: bool) -> Tensor:
    if x.is_cuda:
        from jetrl_megatron.actor.triton_rope import rotate

        return rotate(x if x.stride(-1) == 1 else x.contiguous(), cos_PD, sin_PD, positions_T, inverse=inverse)
    cos, sin = (table[positions_T][:, None, :].float() for table in (cos_PD, sin_PD))
    first, second = x.float().chunk(2, dim=-1)
    sin = -sin if inverse else sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
