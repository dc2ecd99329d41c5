"""SwiGLU's gate: silu in high precision, one rounding to BF16, then the BF16 product with the up half (done by Megatron's MLP).

Enters: gate half [..., F] BF16. Leaves: silu(gate) [..., F] BF16. Invariant: elementwise, so equal at any batch size. The product after
the rounding is what the rollout engine computes too.
"""

import torch
from torch import Tensor

from jetrl_megatron.actor.device import accumulate_dtype


def silu(gate: Tensor) -> Tensor:
    """Return x * sigmoid(x), rounded once to the input's dtype; gate: [..., F]."""
    if gate.is_cuda:
        # The kernel computes in FP32 and rounds once, which is what the widening below does on a CPU.
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.silu(gate.to(accumulate_dtype(gate.device))).to(gate.dtype)
