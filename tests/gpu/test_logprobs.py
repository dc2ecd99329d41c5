"""Log-probs of the lm_head on a Hopper GPU at a real vocabulary: values, gradients, bits, host questions, memory, and time.

Bounds: those of tests/unit/actor/test_triton_logprobs.py with 75 steps a lane and the GPU's exponential, whose error of about 2^-22 is not
random: 1e-5 for log-prob and entropy beside 2^-23 of the log-prob. Values are compared on the GEMM's own FP32 logits, taken to float64.
"""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"),
]

from jetrl_megatron.actor import logprobs  # noqa: E402
from jetrl_megatron.actor.logprobs import plain_logits, token_logprobs, vocab_shard  # noqa: E402

VOCAB, ROWS, WIDTH, COUNT = 151_936, 152_064, 4096, 4096


@pytest.fixture(scope="module")
def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, lm_head with padding rows, labels; logits with a standard deviation of 3."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(COUNT, WIDTH, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(ROWS, WIDTH, generator=generator, device="cuda") * 3 / WIDTH**0.5).bfloat16()
    return hidden, weight, torch.randint(0, VOCAB, (COUNT,), generator=generator, device="cuda")


SHARD = vocab_shard(VOCAB, ROWS, 0, None)


def exact(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropy and probabilities of some rows, float64."""
    logits = plain_logits(hidden, weight)[:, :VOCAB] / torch.tensor(temperature, device="cuda")
    logp = logits.double().log_softmax(-1)
    return logp.gather(1, labels[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1), logp.exp()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_are_those_of_float64(case, temperature):
    hidden, weight, labels = (x[:256] if i != 1 else x for i, x in enumerate(case))
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    w.main_grad = torch.ones(ROWS, WIDTH, device="cuda")
    upstream = torch.linspace(-1, 1, 256, device="cuda")
    logp, entropy = token_logprobs(h, w, labels, SHARD, temperature)
    (logp * upstream).sum().backward()
    want_logp, want_entropy, probs = exact(hidden, weight, labels, temperature)
    print("max |d|: logp", float((logp - want_logp).abs().max()), "entropy", float((entropy - want_entropy).abs().max()))
    assert torch.allclose(logp.double(), want_logp, rtol=2**-23, atol=1e-5)
    assert torch.allclose(entropy.double(), want_entropy, rtol=2**-23, atol=1e-5)
    dlogits = probs.neg_().scatter_add_(1, labels[:, None], torch.ones(256, 1, dtype=torch.float64, device="cuda"))
    dlogits *= upstream.double()[:, None] / temperature
    # Sums of products whose first factor is rounded to BF16, 2^-8 of each; errors of many terms add up like a random walk.
    for got, part in ((h.grad, dlogits @ weight[:VOCAB].double()), (w.main_grad[:VOCAB] - 1.0, dlogits.t() @ hidden.double())):
        assert torch.allclose(got.double(), part, rtol=2**-7, atol=2**-7 * float(part.abs().max()))
    assert torch.equal(w.main_grad[VOCAB:], torch.ones_like(w.main_grad[VOCAB:])), "padding rows have no gradient"


def test_the_weight_gradient_is_added_once_a_backward_over_several_chunks(case, monkeypatch):
    hidden, weight, labels = case
    grads = []
    for rows_a_chunk, times in ((COUNT, 1), (1000, 1), (1000, 2)):
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {"cuda": rows_a_chunk * ROWS})
        w = weight.clone().requires_grad_()
        w.main_grad = torch.zeros(ROWS, WIDTH, device="cuda")
        for _ in range(times):
            token_logprobs(hidden, w, labels, SHARD)[0].sum().backward()
        grads.append(w.main_grad)
    whole, chunked, twice = grads
    largest = float(whole.abs().max())
    assert torch.allclose(whole, chunked, rtol=0, atol=2**-16 * largest)
    assert torch.allclose(twice, 2 * chunked, rtol=0, atol=2**-16 * largest)


def test_a_rows_bits_do_not_depend_on_the_number_of_rows(case):
    """Of the passes over the logits, whatever the GEMM does; how many of the GEMM's own rows differ is printed."""
    from jetrl_megatron.actor.fused_logprobs import combine
    from jetrl_megatron.actor.triton_logprobs import logit_gradient, row_sums

    hidden, weight, labels = case
    logits = plain_logits(hidden[:1024], weight)
    dlogp = torch.linspace(-1, 1, 1024, device="cuda")
    span = (0, VOCAB)
    together = combine(row_sums(logits, labels[:1024], VOCAB, 0.6))
    gradient = logit_gradient(logits, labels[:1024], together[2], dlogp, span, 0.6)
    for count in (1, 7, 64, 333):
        rows = slice(500, 500 + count)
        part = logits[rows].clone(), labels[rows].clone()
        alone = combine(row_sums(*part, VOCAB, 0.6))
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together, strict=True)), count
        assert torch.equal(logit_gradient(*part, alone[2], dlogp[rows].clone(), span, 0.6), gradient[rows]), count
        own = plain_logits(hidden[rows], weight)
        print(count, "rows: share of the GEMM's logits that differ from those of 1024 rows:", float((own != logits[rows]).float().mean()))


