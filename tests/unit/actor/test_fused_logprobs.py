"""The log-probs and their backward on top of the Triton passes, in chunks, against the float64 reference: gradients, ranks, kept logits.

Bounds are those of test_triton_logprobs.py.
"""

import math
import weakref

import pytest
import torch

pytest.importorskip("triton")

from jetrl_megatron.actor import fused_logprobs, logprobs
from jetrl_megatron.actor.fused_logprobs import FusedTokenLogprobs
from jetrl_megatron.actor.logprobs import token_logprobs, vocab_shard
from tests.unit.actor.test_triton_logprobs import DEVICE, assert_near
from tests.unit.actor.vocab_ranks import on_ranks

VALID, ROWS, WIDTH = 203, 256, 64


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, WIDTH, generator=generator).bfloat16().to(DEVICE).requires_grad_()
    weight = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().to(DEVICE).requires_grad_()
    return hidden, weight, torch.randint(0, VALID, (37,), generator=generator).to(DEVICE)


def fused(hidden, weight, labels, shard, temperature=1.0):
    return FusedTokenLogprobs.apply(hidden, weight, labels, shard, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows_a_chunk", [1, 10, 64])
def test_the_whole_function_is_the_reference(case, monkeypatch, temperature, rows_a_chunk):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {DEVICE: rows_a_chunk * ROWS})
    hidden, weight, labels = case
    shard, upstream = vocab_shard(VALID, ROWS, 0, None), torch.linspace(-1, 1, 37)
    plain = [x.detach().cpu().requires_grad_() for x in (hidden, weight)]
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", rows_a_chunk * ROWS)
    want = token_logprobs(*plain, labels.cpu(), shard, temperature)
    (want[0] * upstream).sum().backward()
    logp, entropy = fused(hidden, weight, labels, shard, temperature)
    (logp * upstream.to(DEVICE)).sum().backward()
    assert_near((logp.cpu(), entropy.cpu()), (want[0].double(), want[1].double()))
    for got, exact_ in ((hidden.grad, plain[0].grad), (weight.grad, plain[1].grad)):
        assert torch.allclose(got.cpu().double(), exact_.double(), rtol=2**-6, atol=4e-3 * float(exact_.abs().max()))
    assert torch.count_nonzero(weight.grad[VALID:]) == 0
    assert not entropy.requires_grad


@pytest.mark.parametrize("elements", [10 * ROWS, 1 << 20])
def test_two_ranks_give_the_gradient_of_one(case, monkeypatch, elements):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {DEVICE: elements})
    hidden, weight, labels = case
    one = fused(hidden, weight, labels, vocab_shard(VALID, ROWS, 0, None))
    one[0].sum().backward()

    def rank(shard):
        h = hidden.detach().clone().requires_grad_()
        w = weight.detach()[shard.start : shard.start + 128].clone().requires_grad_()
        logp, entropy = fused(h, w, labels, shard)
        assert_near((logp, entropy), (one[0].double(), one[1].double()))
        logp.sum().backward()
        return h.grad.float(), w.grad

    found = on_ranks(VALID, 128, 2, rank)
    largest = float(hidden.grad.abs().max())
    assert torch.allclose(sum(dhidden for dhidden, _ in found), hidden.grad.float(), rtol=2**-6, atol=2**-7 * largest)
    assert torch.allclose(torch.cat([dw for _, dw in found]), weight.grad, rtol=2**-6, atol=2**-7 * float(weight.grad.abs().max()))


def test_the_weight_gradient_is_added_to_main_grad_once_a_backward(case):
    hidden, weight, labels = case
    shard = vocab_shard(VALID, ROWS, 0, None)
    plain = weight.detach().clone().requires_grad_()
    plain.main_grad = torch.zeros(ROWS, WIDTH, device=DEVICE)
    fused(hidden.detach(), plain, labels, shard)[0].sum().backward()
    weight.main_grad = torch.ones(ROWS, WIDTH, device=DEVICE)
    for times in (1, 2):
        fused(hidden, weight, labels, shard)[0].sum().backward()
        assert torch.allclose(weight.main_grad, 1.0 + times * plain.main_grad, rtol=0, atol=1e-4)
        assert weight.grad_added_to_main_grad
    assert float(plain.main_grad.abs().max()) > 1.0


def test_a_frozen_weight_gets_no_gradient(case):
    hidden, weight, labels = case
    weight.requires_grad_(False)
    weight.main_grad = torch.zeros(ROWS, WIDTH, device=DEVICE)
    fused(hidden, weight, labels, vocab_shard(VALID, ROWS, 0, None))[0].sum().backward()
    assert weight.grad is None and torch.count_nonzero(weight.main_grad) == 0
    assert math.isfinite(float(hidden.grad.sum())) and torch.count_nonzero(hidden.grad) > 0


@pytest.fixture
def made(monkeypatch):
    """Rows of each chunk of logits that was made, with whether it is alive; no two may be at once."""
    real, chunks = fused_logprobs.plain_logits, []

    def watched(hidden, weight):
        assert not any(alive() is not None for _, alive in chunks)
        logits = real(hidden, weight)
        chunks.append((hidden.shape[0], weakref.ref(logits)))
        return logits

    monkeypatch.setattr(fused_logprobs, "plain_logits", watched)
    return chunks


def rows_alive(made) -> list[int]:
    return [rows for rows, alive in made if alive() is not None]


@pytest.mark.parametrize(("rows_a_chunk", "forward"), [(10, [7, 10, 10, 10]), (30, [7, 30]), (37, [37])])
def test_the_first_chunk_of_logits_is_kept_for_one_backward_and_no_longer(case, monkeypatch, made, rows_a_chunk, forward):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {DEVICE: rows_a_chunk * ROWS})
    logp = fused(*case, vocab_shard(VALID, ROWS, 0, None))[0]
    assert [rows for rows, _ in made] == forward and rows_alive(made) == [forward[-1]]
    logp.sum().backward()
    assert [rows for rows, _ in made[len(forward) :]] == forward[-2::-1] and rows_alive(made) == []


@pytest.mark.parametrize("weight_trains", [True, False])
def test_a_forward_without_a_gradient_keeps_no_logits(case, made, weight_trains):
    hidden, weight, labels = case
    weight.requires_grad_(weight_trains)
    with torch.set_grad_enabled(not weight_trains):
        kept = fused(hidden.detach(), weight, labels, vocab_shard(VALID, ROWS, 0, None))
    assert kept[0].grad_fn is None and len(made) == 1 and rows_alive(made) == []


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows_a_chunk", [10, 64])
def test_kept_logits_give_the_bits_of_logits_made_again(case, monkeypatch, made, temperature, rows_a_chunk):
    """The second backward through one graph makes all of them again."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {DEVICE: rows_a_chunk * ROWS})
    hidden, weight, labels = case
    logp = fused(hidden, weight, labels, vocab_shard(VALID, ROWS, 0, None), temperature)[0]
    loss = (logp * torch.linspace(-1, 1, 37, device=DEVICE)).sum()
    chunks = len(made)
    kept = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    assert len(made) == chunks + (chunks - 1) + chunks
    assert all(torch.equal(a, b) and torch.count_nonzero(a) for a, b in zip(kept, again, strict=True))
