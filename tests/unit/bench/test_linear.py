"""What a linear of another library keeps for its backward is counted whatever it keeps."""

import torch

from jetrl_megatron.bench.linear import Problem, saved_bytes


class KeepsNone(torch.autograd.Function):
    """Saves None beside its input, as Transformer Engine's linear does."""

    @staticmethod
    def forward(ctx, x, keep):
        ctx.save_for_backward(None, x if keep else None)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_an_input_that_is_kept_beside_nothing_is_counted():
    p = Problem(torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True), torch.ones(8, 8), torch.ones(4, 8))
    output = 4 * 8 * 2  # counted off what was allocated, which is nothing on a CPU
    assert saved_bytes(p, lambda x: KeepsNone.apply(x, True)) == 4 * 8 * 2 - output
    assert saved_bytes(p, lambda x: KeepsNone.apply(x, False)) == -output
