"""Rotary embedding with explicit positions: one table, used by the training forward and by decoding alike.

Enters: rope parameters of the model and positions [T]. Leaves: q and k rotated, BF16 in and out. The angle table is float32, cosine and
sine are rounded to BF16 and the rotation is BF16 multiply, multiply, add, each rounded: the order of the Hugging Face models and of the
rollout engine. Supported scalings: none, `linear` (positions divided by the factor), `llama3` (Llama 3.1 model card). `yarn` and
`dynamic` are refused by name.
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
        cos_table, sin_table = self._table(num_positions)
        cos, sin = cos_table[positions_T][:, None, :], sin_table[positions_T][:, None, :]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
