"""RMSNorm by value: one rounding to BF16 behind the weight, and the gradient of that, exactly."""

from types import SimpleNamespace

import pytest
import torch

from jetrl_megatron.actor.norm import RMSNorm, rms_norm_quantized
from jetrl_megatron.config import Backend
from jetrl_megatron.fp8 import GemmPrecision, input_format
from jetrl_megatron.fp8.quantize import WEIGHT_BLOCK, quantize_dual

ROWS, WIDTH, EPS = 64, 256, 1e-5
BF16 = torch.bfloat16


@pytest.fixture
def norm() -> RMSNorm:
    """Weights from 1/30 to 30, of both signs, as trained models have them."""
    config = SimpleNamespace(params_dtype=BF16, sequence_parallel=False, flow_device="cpu")
    made = RMSNorm(config, WIDTH, EPS)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        made.weight.copy_(torch.exp((torch.rand(WIDTH, generator=g) - 0.5) * 6.8) * (torch.rand(WIDTH, generator=g) - 0.2).sign())
    return made


def rows(seed: int) -> torch.Tensor:
    """Rows of very different sizes: the smallest are of the size of sqrt(eps)."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, WIDTH, generator=g) * torch.logspace(-3, 3, ROWS)[:, None]).bfloat16()


def wide_parts(norm: RMSNorm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, 1 / sqrt(mean(x^2) + eps), w), float64."""
    x64 = x.detach().double()
    return x64, 1.0 / torch.sqrt((x64 * x64).sum(-1, keepdim=True) / WIDTH + EPS), norm.weight.detach().double()


def test_it_rounds_once_behind_the_weight(norm: RMSNorm) -> None:
    x = rows(2)
    got = norm(x)
    x64, rstd64, w64 = wide_parts(norm, x)
    assert got.dtype is BF16 and torch.equal(got, (x64 * rstd64 * w64).bfloat16())
    twice = (x64 * rstd64).bfloat16() * norm.weight.detach()
    # Rounding before the weight too moves about a fifth of the outputs: the check above can tell the two apart.
    assert 0.15 < float((twice != got).double().mean()) < 0.3


def test_a_row_depends_on_that_row_alone(norm: RMSNorm) -> None:
    x = rows(3)
    whole = norm(x)
    assert all(torch.equal(norm(x[i : i + 1]), whole[i : i + 1]) for i in range(ROWS))
    assert torch.equal(norm(x.view(4, 16, WIDTH)), whole.view(4, 16, WIDTH))


def test_the_gradient_is_that_of_float64_rounded_once(norm: RMSNorm) -> None:
    x, dy = rows(4).requires_grad_(), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16()
    norm(x).backward(dy)
    x64, rstd64, w64 = wide_parts(norm, x)
    unit, weighted = x64 * rstd64, dy.double() * w64
    dx = rstd64 * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))
    assert torch.equal(x.grad, dx.bfloat16())
    assert torch.equal(norm.weight.grad, (dy.double() * unit).sum(0).bfloat16())


@pytest.mark.parametrize("backend", [Backend.reference, Backend.deepgemm])
def test_the_backend_of_the_linear_quantises_on_a_gpu_too(norm: RMSNorm, monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    """`reference` is for GPUs that have no FP8 as well, where Triton's quantisers do not compile."""
    fused, calls = pytest.importorskip("jetrl_megatron.fp8.triton_fused"), []
    real = fused.rms_norm_quantize
    monkeypatch.setattr(fused, "rms_norm_quantize", lambda *args, **options: calls.append(backend) or real(*args, **options))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x = rows(2).repeat(2, 1)
    form = input_format(GemmPrecision(), backend, for_wgrad=True)
    row_wise, transposed = rms_norm_quantized(x, norm.weight, EPS, form).operands
    assert calls == [Backend.deepgemm] * (backend is Backend.deepgemm)
    want = quantize_dual(norm(x), t_block=WEIGHT_BLOCK)
    assert row_wise.same_bytes(want[0]) and transposed.same_bytes(want[1])
