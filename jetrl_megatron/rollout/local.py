"""The embedded rollout engine: decodes with the actor's own Megatron modules and a KV cache, on any TP x PP layout.

Enters: requests. Leaves: completions. It runs the rollout side of the actor's linears: in the `jetrl` arm that is the training side, so the
log-prob of a drawn token equals the training forward's bit for bit on the CPU reference.

How it batches: up to `max_batch_seqs` sequences hold a slot of the cache. Free slots are filled from the queue; samples of one prompt share
one prefill, whose keys and values are copied into their slots. A finished sequence frees its slot at once.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import accumulate_dtype, megatron_scope
from jetrl_megatron.actor.logprobs import head_logits, token_logprobs
from jetrl_megatron.actor.packed import KVCache, PackedContext, packed_context
from jetrl_megatron.actor.pipeline_step import head_shard
from jetrl_megatron.contracts import Completion, FinishReason, SamplingParams
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.rollout.engine import Request, check_fits
from jetrl_megatron.rollout.pipeline_forward import forward_hidden
from jetrl_megatron.rollout.sampling import draw, request_generator


@dataclass(kw_only=True)
class _Sequence:
    """A request being decoded."""

    index: int
    request: Request
    generator: np.random.Generator
    slot: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.request.prompt.token_ids) + len(self.token_ids)


class LocalEngine:
    """RolloutEngine on the actor's own modules.

    Args:
        actor: whose chunks decode; its `sides` decide the precision.
        max_batch_seqs: sequences decoded together.
        on_progress: called with (finished, all) after each finished sequence.
    """

    def __init__(self, actor: Actor, max_batch_seqs: int, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Keep the actor; the cache is made for each call."""
        self._actor, self._max_batch = actor, max_batch_seqs
        self._on_progress = on_progress

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], params: SamplingParams, *, seed: int) -> list[Completion]:
        """Draw one completion for each request, in order; see `RolloutEngine.generate`.

        Raises RunFailure where logits are not finite.
        """
        for request in requests:
            check_fits(request, params, self._actor.arch.vocab_size, (self._actor.arch.max_positions, "the model"))
        for chunk in self._actor.chunks:
            chunk.eval()
        with megatron_scope(self._actor.device), self._actor.sides.use("rollout"):
            return _Decoding(self._actor, params, self._max_batch, self._on_progress).run(requests, seed)

    def rest(self) -> None:
        """Do nothing: this engine keeps nothing between draws."""


