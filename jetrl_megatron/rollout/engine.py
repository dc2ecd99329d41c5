"""What every rollout engine promises: token ids in, completions with their own log-probs out, at a named weight version.

Enters: requests (a prompt and a sample index) and SamplingParams. Leaves: one Completion for each request, in the order of the requests.
Invariants: the log-prob of a token is that of the distribution it was drawn from; a completion never mixes prompts; the draw of a
request depends on the seed, its prompt id and its sample index only, not on what else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jetrl_megatron.contracts import Completion, Prompt, SamplingParams
from jetrl_megatron.rollout.background_draw import BackgroundDraw


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion asked for."""

    prompt: Prompt
    sample_index: int


class RolloutEngine(Protocol):
    """An engine that draws completions with the actor's weights."""

    def generate(self, requests: Sequence[Request], params: SamplingParams, *, seed: int) -> list[Completion]:
        """Draw one completion for each request, in order.

        Args:
            requests: what to complete.
            params: how to draw; the engine adds nothing of its own.
            seed: fixes every draw.

        Raises:
            ValueError: when a request does not fit into the model's context or vocabulary; names prompt and value.
        """
        ...

    def rest(self) -> None:
        """Draw nothing until the next push: an engine on the actor's own GPUs gives its memory to the update. Called on every rank."""
        ...


@runtime_checkable
class DrawsAhead(RolloutEngine, Protocol):
    """An engine with weights of its own, which can draw while the actor learns."""

    def begin(self, requests: Sequence[Request], params: SamplingParams, *, seed: int) -> BackgroundDraw:
        """Start what `generate` does in the background, with the weights that the engine holds now; see BackgroundDraw."""
        ...


def check_fits(request: Request, params: SamplingParams, vocab_size: int, context: tuple[int, str]) -> None:
    """Raise ValueError naming prompt and value where a request does not fit.

    vocab_size: ids of the model. context: tokens that prompt and completion may have, and whose limit it is.
    """
    check_vocabulary(request.prompt, vocab_size)
    max_positions, whose = context
    length = len(request.prompt.token_ids)
    if length < 1:
        raise ValueError(f"prompt {request.prompt.id} has no tokens; a prompt needs at least one")
    if length + params.max_new_toks > max_positions:
        raise ValueError(
            f"prompt {request.prompt.id} has {length} tokens and max_new_toks is {params.max_new_toks}; together they exceed the context "
            f"of {whose}, {max_positions}: lower rollout.max_new_toks or data.max_prompt_toks"
        )


def check_vocabulary(prompt: Prompt, vocab_size: int) -> None:
    """Raise ValueError naming prompt and id where the model has no embedding of a token."""
    for token_id in (min(prompt.token_ids, default=0), max(prompt.token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"prompt {prompt.id} has token id {token_id}, the model's vocabulary ends at {vocab_size - 1}: "
                "the tokenizer is not this model's; set model.tokenizer to the one it was trained with"
            )