@pytest.mark.parametrize(("ranks", "rows"), [(2, 76_032), (4, 38_016), (8, 19_072)])
def test_rows_that_ranks_share_have_the_bits_of_one_rank(case, ranks, rows):
    """Of the passes over the logits; how many of the GEMM's own logits differ on a shard is printed."""
    from jetrl_megatron.actor.triton_logprobs import row_sums
    from jetrl_megatron.actor.triton_vocab_blocks import SharedRowSums
    from tests.unit.actor.vocab_ranks import on_ranks

    hidden, weight, labels = case[0][:512], case[1], case[2][:512]
    logits = plain_logits(hidden, weight)
    one = row_sums(logits, labels, VOCAB, 0.6)
    logits = torch.nn.functional.pad(logits, (0, ranks * rows - ROWS), value=torch.nan)

    def rank(shard):
        mine = logits[:, shard.start : shard.start + rows].contiguous()
        own = plain_logits(hidden, weight[shard.start : shard.start + rows])
        print(ranks, "ranks: share of the GEMM's logits that differ:", float((own != mine[:, : own.shape[1]]).float().mean()))
        sums = SharedRowSums(shard, rows, 512, 0.6, logits.device)
        for first in (256, 0):
            sums.add(slice(first, first + 256), mine[first : first + 256], labels[first : first + 256])
        return sums.result()

    assert all(torch.equal(found, one) for found in on_ranks(VOCAB, rows, ranks, rank))


def test_nothing_asks_the_device_and_no_more_than_a_chunk_is_held(case):
    hidden, weight, labels = case
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    w.main_grad = torch.zeros(ROWS, WIDTH, device="cuda")
    token_logprobs(h, w, labels, SHARD)[0].sum().backward()
    h.grad = w.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logp, _ = token_logprobs(h, w, labels, SHARD)
        forward = torch.cuda.max_memory_allocated() - before
        logp.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    backward = torch.cuda.max_memory_allocated() - before
    print("peak over what was there, GiB: forward", forward / 2**30, "backward", backward / 2**30)
    small = 2**28  # hidden gradient, sums, cuBLAS; the weight's stand-in gradient is made after the chunks
    assert forward <= 2**31 + small and backward <= 3 * 2**30 + small


def eager(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor:
    """The same in plain torch operators, in chunks of 1 GiB of logits; the gradient of the sum of log-probs where there is main_grad."""
    out = hidden.new_empty(COUNT, dtype=torch.float32)
    dhidden = torch.empty_like(hidden)
    for start in range(0, COUNT, 1765):
        rows = slice(start, min(start + 1765, COUNT))
        logits = plain_logits(hidden[rows], weight)
        logits[:, VOCAB:] = -torch.inf
        top = logits.amax(-1)
        shifted = logits - top[:, None]
        weights = torch.exp(shifted)
        shifted.masked_fill_(shifted == -torch.inf, 0.0)
        total = weights.sum(-1)
        (weights * shifted).sum(-1)
        norm = top + torch.log(total)
        out[rows] = logits.gather(1, labels[rows, None]).squeeze(1) - norm
        if main_grad is not None:
            logits = plain_logits(hidden[rows], weight)
            logits[:, VOCAB:] = -torch.inf
            dlogits = torch.exp(logits - norm[:, None]).neg_()
            dlogits.scatter_add_(1, labels[rows, None], torch.ones_like(norm)[:, None])
            dlogits *= torch.ones_like(norm)[:, None]
            dlogits = dlogits.bfloat16()
            dhidden[rows] = dlogits @ weight
            main_grad += torch.mm(dlogits.t(), hidden[rows], out_dtype=torch.float32)
    return out


def test_time_against_plain_operators(case):
    from jetrl_megatron.bench.timing import measure

    hidden, weight, labels = case
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    w.main_grad = torch.zeros(ROWS, WIDTH, device="cuda")

    def both() -> None:
        h.grad = w.grad = None
        token_logprobs(h, w, labels, SHARD)[0].sum().backward()

    with torch.no_grad():
        forward = measure(lambda: token_logprobs(hidden, weight, labels, SHARD), repeats=5).median_ms
        eager_forward = measure(lambda: eager(hidden, weight, labels, None), repeats=5).median_ms
        gemm = measure(lambda: [plain_logits(hidden[i : i + 1765], weight) for i in range(0, COUNT, 1765)] and None, repeats=5).median_ms
        eager_both = measure(lambda: eager(hidden, weight, labels, w.main_grad), repeats=5).median_ms
    fused_both = measure(both, repeats=5).median_ms
    print(f"{COUNT} rows, ms: forward {forward:.2f} (plain operators {eager_forward:.2f}, the GEMM alone {gemm:.2f}),", end=" ")
    print(f"forward + backward {fused_both:.2f} (plain operators {eager_both:.2f})")
    assert forward < eager_forward and fused_both < eager_both


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("width", "valid"), [(80, 80), (49152, 49152), (151936, 151936), (152064, 151665)])
def test_a_log_prob_is_vllms_bit_for_bit(width, valid, temperature):
    """vLLM divides in a kernel of its own and then sums; on one rank the actor's kernel does both."""
    pytest.importorskip("vllm")
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    from jetrl_megatron.actor.fused_logprobs import combine
    from jetrl_megatron.actor.triton_logprobs import row_sums

    logits = torch.randn(64, width, device="cuda") * 4
    labels = torch.randint(valid, (64,), device="cuda")
    ours = combine(row_sums(logits, labels, valid, temperature))[0]
    theirs = logits.clone()
    rows = torch.arange(64, device="cuda", dtype=torch.int32)
    apply_temperature(theirs[:, :valid], rows, torch.full((64,), temperature, device="cuda"))
    assert torch.equal(ours, compute_token_logprobs(theirs[:, :valid], labels[:, None])[:, 0])
