"""Tensors of random bytes for the tests of fingerprints, on the GPU where there is one, and what `Hashing` makes of them."""

import torch

from jetrl_megatron.rollout.fingerprint import Hashing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def words(seed: int, num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8, the same for the same seed on one kind of device."""
    draw = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=DEVICE, generator=draw)


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """[rows, cols], the same for the same number of rows and of bytes."""
    raw = words(rows, rows * cols * dtype.itemsize)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(rows, cols)


def by_kernel(*tensors: torch.Tensor) -> list[str]:
    """The fingerprints `mix` of tensors that go in one behind the other, on the path that `Hashing` takes for them."""
    hashing = Hashing("mix")
    for number, tensor in enumerate(tensors):
        hashing.add(str(number), tensor)
    return list(hashing.texts().values())
