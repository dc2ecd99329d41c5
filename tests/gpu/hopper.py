"""What the tests of FP8 kernels on a Hopper GPU share: the marks, random operands, the distance from a reference."""

import pytest
import torch

from jetrl_megatron.config import ScaleFormat

NEEDS_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU with DeepGEMM"
    ),
]
E4M3 = {"dtype": torch.float8_e4m3fn, "scale_format": ScaleFormat.fp32}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def calc_diff(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return 1 - float(2 * (a * b).sum() / (a * a + b * b).sum())
