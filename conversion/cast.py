"""The two explicit changes of precision: block FP8 to BF16, and BF16 to block FP8. Everything else in this package moves bytes.

Enters: bytes of one tensor as NumPy arrays. Leaves: bytes. Values: BF16(code * scale), and `jetrl_megatron.fp8`'s one quantiser on the
BF16 values. Requantising dequantised values is not the identity, which is why neither happens unless it is asked for.
"""

import numpy as np
import torch

from conversion.layout import BLOCK
from jetrl_megatron.config import ScaleFormat
from jetrl_megatron.fp8.block_scaled import BlockScaled
from jetrl_megatron.fp8.quantize import quantize


def dequantize_bytes(where: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return BF16 bytes [rows, 2 * columns] uint8 of block-aligned codes [rows, columns] uint8 and scales [blocks, blocks] float32.

    where: tensor name for the message. Raises ValueError where a code is NaN, or where a value is beyond what BF16 holds.
    """
    block_scaled = BlockScaled(torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales), (BLOCK, BLOCK))
    values = block_scaled.dequantize(torch.bfloat16)
    if not torch.isfinite(values).all():
        raise ValueError(f"{where}: the FP8 weight holds NaN codes, or values that are Inf in BF16; the source checkpoint is damaged")
    return values.view(torch.uint8).numpy()


def quantize_bytes(where: str, bf16: np.ndarray, scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """Return codes [rows, columns] uint8 and scales [blocks, blocks] float32 of BF16 bytes [rows, 2 * columns] uint8.

    where: tensor name for the message. scale_format: `fp32` or `ue8m0`. Raises ValueError where the weight holds NaN or Inf.
    """
    weight = torch.from_numpy(bf16).view(torch.bfloat16)
    if not torch.isfinite(weight).all():
        raise ValueError(f"{where}: the BF16 weight holds NaN or Inf; the source checkpoint is damaged")
    result = quantize(weight, (BLOCK, BLOCK), scale_format=ScaleFormat(scale_format))
    return result.data.view(torch.uint8).numpy(), result.scale.contiguous().numpy()
