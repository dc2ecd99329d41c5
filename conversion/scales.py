"""Block scales as they are found in checkpoints, read into the one form that is computed with and written: FP32, two-dimensional.

Enters: raw bytes of `weight_scale_inv` in F32, BF16 or F8_E8M0. Leaves: FP32 [ceil(N / 128), ceil(K / 128)], never squeezed.
Widening is exact: BF16 is the upper half of an FP32, E8M0 code e is 2^(e - 127). A scale that is NaN, infinite or not above 0 is an error.
"""

import numpy as np

SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")


def scales_to_fp32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Widen raw scale bytes.

    raw: [rows, columns * item bytes] uint8, contiguous. dtype: one of SCALE_DTYPES. Returns [rows, columns] float32.
    """
    if dtype == "F32":
        return raw.view(np.float32)
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert dtype == "F8_E8M0", dtype
    # Code 0 is 2^-127, a subnormal FP32; code 255 is NaN.
    codes = raw.astype(np.uint32)
    bits = np.where(codes == 0, np.uint32(1 << 22), codes << 23)
    return np.where(codes == 255, np.float32(np.nan), bits.astype(np.uint32).view(np.float32))


def check_scales(where: str, scales: np.ndarray, first_block: tuple[int, int] = (0, 0)) -> None:
    """Raise ValueError naming the first block whose scale is not a positive finite number.

    where: tensor and file, for the message. scales: [rows, columns] float32. first_block: position of scales[0, 0] in the tensor.
    """
    bad = ~(np.isfinite(scales) & (scales > 0))
    if bad.any():
        row, col = (int(n) for n in np.argwhere(bad)[0])
        block = (row + first_block[0], col + first_block[1])
        raise ValueError(
            f"{where}: the scale of block {block} is {scales[row, col]}; it must be positive and finite, the checkpoint is damaged"
        )


def scale_format(scales: np.ndarray) -> str:
    """Return `ue8m0` where every scale is a power of two, else `fp32`."""
    return "ue8m0" if not (scales.view(np.uint32) & 0x7FFFFF).any() else "fp32"
