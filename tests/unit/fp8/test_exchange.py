"""How matrices are put together from parts and cut into them; the exchange itself takes several processes (tests/dist/)."""

import pytest
import torch

from jetrl_megatron.fp8.exchange import _columns_apart, _side_by_side


def matrix(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("rows", "cols"), [(6, 16), (1, 16), (0, 16), (6, 5), (6, 6)])
def test_columns_are_cut_and_put_together_whatever_their_width(rows: int, cols: int, size: int) -> None:
    parts = [matrix(rows, cols) + i for i in range(size)]
    whole = torch.cat(parts, dim=1)
    assert torch.equal(_columns_apart(whole, size), torch.cat(parts))
    assert torch.equal(_side_by_side(torch.cat(parts), size), whole)
