"""One step: recompute, empty micro-batches and the temperature, by value."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_megatron.actor.device import megatron_scope
from jetrl_megatron.actor.pipeline_step import PipelineStep, empty_like
from jetrl_megatron.config import Arm, ParallelConfig, PrecisionConfig, Recompute
from tests.dist.actor_run import batches_of
from tests.unit.actor.single_rank import few_batches, few_samples, gradients, single_rank_actor, take_step

JETRL = PrecisionConfig()


@pytest.mark.parametrize("arm", [Arm.jetrl, Arm.bf16])
def test_recompute_gives_the_same_gradients_bit_for_bit(qwen3_dir, arm):
    found = []
    for kind in Recompute:
        with single_rank_actor(qwen3_dir, PrecisionConfig(arm=arm), ParallelConfig(recompute=kind)) as actor:
            forwards = count_forwards(actor)
            take_step(actor, few_batches(actor))
            found.append((gradients(actor), forwards))
    (plain, once), (fc1, still_once), (full, twice) = found
    assert all(torch.equal(plain[n], fc1[n]) and torch.equal(plain[n], full[n]) for n in plain)
    assert (once, still_once, twice) == ([1, 1], [1, 1], [2, 2])


def count_forwards(actor):
    """Count the calls of each layer's first linear from now on."""
    counts = [0, 0]
    for i, layer in enumerate(actor.chunks[0].decoder.layers):

        def count(*args, i=i):
            counts[i] += 1

        layer.self_attention.linear_qkv.register_forward_hook(count)
    return counts


def test_an_empty_micro_batch_has_no_loss_and_no_gradient(qwen3_dir):
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        before = actor.weights_digest()
        batch = few_batches(actor)[0]
        sums = take_step(actor, [empty_like(batch)])
        assert float(sums["loss"]) == 0.0
        assert all(torch.count_nonzero(g) == 0 for g in gradients(actor).values())
        assert actor.weights_digest() == before
        logp, entropy = actor.logprobs([empty_like(batch)])[0]
        assert torch.count_nonzero(logp) == 0 and torch.count_nonzero(entropy) == 0


def test_an_empty_micro_batch_runs_the_whole_backward(qwen3_dir):
    """Every layer's backward holds collectives that the other ranks of a larger layout wait for."""
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        model, ran = actor.chunks[0], []
        modules = {"embedding": model.embedding, **{f"layer {i}": layer for i, layer in enumerate(model.decoder.layers)}}
        for name, module in modules.items():

            def forward(module, args, output, name=name):
                output = output[0] if isinstance(output, tuple) else output
                output.register_hook(lambda grad: ran.append((name, int(torch.count_nonzero(grad)))))

            module.register_forward_hook(forward)
        take_step(actor, [empty_like(few_batches(actor)[0])])
    assert ran == [(name, 0) for name in reversed(modules)]


def test_nan_where_no_position_counts_stays_visible(qwen3_dir):
    """The hidden states there are read by nothing, but their backward multiplies by them."""
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        with torch.no_grad():
            actor.chunks[0].decoder.final_layernorm.weight[3] = torch.nan
        assert take_step(actor, [empty_like(few_batches(actor)[0])])["grad_norm"].isnan()


def test_the_log_probs_of_a_step_ask_the_device_nothing(qwen3_dir, monkeypatch):
    """How many positions count, and all else that decides a shape, is known on the host: no operator's result is read back."""
    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    plain = PipelineStep._masked_logprobs

    def watched(*args):
        with Watch():
            return plain(*args)

    monkeypatch.setattr(PipelineStep, "_masked_logprobs", watched)
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        batches = few_batches(actor)
        take_step(actor, [*batches, empty_like(batches[0])])
    aten = torch.ops.aten
    assert aten.index in seen and not seen & {aten.nonzero, aten._local_scalar_dense, aten.masked_select}
    assert empty_like(batches[0]).cu_seqlens_S.device.type == "cpu"


def test_an_empty_micro_batch_beside_a_full_one_changes_nothing(qwen3_dir):
    found = []
    for with_empty in (False, True):
        with single_rank_actor(qwen3_dir, JETRL) as actor:
            batches = few_batches(actor)
            take_step(actor, [*batches, empty_like(batches[0])] if with_empty else batches)
            found.append(gradients(actor))
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_what_the_padding_holds_does_not_matter(qwen3_dir):
    """Padding attends to nothing, nothing attends to it and its rows are zeros: any token there gives the same log-probs and gradients."""
    found = []
    for filler in (0, 77):
        with single_rank_actor(qwen3_dir, JETRL) as actor:
            with torch.no_grad():
                outlier = actor.chunks[0].embedding.word_embeddings.weight[77]
                outlier.zero_()[5] = 1.0  # behind the norm 16 times as large as the rest: it would be the amax of its wgrad block
            (batch,) = few_batches(actor)
            assert batch.num_real_toks < batch.tokens_T.numel()
            batch.tokens_T[batch.num_real_toks :] = filler
            logp = actor.logprobs([batch])[0][0]
            take_step(actor, [batch])
            found.append((logp, gradients(actor)))
    (logp, plain), (other_logp, other) = found
    assert torch.equal(logp, other_logp)
    assert all(torch.equal(plain[n], other[n]) for n in plain)


def test_sequences_of_one_micro_batch_do_not_see_each_other(qwen3_dir):
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        samples = few_samples(actor)
        together = actor.logprobs(batches_of(samples, actor, 1024))[0][0]
        start = 0
        for sample in samples:
            alone = actor.logprobs(batches_of([sample], actor, 1024))[0][0]
            length = len(sample.prompt.token_ids) + len(sample.completion.token_ids)
            assert torch.equal(alone[:length], together[start : start + length])
            assert torch.count_nonzero(alone) == len(sample.completion.token_ids)
            start += length


def test_logprobs_are_those_of_the_sampling_temperature(qwen3_dir):
    """The step divides logits by the recipe's temperature, as the rollout does."""
    with single_rank_actor(qwen3_dir, JETRL) as actor:
        (batch,) = few_batches(actor)
        rows = batch.loss_mask_T.bool()
        plain, cold = (PipelineStep(actor._wrapped, actor.arch.vocab_size, t) for t in (1.0, 0.6))
        with megatron_scope(actor.device):
            (logp, entropy), (cold_logp, cold_entropy) = (step.logprobs([batch])[0] for step in (plain, cold))
            hidden = []
            hook = actor.chunks[0].register_forward_hook(lambda module, args, output: hidden.append(output))
            plain.logprobs([batch])
            hook.remove()
    logits = hidden[0].squeeze(1)[rows].double() @ actor.chunks[0].head_weight()[:203].double().t()
    for temperature, found, spread in ((1.0, logp, entropy), (0.6, cold_logp, cold_entropy)):
        want = (logits / temperature).log_softmax(-1)
        assert torch.allclose(found[rows].double(), want.gather(1, batch.labels_T[rows, None]).squeeze(1), rtol=0, atol=1e-5)
        assert torch.allclose(spread[rows].double(), -(want.exp() * want).sum(-1), rtol=0, atol=1e-5)
