"""Log-probs, entropy and their gradients against plain float64, with a padded vocabulary and in chunks."""

import math

import pytest
import torch

from jetrl_megatron.actor import logprobs
from jetrl_megatron.actor.logprobs import head_logits, token_logprobs, vocab_shard

VALID, ROWS, WIDTH = 203, 256, 64


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, WIDTH, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, VALID, (37,), generator=generator)
    return hidden, weight, labels


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows_a_chunk", [1, 10, 64])
def test_values_and_gradients_are_those_of_a_plain_log_softmax(case, monkeypatch, temperature, rows_a_chunk):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {"cpu": rows_a_chunk * ROWS})
    hidden, weight, labels = case
    logp, entropy = token_logprobs(hidden, weight, labels, vocab_shard(VALID, ROWS, 0, None), temperature)
    upstream = torch.linspace(-1, 1, 37)
    (logp * upstream).sum().backward()

    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    want = (h @ w[:VALID].t() / temperature).log_softmax(-1)
    picked = want.gather(1, labels[:, None]).squeeze(1)
    (picked * upstream).sum().backward()
    assert logp.dtype is entropy.dtype is torch.float32
    assert torch.allclose(logp.double(), picked, rtol=0, atol=1e-5)
    assert torch.allclose(entropy.double(), -(want.exp() * want).sum(-1), rtol=0, atol=1e-5)
    for got, exact in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert torch.allclose(got.double(), exact, rtol=2**-8, atol=1e-3 * float(exact.abs().max()))
    assert torch.count_nonzero(weight.grad[VALID:]) == 0


def test_padding_rows_have_no_probability_however_large_they_are(case):
    hidden, weight, labels = case
    shard = vocab_shard(VALID, ROWS, 0, None)
    before = token_logprobs(hidden, weight, labels, shard)
    with torch.no_grad():
        weight[VALID:] = 100.0
    after = token_logprobs(hidden, weight, labels, shard)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert (head_logits(hidden, weight, shard, 1.0)[:, VALID:] == -math.inf).all()


def test_a_shard_of_padding_only_holds_no_token():
    shards = [vocab_shard(VALID, 128, rank, None) for rank in range(4)]
    assert [(s.start, s.valid) for s in shards] == [(0, 128), (128, 75), (256, 0), (384, 0)]


def test_gradient_goes_into_main_grad_where_there_is_one(case):
    hidden, weight, labels = case
    weight.main_grad = torch.ones(ROWS, WIDTH)
    shard = vocab_shard(VALID, ROWS, 0, None)
    token_logprobs(hidden, weight, labels, shard)[0].sum().backward()
    added = weight.main_grad - 1.0
    assert weight.grad_added_to_main_grad
    plain = weight.detach().clone().requires_grad_()
    token_logprobs(hidden.detach(), plain, labels, shard)[0].sum().backward()
    assert torch.allclose(added, plain.grad.float(), rtol=2**-7, atol=1e-4)


def test_no_row_gives_an_empty_result_that_can_be_summed(case):
    hidden, weight, labels = case
    logp, entropy = token_logprobs(hidden[:0], weight, labels[:0], vocab_shard(VALID, ROWS, 0, None))
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert torch.count_nonzero(hidden.grad) == 0
