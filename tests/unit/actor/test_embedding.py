"""The embedding against Megatron's own and float64: rows, gradient, tied weights, marks.

Bound: a sum of n BF16 numbers in FP32 is off by at most n 2^-24 of the sum of their sizes.
"""

import pytest
import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from jetrl_megatron.actor.embedding import NO_TOKEN, FlowEmbedding
from jetrl_megatron.config import PrecisionConfig
from tests.tiny_models import write_tiny_model
from tests.unit.actor.single_rank import few_batches, gradients, single_rank_actor, take_step

WEIGHT = "embedding.word_embeddings.weight"
OFTEN, TIMES, TOTAL = 17, 1000, 1280


@pytest.fixture(scope="module")
def tied_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tied") / "hf", "qwen3", num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture
def embeddings(one_layer_dir):
    """The actor's embedding without Megatron's data-parallel hooks, and Megatron's own with equal weights."""
    with single_rank_actor(one_layer_dir, PrecisionConfig()) as actor:
        ours = actor.chunks[0].embedding.word_embeddings
        twin, plain = (
            kind(
                ours.num_embeddings,
                ours.embedding_dim,
                init_method=actor._config.embedding_init_method,
                config=actor._config,
                tp_group=ours.tp_group,
            )
            for kind in (FlowEmbedding, VocabParallelEmbedding)
        )
        with torch.no_grad():
            for module in (twin, plain):
                module.weight.copy_(ours.weight)
        yield twin, plain


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [1, T], one of them 1000 times, padding [T] behind them, and a gradient of one sign, so that nothing cancels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 203, (1, TOTAL), generator=generator)
    ids[0, torch.randperm(TOTAL - 64, generator=generator)[:TIMES]] = OFTEN
    dy = torch.rand(1, TOTAL, 256, generator=generator).bfloat16()
    return ids, torch.arange(TOTAL) >= TOTAL - 64, dy


def exact(ids: torch.Tensor, padding: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The sum in float64, [256, H]."""
    return torch.zeros(256, dy.shape[-1], dtype=torch.float64).index_add_(0, ids[0, ~padding], dy[0, ~padding].double())


def test_rows_are_megatrons_and_zeros_at_padding(embeddings):
    ours, plain = embeddings
    ids, padding, _ = tokens()
    assert type(ours) is FlowEmbedding
    assert torch.equal(ours(ids), plain(ids))
    with_padding = ours(ids.masked_fill(padding, NO_TOKEN))
    assert torch.equal(with_padding[:, ~padding], plain(ids)[:, ~padding]) and torch.count_nonzero(with_padding[:, padding]) == 0


def test_the_gradient_is_added_to_main_grad_in_fp32(embeddings):
    ours, plain = embeddings
    ids, padding, dy = tokens()
    want = exact(ids, padding, dy)
    ours.weight.main_grad = torch.zeros(256, 256)
    for times in (1, 2):
        ours(ids.masked_fill(padding, NO_TOKEN)).backward(dy)
        assert ours.weight.grad_added_to_main_grad
        assert ((ours.weight.main_grad - times * want).abs() <= 2 * TOTAL * 2**-24 * times * want).all()
    plain(ids).backward(dy.masked_fill(padding[:, None], 0.0))
    assert plain.weight.grad[OFTEN].double().max() < 0.8 * want[OFTEN].min(), "BF16 sums stop growing, or this test shows nothing"


def test_without_main_grad_the_sum_is_rounded_once(embeddings):
    ours, _ = embeddings
    ids, padding, dy = tokens()
    ours(ids.masked_fill(padding, NO_TOKEN)).backward(dy)
    want = exact(ids, padding, dy)
    assert ours.weight.grad.dtype is torch.bfloat16
    assert ((ours.weight.grad.double() - want).abs() <= 2**-8 * want).all()


def test_a_frozen_embedding_needs_no_backward(embeddings):
    ours, _ = embeddings
    assert not ours.requires_grad_(False)(tokens()[0]).requires_grad


def test_an_id_that_no_rank_holds_fails(embeddings):
    with pytest.raises(IndexError):
        embeddings[0](torch.tensor([[256]]))


def test_the_parameter_keeps_megatrons_name_and_marks(one_layer_dir, tied_dir):
    for hf_dir, tied in ((one_layer_dir, False), (tied_dir, True)):
        with single_rank_actor(hf_dir, PrecisionConfig()) as actor:
            model = actor.chunks[0]
            weight = dict(model.named_parameters())[WEIGHT]
            assert type(model.embedding.word_embeddings) is FlowEmbedding
            assert (model.head_weight() is weight) is tied
            assert weight.is_embedding_or_output_parameter and not getattr(weight, "zero_out_wgrad", False)
            assert weight.tensor_model_parallel and (weight.partition_dim, weight.partition_stride) == (0, 1)


def test_a_tied_weight_gets_both_gradients_once(tied_dir, tmp_path):
    """It gets the sum of what embedding and head get where they are two parameters of the same values, over two micro-batches."""
    untied_dir = write_tiny_model(tmp_path / "hf", "qwen3", num_hidden_layers=1)
    found = []
    for hf_dir in (tied_dir, untied_dir):
        with single_rank_actor(hf_dir, PrecisionConfig()) as actor:
            model = actor.chunks[0]
            if found:
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(found[0][1][WEIGHT if name == "output_layer.weight" else name])
                actor.sides.refresh()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            take_step(actor, few_batches(actor) * 2)
            found.append((gradients(actor), before))
    (tied, _), (untied, _) = found
    parts = untied[WEIGHT], untied["output_layer.weight"]
    assert all(float(part.abs().max()) > 0.0 for part in parts)
    assert torch.allclose(tied[WEIGHT], sum(parts), rtol=0, atol=2**-20 * float(tied[WEIGHT].abs().max()))
    assert all(torch.equal(tied[name], untied[name]) for name in tied if name != WEIGHT)
