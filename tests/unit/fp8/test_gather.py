"""Which parts of X may be gathered in FP8, and what is refused; gathers themselves take several processes (tests/dist/test_gather.py)."""

import itertools

import pytest
import torch

from jetrl_megatron.config import Backend, LinearPrecision, SavedActivation
from jetrl_megatron.fp8 import GemmPrecision, WeightCache, fp8_linear
from jetrl_megatron.fp8.exchange import InputExchange
from jetrl_megatron.fp8.gather import exact_in_fp8, gather_blocks
from jetrl_megatron.fp8.quantize import ROW_BLOCK, WEIGHT_BLOCK, quantize

FP8, BF16 = LinearPrecision.fp8, LinearPrecision.bf16
TOKENS, FEATURES = 0, 1


class Group:
    """A group of two ranks that nobody may talk to."""

    def size(self) -> int:
        return 2


def test_a_part_of_whole_groups_is_exact_and_tokens_without_gradients_always_are():
    for part, axis, for_wgrad, want in [
        ((256, 384), FEATURES, True, True),
        ((100, 384), FEATURES, True, True),
        ((256, 192), FEATURES, False, False),
        ((256, 192), TOKENS, True, True),
        ((100, 384), TOKENS, True, False),
        ((100, 384), TOKENS, False, True),
        ((0, 384), TOKENS, True, True),
    ]:
        assert exact_in_fp8(part, axis, GemmPrecision(), for_wgrad=for_wgrad) is want, (part, axis, for_wgrad)


def test_bf16_is_gathered_only_for_a_bf16_side_and_for_a_backward_that_reads_it():
    side = GemmPrecision(linear=BF16, saved_activation=SavedActivation.bf16, dgrad=BF16, wgrad=BF16)
    for axis, for_wgrad in itertools.product((TOKENS, FEATURES), (False, True)):
        assert not exact_in_fp8((128, 128), axis, side, for_wgrad=for_wgrad)
        for saved, dgrad, wgrad in itertools.product(SavedActivation, (FP8, BF16), (FP8, BF16)):
            precision = GemmPrecision(saved_activation=saved, dgrad=dgrad, wgrad=wgrad)
            reads_bf16 = for_wgrad and saved is SavedActivation.bf16 and wgrad is BF16
            assert exact_in_fp8((128, 128), axis, precision, for_wgrad=for_wgrad) is not reads_bf16


def test_a_linear_refuses_parts_whose_bytes_would_be_others():
    weight = torch.nn.Parameter(torch.randn(128, 256).bfloat16())
    cache = WeightCache()
    cache.register("w", weight)
    cache.refresh()

    def run(x: torch.Tensor, axis: int, precision: GemmPrecision) -> torch.Tensor:
        return fp8_linear(x, weight, cache.get("w"), precision, Backend.reference, exchange=InputExchange(axis=axis, group=Group()))

    with pytest.raises(ValueError, match=r"\(100, 256\) of X, cut along axis 0, cannot be gathered in FP8.*gather X in BF16"):
        run(torch.randn(100, 256).bfloat16(), TOKENS, GemmPrecision())
    with pytest.raises(ValueError, match="saved_activation=bf16, wgrad=bf16"):
        run(torch.randn(128, 128).bfloat16(), FEATURES, GemmPrecision(saved_activation=SavedActivation.bf16, wgrad=BF16))
    for x, axis in ((torch.randn(128, 256), FEATURES), (torch.randn(128, 128), TOKENS)):
        with pytest.raises(ValueError, match=r"must be \[T, K\] and \[N, K\]"):
            run(x.bfloat16(), axis, GemmPrecision())


def test_a_block_is_never_cut_by_a_rank():
    for shape, block, axis in (((128, 64), ROW_BLOCK, 1), ((64, 128), WEIGHT_BLOCK, 0), ((128, 192), WEIGHT_BLOCK, 1)):
        with pytest.raises(AssertionError, match="inside a block"):
            gather_blocks(quantize(torch.randn(shape), block), axis, Group())
