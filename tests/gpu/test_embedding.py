"""The embedding's gradient on a GPU: FP32 sums near float64's, and under deterministic algorithms the same bits each time."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from jetrl_megatron.actor.embedding import _Rows  # noqa: E402

ROWS, WIDTH, TOKS = 1000, 256, 4096


def gradient(local, absent, dy):
    weight = torch.nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda"))
    weight.main_grad = torch.full((ROWS, WIDTH), 0.5, device="cuda")
    _Rows.apply(local, absent, weight).backward(dy)
    return weight.main_grad - 0.5


@pytest.mark.parametrize("deterministic", [True, False])
def test_rows_are_added_in_fp32_where_a_token_appears_often_too(deterministic):
    g = torch.Generator().manual_seed(0)
    local = torch.randint(0, ROWS, (1, TOKS), generator=g)
    local[:, ::3] = 7
    absent = torch.rand(1, TOKS, generator=g) < 0.1
    dy = torch.randn(1, TOKS, WIDTH, generator=g).bfloat16()
    want = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    want.index_add_(0, local[~absent], dy[~absent].double())
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        first, second = (gradient(local.cuda(), absent.cuda(), dy.cuda()) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(before)
    assert (first.double().cpu() - want).abs().max() < 1e-3
    assert not deterministic or torch.equal(first, second)
