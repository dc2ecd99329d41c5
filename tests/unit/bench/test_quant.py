"""`bench quant` compares each quantiser with the bytes that it has to write, and sees one that is wrong."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from jetrl_megatron.bench import quant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def all_cases() -> list[quant.Case]:
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    return [*quant.cases(x), *quant.norm_cases(x), *quant.swiglu_cases(x)]


def test_every_quantiser_has_the_bytes_that_it_is_held_to():
    found = {case.name: quant.flips(case) for case in all_cases()}
    assert len(found) == len(all_cases()) == 16
    assert [name for name, flips in found.items() if flips is None] == ["swiglu backward"], "it is not ours to say of this one alone"
    assert all(not flips for flips in found.values()), found


@pytest.mark.parametrize("name", ["dual, blocks", "norm + row", "swiglu + dual"])
def test_one_wrong_code_is_seen(name):
    (case,) = [case for case in all_cases() if case.name == name]

    def wrong() -> object:
        result = case.run()
        first = result[0] if isinstance(result, tuple) else result
        first.data.view(torch.uint8)[3, 7] ^= 1
        return result

    assert quant.flips(replace(case, run=wrong)) == 1
