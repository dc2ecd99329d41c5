"""Flash attention of packed segments on a GPU against the float64 reference: outputs, gradients, grouped heads, rows that stand alone."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from jetrl_megatron.actor.attention import _CausalAttention  # noqa: E402
from jetrl_megatron.actor.flash import attend, resolve_attention  # noqa: E402
from jetrl_megatron.config import AttentionKernel  # noqa: E402

LENGTHS = (1, 130, 7, 374)
KERNELS = [AttentionKernel.flash2, AttentionKernel.flash3]


def operands(heads: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(dim)
    total = sum(LENGTHS)
    return [torch.randn(total, n, dim, generator=g).bfloat16() for n in (heads, kv_heads, kv_heads, heads)]


def bounds(lengths=LENGTHS) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double().cpu() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.value)
@pytest.mark.parametrize("shape", [(8, 8, 64), (12, 4, 64), (8, 2, 128)])
def test_outputs_and_gradients_are_those_of_float64(kernel, shape):
    resolve_attention(kernel, torch.device("cuda"))
    q, k, v, grad = operands(*shape)
    scale = shape[2] ** -0.5
    mine = [x.cuda().requires_grad_() for x in (q, k, v)]
    out = attend(*mine, bounds(), max(LENGTHS), scale, kernel)
    out.backward(grad.cuda())
    theirs = [x.clone().requires_grad_() for x in (q, k, v)]
    parts = [
        _CausalAttention.apply(*(x[a:b] for x in theirs), scale) for a, b in zip(bounds().tolist(), bounds().tolist()[1:], strict=False)
    ]
    torch.cat(parts).backward(grad)
    # BF16 outputs round at 2^-9 each, and the probabilities are BF16 in the kernels' second product and in their backward.
    assert relative(out.detach(), torch.cat(parts).detach()) < 0.005
    for got, want in zip(mine, theirs, strict=True):
        assert relative(got.grad, want.grad) < 0.01


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.value)
def test_a_segments_rows_do_not_depend_on_the_others(kernel):
    q, k, v, _ = (x.cuda() for x in operands(8, 2, 128))
    whole = attend(q, k, v, bounds(), max(LENGTHS), 0.1, kernel)
    alone = attend(q[138:], k[138:], v[138:], bounds(LENGTHS[3:]), LENGTHS[3], 0.1, kernel)
    assert torch.equal(whole[138:], alone)


def test_the_rope_kernel_gives_the_bytes_of_the_torch_form():
    from jetrl_megatron.actor.rope import RopeTable, inverse_frequencies

    on_cpu, on_gpu = (RopeTable(inverse_frequencies(128, 1e6, None).to(d), torch.device(d), torch.bfloat16) for d in ("cpu", "cuda"))
    x = torch.randn(300, 5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    positions = torch.arange(300) * 7 % 1001
    on_gpu._cos_sin = tuple(t.cuda() for t in on_cpu._table(1001))  # cosines of two devices may round apart; the rotation must not
    assert torch.equal(on_gpu.rotate(x.cuda(), positions.cuda(), 1001).cpu(), on_cpu.rotate(x, positions, 1001))
