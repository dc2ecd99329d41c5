"""What one rank does in the layout tests: build an actor, read log-probs, roll out, take one step, export. Returns plain values.

Leaves out judging: `test_layouts` compares what comes back.
"""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from conversion.actor_io import merge_to_hf, write_rank_shards
from conversion.architecture import ModelArchitecture
from jetrl_megatron.actor import parallel_state
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import local_device
from jetrl_megatron.actor.model import PolicyModel
from jetrl_megatron.config import LossNorm, OptimConfig, ParallelConfig, PrecisionConfig, Recipe
from jetrl_megatron.contracts import Completion, Prompt, Sample, SamplingParams
from jetrl_megatron.grpo.batch import build_train_batch, token_weights
from tests.packed_values import unpack_per_position
from jetrl_megatron.grpo.packing import plan_micro_batches
from jetrl_megatron.rollout.engine import Request
from jetrl_megatron.rollout.local import LocalEngine

PROMPT_LENGTHS = (3, 40, 17, 8)
GROUP = 3
LR = 1e-3


def recipe_of(parallel: ParallelConfig, precision: PrecisionConfig) -> Recipe:
    """Return a recipe with everything else at its default and one strong optimizer step."""
    return replace(Recipe(), parallel=parallel, precision=precision, optim=OptimConfig(lr=LR, clip_grad=1.0))


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
    mine = plan.indices[actor.ranks.dp_rank]
    return [build_train_batch(samples, indices, plan.length, weights).to(actor.device) for indices in mine]


def weighted_loss(logp: torch.Tensor, entropy: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a plain advantage-weighted log-likelihood: its gradient is easy to compare."""
    loss = -(logp * batch.advantages_T * batch.loss_weight_T).sum()
    return loss, {"loss": loss.detach()}


def export(actor: Actor, chunks: list[dict[str, torch.Tensor]], out: Path, hf_dir: Path) -> None:
    """Write `chunks` (one mapping a model chunk) of all ranks as one HF directory."""
    if actor.ranks.dp_rank == 0:
        write_rank_shards(out / "shards", actor.arch, actor.layout, (actor.ranks.pp_rank, actor.ranks.tp_rank), chunks)
    parallel_state.barrier()
    if actor.ranks.rank == 0:
        merge_to_hf(out / "shards", out / "hf", hf_dir, actor.arch, actor.layout)
    parallel_state.barrier()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One actor to build and to put through everything; what it exports lies in `out`/grads/hf and `out`/weights/hf."""

    hf_dir: str
    out: str
    parallel: ParallelConfig
    precision: PrecisionConfig
    num_samples: int = len(PROMPT_LENGTHS) * GROUP
    """How many of `fixed_samples` the gradient comes from; fewer than data-parallel ranks leave one with padding only."""


def run_cases(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Run one case after the other in the processes that are there; they start and import once."""
    results = {}
    for name, case in cases.items():
        print(f"case {name}", flush=True)
        results[name] = _run(case)
    parallel_state.destroy()
    return results


def _run(case: Case) -> dict[str, Any]:
    device = local_device()
    ranks = parallel_state.initialize(case.parallel, device)
    arch = ModelArchitecture.from_hf_directory(case.hf_dir)
    actor = Actor(recipe_of(case.parallel, case.precision), arch, Path(case.hf_dir), ranks, device)
    actor.start_optimizer(actor.recipe.optim, total_steps=10)
    samples = fixed_samples(arch.vocab_size)[: case.num_samples]
    batches = batches_of(samples, actor, case.parallel.micro_batch_toks)
    result: dict[str, Any] = {"digest": actor.weights_digest(), "num_micro_batches": len(batches)}
    result["logprobs"] = _logprobs_by_sample(actor, batches, samples)
    result["rollout"], result["rollout_diff"] = _rollout(actor, arch, case.parallel.micro_batch_toks)
    sums = actor.train_step(batches, weighted_loss, lambda name: nullcontext())
    result["grad_norm"] = float(sums["grad_norm"])
    result["loss"] = float(sums["loss"]) if "loss" in sums else None
    result["tied_embedding"] = [_sha256(c.shared_embedding_or_output_weight()) for c in actor.chunks if _holds_tied_embedding(c)]
    _gather_gradients(actor)
    grads = [{n: p.main_grad.to(torch.bfloat16) for n, p in c.named_parameters()} for c in actor.chunks]
    export(actor, grads, Path(case.out) / "grads", Path(case.hf_dir))
    export(actor, [{n: p.detach() for n, p in c.named_parameters()} for c in actor.chunks], Path(case.out) / "weights", Path(case.hf_dir))
    mpu.destroy_model_parallel()
    return result


def _holds_tied_embedding(chunk: PolicyModel) -> bool:
    return chunk.share_embeddings_and_output_weights and (chunk.pre_process or chunk.post_process)


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def _gather_gradients(actor: Actor) -> None:
    """Complete `main_grad` on every data-parallel rank: the distributed optimizer leaves each its own shard of the reduced gradient."""
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    for wrapped in actor._wrapped:
        for buffer in wrapped.buffers:
            for bucket in buffer.buckets:
                shards = bucket.grad_data.chunk(group.size())
                dist.all_gather(list(shards), shards[group.rank()].clone(), group=group)


def _logprobs_by_sample(actor: Actor, batches: list[Any], samples: list[Sample]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for (logp, _), batch in zip(actor.logprobs(batches), batches, strict=True):
        found.update({i: v.tolist() for i, v in unpack_per_position(logp, batch, samples).items()})
    return found


def _rollout(actor: Actor, arch: ModelArchitecture, micro_batch_toks: int) -> tuple[list[Any], float]:
    """Draw completions, then ask the training forward for the same tokens; returns them and the largest difference."""
    requests = [Request(prompt=p, sample_index=j) for p in prompts(arch.vocab_size) for j in range(GROUP)]
    engine = LocalEngine(actor, max_batch_seqs=5)
    # One id in sixteen ends a completion, so that both reasons occur.
    stop_ids = tuple(range(2, arch.vocab_size, 16))
    params = SamplingParams(max_new_toks=12, temperature=actor.recipe.rollout.temperature, stop_token_ids=stop_ids)
    completions = engine.generate(requests, params, seed=3)
    samples = [
        Sample(prompt=r.prompt, completion=c, reward=0.0, advantage=1.0, loss_mask=(1,) * len(c.token_ids))
        for r, c in zip(requests, completions, strict=True)
    ]
    trained = _logprobs_by_sample(actor, batches_of(samples, actor, micro_batch_toks), samples)
    diff = max(abs(a - b) for i, values in trained.items() for a, b in zip(values, completions[i].logprobs, strict=True))
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions], diff
