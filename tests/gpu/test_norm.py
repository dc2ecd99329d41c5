"""The norm kernel of both engines on a GPU: a row's bits do not depend on its company, values are those of float64, gradients torch's."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from jetrl_megatron.actor.norm import rms_norm  # noqa: E402
from jetrl_megatron.fp8.triton_norm import rms_norm as kernel  # noqa: E402
from jetrl_megatron.fp8.triton_norm import rms_rstd  # noqa: E402

EPS = 1e-6


def operands(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(dim)
    return torch.randn(rows, dim, device="cuda").bfloat16() * 3, torch.exp(torch.randn(dim, device="cuda")).bfloat16()


@pytest.mark.parametrize("dim", [64, 128, 768, 4096, 5120, 8192])
def test_a_row_has_the_same_bits_in_any_company(dim):
    x, w = operands(4096, dim)
    whole, rstd = kernel(x, w, EPS)
    assert torch.equal(rstd, rms_rstd(x, w, EPS))
    for rows in (1, 2, 7, 255, 256, 257, 1024):
        assert torch.equal(kernel(x[:rows], w, EPS)[0], whole[:rows]), rows
        assert torch.equal(kernel(x[-rows:], w, EPS)[0], whole[-rows:]), rows
    wide = torch.randn(4096, 3 * dim + 64, device="cuda").bfloat16()
    wide[:, 64 : 64 + dim] = x
    assert torch.equal(kernel(wide[:, 64 : 64 + 2 * dim].unflatten(1, (2, dim)), w, EPS)[0][:, 0], whole)


@pytest.mark.parametrize("dim", [128, 768, 4096])
def test_values_and_gradients_are_those_of_torch_but_for_rounding(dim):
    x, w = operands(777, dim)
    dy = torch.randn_like(x)
    mine, theirs = [[t.clone().requires_grad_() for t in (x, w)] for _ in range(2)]
    y = rms_norm(*mine, EPS)
    y.backward(dy)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    want = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + EPS) * w64
    want.backward(dy.double())
    assert float((y.double() != want.bfloat16().double()).double().mean()) < 1e-4
    torch.nn.functional.rms_norm(theirs[0], (dim,), theirs[1], EPS).backward(dy)
    for a, b, exact in zip(mine, theirs, (x64, w64), strict=True):
        assert (a.grad.double() - exact.grad).norm() <= 1.01 * (b.grad.double() - exact.grad).norm() + 1e-6 * exact.grad.norm()
