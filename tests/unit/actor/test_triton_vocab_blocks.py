"""Rows whose columns several ranks hold: one rank's bits, whatever the layout, and what is broken shows on all ranks."""

import pytest
import torch

pytest.importorskip("triton")

from jetrl_megatron.actor.fused_logprobs import combine
from jetrl_megatron.actor.logprobs import vocab_shard
from jetrl_megatron.actor.triton_logprobs import logit_gradient, row_sums
from jetrl_megatron.actor.triton_vocab_blocks import SharedRowSums, chunk_columns
from tests.unit.actor.test_triton_logprobs import DEVICE, INF, NAN
from tests.unit.actor.vocab_ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
COUNT = 6
LAYOUTS = [
    (2048, 1024, 2),
    (1500, 1024, 2),
    (1000, 1024, 2),
    (5000, 2560, 2),
    (5000, 1280, 4),
    (4999, 896, 6),
    (3000, 384, 8),
    (300, 128, 4),
]
"""(tokens, rows of a rank, ranks): blocks that end at a rank's last column and beyond it, ranks narrower than a block, of padding only."""


def whole_rows(vocab: int, rows: int, ranks: int, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [COUNT, rows * ranks], NaN behind the last token, and labels, the first and the last token among them."""
    generator = torch.Generator().manual_seed(vocab + ranks)
    logits = torch.randn(COUNT, rows * ranks, generator=generator) * scale
    logits[:, vocab:] = NAN
    labels = torch.randint(0, vocab, (COUNT,), generator=generator)
    labels[0], labels[-1] = 0, vocab - 1
    return logits.to(DEVICE), labels.to(DEVICE)


def shared(
    logits: torch.Tensor, labels: torch.Tensor, layout: tuple[int, int, int], temperature: float, chunk: int = COUNT
) -> list[torch.Tensor]:
    """What each rank has in the end."""
    vocab, rows, ranks = layout

    def rank(shard):
        sums = SharedRowSums(shard, rows, COUNT, temperature, logits.device)
        mine = logits[:, shard.start : shard.start + rows].contiguous()
        for first in reversed(range(0, COUNT, chunk)):
            sums.add(slice(first, first + chunk), mine[first : first + chunk], labels[first : first + chunk])
        return sums.result()

    return on_ranks(vocab, rows, ranks, rank)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_together_have_the_bits_of_one(layout, temperature):
    logits, labels = whole_rows(*layout)
    one = row_sums(logits, labels, layout[0], temperature)
    assert one.isfinite().all()
    for chunk in (COUNT, 2, 1):
        found = shared(logits, labels, layout, temperature, chunk)
        assert all(torch.equal(sums, one) for sums in found), chunk


def test_the_ranks_gradients_are_that_of_one():
    vocab, rows, ranks = layout = (4999, 896, 6)
    logits, labels = whole_rows(*layout)
    norm, dlogp = combine(row_sums(logits, labels, vocab, 0.7))[2], torch.linspace(-2, 2, COUNT, device=DEVICE)
    one = logit_gradient(logits, labels, norm, dlogp, (0, vocab), 0.7)
    shards = [vocab_shard(vocab, rows, rank, None) for rank in range(ranks)]
    spans = [(shard.start, shard.valid) for shard in shards]
    parts = [logits[:, start : start + rows].contiguous() for start, _ in spans]
    assert torch.equal(torch.cat([logit_gradient(p, labels, norm, dlogp, s, 0.7) for p, s in zip(parts, spans, strict=True)], dim=1), one)


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("column", [0, 1300, 2570, 4998])
def test_a_poisoned_rank_shows_on_all(column, poison):
    layout = (4999, 1280, 4)
    logits, labels = whole_rows(*layout)
    logits[2, column] = poison
    for sums in shared(logits, labels, layout, 1.0):
        logp, entropy, _ = combine(sums)
        assert logp.isnan().tolist() == entropy.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    ("vocab", "rows", "ranks", "columns"), [(151936, 152064, 1, 152064), (151936, 76032, 2, 76032 + 2 * 768), (49152, 24576, 2, 24576)]
)
def test_a_chunk_counts_what_is_borrowed(vocab, rows, ranks, columns):
    """Qwen3 on one rank and on two, and SmolLM2, whose halves are whole blocks."""
    assert on_ranks(vocab, rows, ranks, lambda shard: chunk_columns(shard, rows)) == [columns] * ranks