class _Decoding:
    """State of one `generate` call."""

    def __init__(self, actor: Actor, params: SamplingParams, max_batch: int, on_progress: Callable[[int, int], None] | None) -> None:
        self.actor, self.params, self.max_batch, self.on_progress = actor, params, max_batch, on_progress
        self.stop_ids = frozenset(params.stop_token_ids)
        self.device = actor.device
        self.tp = actor.ranks.tp if actor.chunks[0].config.sequence_parallel else 1

    def run(self, requests: Sequence[Request], seed: int) -> list[Completion]:
        """Decode everything; returns completions in request order."""
        waiting = [
            _Sequence(index=i, request=r, generator=request_generator(seed, r.prompt.id, r.sample_index)) for i, r in enumerate(requests)
        ]
        num = len(waiting)
        waiting.reverse()
        done: dict[int, Completion] = {}
        longest = max((s.length for s in waiting), default=0) + self.params.max_new_toks
        slots = list(range(min(self.max_batch, num)))
        self.cache = KVCache(len(slots), longest, accumulate_dtype(self.device))
        active: list[_Sequence] = []
        while waiting or active:
            admitted = []
            while waiting and slots:
                sequence = waiting.pop()
                sequence.slot = slots.pop()
                admitted.append(sequence)
            self._prefill(admitted)
            if active:
                self._decode(active)
            active += admitted
            running = []
            for sequence in active:
                if (completion := self._finished(sequence)) is None:
                    running.append(sequence)
                    continue
                done[sequence.index] = completion
                slots.append(sequence.slot)
                if self.on_progress is not None:
                    self.on_progress(len(done), num)
            active = running
        return [done[i] for i in range(num)]

    def _prefill(self, admitted: list[_Sequence]) -> None:
        """Fill the slots of `admitted` with their prompts and draw each one's first token; one forward a distinct prompt."""
        if not admitted:
            return
        by_prompt: dict[str, list[_Sequence]] = defaultdict(list)
        for sequence in admitted:
            by_prompt[sequence.request.prompt.id].append(sequence)
        groups = list(by_prompt.values())
        lengths = [g[0].length for g in groups]
        total = -(-sum(lengths) // self.tp) * self.tp
        context, _ = packed_context(lengths, total, self.device)
        context.cache = self.cache
        context.slots_S = torch.tensor([g[0].slot for g in groups], device=self.device)
        tokens = torch.zeros(total, dtype=torch.int64)
        for (start, end), group in zip(context.segments, groups, strict=True):
            tokens[start:end] = torch.tensor(group[0].request.prompt.token_ids)
        hidden = forward_hidden(self.actor.chunks, tokens.to(self.device), context)
        for group, length in zip(groups, lengths, strict=True):
            self.cache.copy_slot(group[0].slot, [s.slot for s in group[1:]], length)
        ordered = [s for g in groups for s in g]
        rows = [end - 1 for (_, end), g in zip(context.segments, groups, strict=True) for _ in g]
        self._draw(ordered, None if hidden is None else hidden[torch.tensor(rows, device=self.device)])

    def _decode(self, active: list[_Sequence]) -> None:
        """Feed each sequence its last token and draw the next one."""
        num = len(active)
        total = -(-num // self.tp) * self.tp
        tokens = torch.zeros(total, dtype=torch.int64)
        tokens[:num] = torch.tensor([s.token_ids[-1] for s in active])
        positions = torch.zeros(total, dtype=torch.int64)
        positions[:num] = torch.tensor([s.length - 1 for s in active])
        context = PackedContext(
            positions_T=positions.to(self.device),
            segments=tuple((i, i + 1) for i in range(num)),
            num_positions=max(s.length for s in active),
            cache=self.cache,
            slots_S=torch.tensor([s.slot for s in active], device=self.device),
            decode=True,
            lengths_S=torch.tensor([s.length for s in active], device=self.device),
        )
        hidden = forward_hidden(self.actor.chunks, tokens.to(self.device), context)
        self._draw(active, None if hidden is None else hidden[:num])

    def _draw(self, sequences: list[_Sequence], hidden_BH: Tensor | None) -> None:
        """Draw one token for each sequence on the last stage and tell all ranks; ids and log-probs are appended."""
        num = len(sequences)
        drawn = torch.zeros(2, num, dtype=torch.float64, device=self.device)
        uniforms = torch.tensor([s.generator.random() for s in sequences], dtype=torch.float64)
        if hidden_BH is not None:
            ids, logp = self._sample(hidden_BH.contiguous(), uniforms)
            drawn = torch.stack((ids.double(), logp.double()))
        self._share(drawn)
        for sequence, token, logp in zip(sequences, drawn[0].tolist(), drawn[1].tolist(), strict=True):
            if not math.isfinite(logp):
                raise RunFailure(
                    f"the model's logits are not finite: the log-prob of token {len(sequence.token_ids)} of the completion of "
                    f"prompt {sequence.request.prompt.id} is {logp}; the weights are broken (NaN or infinite), take them from their source "
                    "or from an earlier checkpoint"
                )
            sequence.token_ids.append(int(token))
            sequence.logprobs.append(logp)

    def _sample(self, hidden_BH: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids [B] and their log-probs [B]; every TP rank computes the same."""
        model = self.actor.chunks[-1]
        shard, weight = head_shard(model, self.actor.arch.vocab_size), model.head_weight()
        temperature = self.params.temperature or 1.0
        local = head_logits(hidden_BH, weight, shard, temperature)
        parts = [torch.empty_like(local) for _ in range(shard.group.size())]
        dist.all_gather(parts, local, group=shard.group)
        ids, logp = draw(torch.cat(parts, dim=1), self.params, uniforms)
        return ids, token_logprobs(hidden_BH, weight, ids, shard, temperature)[0] if logp is None else logp

    def _share(self, drawn: Tensor) -> None:
        """Spread the last stage's draw over the pipeline, then rank 0's over the TP group, so that no two ranks can disagree."""
        pipeline = mpu.get_pipeline_model_parallel_group()
        if pipeline.size() > 1:
            dist.broadcast(drawn, src=mpu.get_pipeline_model_parallel_last_rank(), group=pipeline)
        tensor = mpu.get_tensor_model_parallel_group()
        if tensor.size() > 1:
            dist.broadcast(drawn, src=mpu.get_tensor_model_parallel_src_rank(), group=tensor)

    def _finished(self, sequence: _Sequence) -> Completion | None:
        """Return the completion when the last token ends it: a stop token, or the limit; a stop token at the limit counts as stop."""
        reason: FinishReason | None = None
        if sequence.token_ids[-1] in self.stop_ids:
            reason = "stop"
        elif len(sequence.token_ids) >= self.params.max_new_toks:
            reason = "length"
        if reason is None:
            return None
        return Completion(
            prompt_id=sequence.request.prompt.id,
            sample_index=sequence.request.sample_index,
            token_ids=tuple(sequence.token_ids),
            logprobs=tuple(sequence.logprobs),
            finish_reason=reason,
            versions=(self.actor.version,) * len(sequence.token_ids),
        )
