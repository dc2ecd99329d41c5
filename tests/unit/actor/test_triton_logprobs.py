"""The Triton passes over the logits, against float64: values, gradients, bits, NaN and Inf.

Bounds, from FP32 arithmetic with unit 2^-24: a log-prob is off by its own rounding and that of its difference from the maximum,
together 2^-23 |logp|, and by the relative error of the total, a few units for the sum of a block and one for each of the at most 5
blocks: 4e-6; entropy likewise. A gradient is rounded to BF16, 2^-8 of itself, and where p is near 1 it has p's error, 4e-6 |dlogp| /
temperature.
"""

import pytest
import torch

pytest.importorskip("triton")

from jetrl_megatron.actor.fused_logprobs import combine
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
    return combine(row_sums(logits, labels, valid, temperature))


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
    assert row_sums(logits, labels, 77, 1.0).shape == (0, 4)
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
    got, want = row_sums(logits, labels, 1000, temperature), row_sums(divided, labels, 1000, 1.0)
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
