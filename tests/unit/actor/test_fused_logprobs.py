"""The Triton passes over the logits and what is built on them, against float64: values, gradients, shards, bits, NaN and Inf.

Bounds, from FP32 arithmetic with unit 2^-24: a log-prob is off by its own rounding and that of its difference from the maximum,
together 2^-23 |logp|, and by the relative error of the total, a few units for the sum of a block and one for each of the at most 5
blocks: 4e-6; entropy likewise. A gradient is rounded to BF16, 2^-8 of itself, and where p is near 1 it has p's error, 4e-6 |dlogp| /
temperature.
"""

import math
import weakref
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from jetrl_megatron.actor import fused_logprobs, logprobs
from jetrl_megatron.actor.fused_logprobs import FusedTokenLogprobs, combine
from jetrl_megatron.actor.logprobs import VocabShard, token_logprobs, vocab_shard
from jetrl_megatron.actor.triton_logprobs import SUMS_BLOCK, logit_gradient, row_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def make(rows: int, width: int, valid: int, scale: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, NaN in the padding, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator) * scale
    logits[:, valid:] = NAN
    return logits.to(DEVICE), torch.randint(0, max(valid, 1), (rows,), generator=generator).to(DEVICE)


def one_rank(logits: torch.Tensor, labels: torch.Tensor, valid: int, temperature: float) -> tuple[torch.Tensor, ...]:
    return combine(row_sums(logits, labels, 0, valid, temperature)[None])


