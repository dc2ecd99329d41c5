"""Draw completions with an actor of the test's own process, and compare them with its training forward."""

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.config import PrecisionConfig
from jetrl_megatron.contracts import Completion, Prompt, Sample, SamplingParams
from jetrl_megatron.rollout.engine import Request
from jetrl_megatron.rollout.local import LocalEngine
from tests.unit.actor.single_rank import completion_logprobs, single_rank_actor

VOCAB = 203


def prompt(length: int, name: str = "") -> Prompt:
    """A prompt of random tokens; the same for the same length."""
    ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return Prompt(id=name or f"p{length}", token_ids=tuple(ids), text="", answer="", source="test")


def draw(
    actor: Actor, prompts: Sequence[Prompt], params: SamplingParams, *, group: int = 1, max_batch: int = 8, seed: int = 3
) -> list[Completion]:
    """`group` completions of each prompt, in order."""
    requests = [Request(prompt=p, sample_index=j) for p in prompts for j in range(group)]
    return LocalEngine(actor, max_batch).generate(requests, params, seed=seed)


def differences(actor: Actor, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> torch.Tensor:
    """|rollout - training forward| of every drawn token, nats."""
    by_id = {p.id: p for p in prompts}
    samples = [
        Sample(prompt=by_id[c.prompt_id], completion=c, reward=0.0, advantage=1.0, loss_mask=(1,) * len(c.token_ids)) for c in completions
    ]
    trained = completion_logprobs(actor, samples)
    pairs = [(a, b) for row, c in zip(trained, completions, strict=True) for a, b in zip(row, c.logprobs, strict=True)]
    return torch.tensor([abs(a - b) for a, b in pairs], dtype=torch.float64)


@contextmanager
def actor_of(hf_dir: Path, **precision):
    """An actor with these precision keys."""
    with single_rank_actor(hf_dir, PrecisionConfig(**precision)) as actor:
        yield actor
