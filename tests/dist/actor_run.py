"""What one rank does in the layout tests: build an actor, read log-probs, roll out, take one step, export. Returns plain values."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conversion.actor_io import merge_to_hf, write_rank_shards
from conversion.architecture import ModelArchitecture
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import Actor, barrier
from jetrl_megatron.actor.device import local_device
from jetrl_megatron.config import LossNorm, OptimConfig, ParallelConfig, PrecisionConfig, Recipe
from jetrl_megatron.contracts import Completion, Prompt, Sample, SamplingParams
from jetrl_megatron.grpo.batch import build_train_batch, token_weights, unpack_per_position
from jetrl_megatron.grpo.packing import plan_micro_batches
from jetrl_megatron.rollout.engine import Request
from jetrl_megatron.rollout.local import LocalEngine

PROMPT_LENGTHS = (3, 40, 17, 8)
GROUP = 2


def recipe_of(parallel: ParallelConfig, precision: PrecisionConfig) -> Recipe:
    """Return a recipe with everything else at its default and one strong optimizer step."""
    return replace(Recipe(), parallel=parallel, precision=precision, optim=OptimConfig(lr=1e-3, clip_grad=1.0))


def prompts(vocab: int) -> list[Prompt]:
    """Return prompts of very different lengths, fixed ids."""
    generator = torch.Generator().manual_seed(7)
    return [
        Prompt(
            id=f"p{i}",
            token_ids=tuple(torch.randint(3, vocab, (n,), generator=generator).tolist()),
            text="",
            answer="",
            source="test",
        )
        for i, n in enumerate(PROMPT_LENGTHS)
    ]


def fixed_samples(vocab: int) -> list[Sample]:
    """Return the same completions on every layout, so that losses and gradients can be compared."""
    generator = torch.Generator().manual_seed(11)
    samples = []
    for i, prompt in enumerate(prompts(vocab)):
        for j in range(GROUP):
            n = 5 + 9 * i + j
            ids = tuple(torch.randint(3, vocab, (n,), generator=generator).tolist())
            completion = Completion(
                prompt_id=prompt.id, sample_index=j, token_ids=ids, logprobs=(-1.0,) * n, finish_reason="length", versions=(0,) * n
            )
            samples.append(Sample(prompt=prompt, completion=completion, reward=float(j), advantage=1.0 if j else -0.5, loss_mask=(1,) * n))
    return samples


def batches_of(samples: list[Sample], actor: Actor, micro_batch_toks: int) -> list[Any]:
    """Pack this data-parallel rank's micro-batches."""
    lengths = [len(s.prompt.token_ids) + len(s.completion.token_ids) for s in samples]
    plan = plan_micro_batches(lengths, actor.ranks.dp, micro_batch_toks, 128 * actor.ranks.tp)
    weights = token_weights(samples, LossNorm.token)
    return [build_train_batch(samples, indices, plan.length, weights) for indices in plan.indices[actor.ranks.dp_rank]]


def weighted_loss(logp: torch.Tensor, entropy: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a plain advantage-weighted log-likelihood: its gradient is easy to compare."""
    loss = -(logp * batch.advantages_T * batch.loss_weight_T).sum()
    return loss, {"loss": loss.detach()}


def export(actor: Actor, chunks: list[dict[str, torch.Tensor]], out: Path, hf_dir: Path) -> None:
    """Write `chunks` (one mapping a model chunk) of all ranks as one HF directory."""
    if actor.ranks.dp_rank == 0:
        write_rank_shards(out / "shards", actor.arch, actor.layout, (actor.ranks.pp_rank, actor.ranks.tp_rank), chunks)
    barrier()
    if actor.ranks.rank == 0:
        merge_to_hf(out / "shards", out / "hf", hf_dir, actor.arch, actor.layout)
    barrier()


def run(hf_dir: str, out: str, parallel: ParallelConfig, precision: PrecisionConfig, micro_batch_toks: int = 512) -> dict[str, Any]:
    """Do it all once; exports `grads/hf` and `weights/hf` under `out`."""
    device = local_device()
    ranks = parallel_state.initialize(parallel, device)
    arch = ModelArchitecture.from_hf_directory(hf_dir)
    actor = Actor(recipe_of(parallel, precision), arch, Path(hf_dir), ranks, device)
    actor.start_optimizer(actor.recipe.optim, total_steps=10)
    result: dict[str, Any] = {"digest": actor.weights_digest()}

    samples = fixed_samples(arch.vocab_size)
    batches = batches_of(samples, actor, micro_batch_toks)
    result["logprobs"] = _logprobs_by_sample(actor, batches, samples)
    result["rollout"], result["rollout_diff"] = _rollout(actor, arch, micro_batch_toks)

    sums = actor.train_step(batches, weighted_loss, lambda name: nullcontext())
    result["grad_norm"] = float(sums["grad_norm"])
    grads = [{n: p.main_grad.to(torch.bfloat16) for n, p in c.named_parameters()} for c in actor.chunks]
    if parallel.tp * parallel.pp == ranks.world:
        # The distributed optimizer leaves each data-parallel rank only its own shard of the reduced gradient.
        export(actor, grads, Path(out) / "grads", Path(hf_dir))
    export(actor, [{n: p.detach() for n, p in c.named_parameters()} for c in actor.chunks], Path(out) / "weights", Path(hf_dir))
    parallel_state.destroy()
    return result


def _logprobs_by_sample(actor: Actor, batches: list[Any], samples: list[Sample]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for (logp, _), batch in zip(actor.logprobs(batches), batches, strict=True):
        found.update({i: v.tolist() for i, v in unpack_per_position(logp, batch, samples).items()})
    return found


def _rollout(actor: Actor, arch: ModelArchitecture, micro_batch_toks: int) -> tuple[list[Any], float]:
    """Draw completions, then ask the training forward for the same tokens; returns them and the largest difference."""
    requests = [Request(prompt=p, sample_index=j) for p in prompts(arch.vocab_size) for j in range(GROUP)]
    engine = LocalEngine(actor, max_batch_seqs=5)
    params = SamplingParams(max_new_toks=12, temperature=actor.recipe.rollout.temperature, stop_token_ids=(2, 5))
    completions = engine.generate(requests, params, seed=3)
    samples = [
        Sample(prompt=r.prompt, completion=c, reward=0.0, advantage=1.0, loss_mask=(1,) * len(c.token_ids))
        for r, c in zip(requests, completions, strict=True)
    ]
    trained = _logprobs_by_sample(actor, batches_of(samples, actor, micro_batch_toks), samples)
    diff = max(abs(a - b) for i, values in trained.items() for a, b in zip(values, completions[i].logprobs, strict=True))
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions], diff