def exact(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, entropy and probabilities in float64, of the logits that FP32 division gives."""
    logp = (logits / torch.tensor(temperature, device=logits.device)).double().log_softmax(-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp.nan_to_num(neginf=0.0)).sum(-1), logp.exp()


def assert_near(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    assert got[0].dtype is got[1].dtype is torch.float32
    assert torch.allclose(got[0].double(), want[0], rtol=2**-23, atol=4e-6), (got[0].double() - want[0]).abs().max()
    assert torch.allclose(got[1].double(), want[1], rtol=2**-23, atol=4e-6), (got[1].double() - want[1]).abs().max()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("scale", [0.1, 4.0, 100.0, 1e30])
@pytest.mark.parametrize(("rows", "width", "valid"), [(1, 1, 1), (3, 203, 77), (5, 5003, 4999), (2, 3 * SUMS_BLOCK, 3 * SUMS_BLOCK)])
def test_values_are_those_of_float64(rows, width, valid, scale, temperature):
    logits, labels = make(rows, width, valid, scale)
    assert_near(one_rank(logits, labels, valid, temperature), exact(logits[:, :valid], labels, temperature))


def test_no_row():
    logits, labels = make(0, 203, 77, 1.0)
    assert row_sums(logits, labels, 0, 77, 1.0).shape == (0, 4)
    norm, none = logits.new_empty(0, 2), logits.new_empty(0)
    assert logit_gradient(logits, labels, norm, none, (0, 77), 1.0).shape == (0, 203)


@pytest.mark.parametrize("order", ["ascending", "descending", "equal"])
def test_the_maximum_may_be_in_any_block(order):
    line = torch.linspace(-30, 30, 5 * SUMS_BLOCK)
    logits = {"ascending": line, "descending": line.flip(0), "equal": torch.zeros_like(line)}[order][None].to(DEVICE)
    labels = torch.tensor([SUMS_BLOCK + 1], device=DEVICE)
    assert_near(one_rank(logits, labels, logits.shape[1], 1.0), exact(logits, labels, 1.0))


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e8, -1e8])
def test_a_large_common_offset_costs_nothing(offset):
    """The normaliser is kept as maximum and rest, so no bit of the rest is lost beside the maximum."""
    steps = torch.arange(1024.0).remainder(5)[None] * (8.0 if abs(offset) > 1e5 else 1.0)
    logits, labels = (steps + offset).to(DEVICE), torch.tensor([7], device=DEVICE)
    got = one_rank(logits, labels, 1024, 1.0)
    assert torch.equal(got[0], one_rank(steps.to(DEVICE), labels, 1024, 1.0)[0])
    assert_near(got, exact(logits, labels, 1.0))
    gradient = logit_gradient(logits, labels, got[2], torch.ones(1, device=DEVICE), (0, 1024), 1.0)
    norm = one_rank(steps.to(DEVICE), labels, 1024, 1.0)[2]
    assert torch.equal(gradient, logit_gradient(steps.to(DEVICE), labels, norm, torch.ones(1, device=DEVICE), (0, 1024), 1.0))


@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.3])
def test_the_temperature_divides_the_logits(temperature):
    """On a GPU as vLLM's sampler divides, which rounds up to two units off; Triton's interpreter divides as torch does."""
    logits, labels = make(3, 1000, 1000, 8.0)
    divided = logits / torch.tensor(temperature, device=DEVICE)
    got, want = row_sums(logits, labels, 0, 1000, temperature), row_sums(divided, labels, 0, 1000, 1.0)
    assert torch.equal(got, want) if DEVICE == "cpu" else torch.allclose(got, want, rtol=1e-4, atol=0.0)


def test_a_rows_bits_do_not_depend_on_the_number_of_rows():
    logits, labels = make(9, 5003, 5001, 4.0)
    dlogp = torch.linspace(-1, 1, 9, device=DEVICE)
    together = one_rank(logits, labels, 5001, 0.7)
    gradient = logit_gradient(logits, labels, together[2], dlogp, (0, 5001), 0.7)
    for i in range(9):
        part = logits[i : i + 1].clone(), labels[i : i + 1].clone()
        alone = one_rank(*part, 5001, 0.7)
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))
        assert torch.equal(logit_gradient(*part, alone[2], dlogp[i : i + 1].clone(), (0, 5001), 0.7)[0], gradient[i])


def test_a_poisoned_logit_stays_visible_in_its_row_and_nowhere_else():
    """Rows: NaN, +Inf, +Inf at the label, -Inf, -Inf at the label, nothing but -Inf; the last row is whole."""
    logits, labels = make(7, 5003, 4999, 4.0)
    labels[:] = 5
    logits[0, 4000], logits[1, 4000], logits[2, 5], logits[3, 4000], logits[4, 5] = NAN, INF, INF, -INF, -INF
    logits[5, :4999] = -INF
    logp, entropy, norm = one_rank(logits, labels, 4999, 1.0)
    gradient = logit_gradient(logits, labels, norm, torch.ones(7, device=DEVICE), (0, 4999), 1.0)
    for broken in (0, 1, 2, 5):
        assert logp[broken].isnan() and entropy[broken].isnan() and gradient[broken, :4999].isnan().any(), broken
    assert logp[4] == -INF
    whole = [3, 4, 6]
    assert_near((logp[whole], entropy[whole]), exact(logits[whole, :4999], labels[whole], 1.0))
    assert gradient[whole].isfinite().all() and torch.count_nonzero(gradient[:, 4999:]) == 0


SHARDS = [(0, 2500), (2560, 2499), (5120, 0)]
"""(start, valid) of three ranks of 2560 rows; the last holds padding only. Ids between valid rows and the next rank are not used."""


def sharded(scale: float) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits of each rank, the labels, all valid logits side by side and the labels' places there."""
    parts = [make(6, 2560, valid, scale, seed=i)[0] for i, (_, valid) in enumerate(SHARDS)]
    whole = torch.cat([part[:, :valid] for part, (_, valid) in zip(parts, SHARDS, strict=True)], dim=1)
    labels = torch.tensor([0, 2499, 2560, 5058, 17, 3000], device=DEVICE)
    return parts, labels, whole, torch.where(labels < 2560, labels, labels - 60)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("scale", [4.0, 100.0])
def test_ranks_together_are_the_whole_vocabulary(scale, temperature):
    parts, labels, whole, places = sharded(scale)
    sums = [row_sums(part, labels, *span, temperature) for part, span in zip(parts, SHARDS, strict=True)]
    logp, entropy, norm = combine(torch.stack(sums))
    want = exact(whole, places, temperature)
    assert_near((logp, entropy), want)
    dlogp = torch.linspace(-2, 2, 6, device=DEVICE)
    got = [logit_gradient(p, labels, norm, dlogp, span, temperature) for p, span in zip(parts, SHARDS, strict=True)]
    assert all(torch.count_nonzero(g[:, valid:]) == 0 for g, (_, valid) in zip(got, SHARDS, strict=True))
    scaled = dlogp.double()[:, None] / temperature
    wanted = (torch.nn.functional.one_hot(places, whole.shape[1]) - want[2]) * scaled
    found = torch.cat([g[:, :valid] for g, (_, valid) in zip(got, SHARDS, strict=True)], dim=1).double()
    assert ((found - wanted).abs() <= 2**-8 * wanted.abs() + 4e-6 * scaled.abs()).all()


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_poisoned_rank_shows_on_all(rank, poison):
    parts, labels, _, _ = sharded(4.0)
    parts[rank][2, 9] = poison
    sums = torch.stack([row_sums(part, labels, *span, 1.0) for part, span in zip(parts, SHARDS, strict=True)])
    logp, entropy, _ = combine(sums)
    assert logp.isnan().tolist() == entropy.isnan().tolist() == [False, False, True, False, False, False]


@dataclass(frozen=True, kw_only=True)
class OneOfTwo(VocabShard):
    """A shard whose other rank's sums are given."""

    other: torch.Tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's sums and the other's, in rank order."""
        return torch.stack((tensor, self.other) if self.start == 0 else (self.other, tensor))


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


def test_two_ranks_give_the_gradient_of_one(case):
    hidden, weight, labels = case
    one = fused(hidden, weight, labels, vocab_shard(VALID, ROWS, 0, None))
    one[0].sum().backward()
    halves = [weight.detach()[rank * 128 : (rank + 1) * 128].clone().requires_grad_() for rank in range(2)]
    spans = [vocab_shard(VALID, 128, rank, None) for rank in range(2)]
    sums = [row_sums(logprobs.plain_logits(hidden.detach(), w), labels, s.start, s.valid, 1.0) for w, s in zip(halves, spans, strict=True)]
    dhidden = torch.zeros(37, WIDTH, device=DEVICE)
    for rank in range(2):
        h = hidden.detach().clone().requires_grad_()
        shard = OneOfTwo(start=spans[rank].start, valid=spans[rank].valid, group=None, other=sums[1 - rank])
        logp, entropy = fused(h, halves[rank], labels, shard)
        assert_near((logp, entropy), (one[0].double(), one[1].double()))
        logp.sum().backward()
        dhidden += h.grad.float()
    largest = float(hidden.grad.abs().max())
    assert torch.allclose(dhidden, hidden.grad.float(), rtol=2**-6, atol=2**-7 * largest)
    assert torch.allclose(torch.cat([w.grad for w in halves]), weight.grad, rtol=2**-6, atol=2**-7 * float(weight.grad.abs().max()))


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
