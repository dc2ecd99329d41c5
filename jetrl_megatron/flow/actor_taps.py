"""The actor's operators against an engine's record.

Enters: the actor and what `engine_taps` recorded. Leaves: `Difference` by operator, in two views. `alone`: the operator is given what
the engine's predecessor gave, so that each is judged by itself. `in place`: the actor runs by itself, so that differences add up as they
do in a run. Prompt tokens (the engine's prefill) and drawn tokens (its decoding) are kept apart.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.actor.device import megatron_scope
from jetrl_megatron.actor.logprobs import head_logits, token_logprobs
from jetrl_megatron.actor.model import PolicyModel
from jetrl_megatron.actor.packed import packed_context
from jetrl_megatron.actor.pipeline_step import head_shard
from jetrl_megatron.flow.operators import FINAL_NORM, LOGITS, LOGPROB, key

_ROWS = 128
"""The packed axis is filled up to a multiple of this."""


@dataclass
class Difference:
    """Elements of one operator's output that were compared, in one phase."""

    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    """Of |actor - engine|."""
    total: float = 0.0
    """Sum of |actor - engine|."""
    first_layer: int = -1
    """Where it first differed, -1: nowhere."""

    def add(self, actor: Tensor, engine: Tensor, layer: int) -> None:
        """Compare equally shaped tensors of one dtype bit for bit; a NaN on one side makes `largest` and `total` NaN."""
        assert (actor.shape, actor.dtype) == (engine.shape, engine.dtype), (actor.shape, actor.dtype, engine.shape, engine.dtype)
        count = int((actor.contiguous().view(torch.uint8) != engine.contiguous().view(torch.uint8)).view(*actor.shape, -1).any(-1).sum())
        self.elements += actor.numel()
        self.differing += count
        if count:
            distance = (actor.double() - engine.double()).abs()
            self.total += float(distance.sum())
            self.largest = float(torch.tensor([self.largest, float(distance.max())]).max())
            self.first_layer = layer if self.first_layer < 0 else min(layer, self.first_layer)


Differences = dict[tuple[str, str], Difference]
"""(operator, "prefill" or "decode") -> what was found."""


class Taps(Protocol):
    """What sees every operator's output on its way."""

    def see(self, layer: int, operator: str, actor: Tensor) -> Tensor:
        """Take [T, width] of a layer (-1: none) and return what goes on; rows behind the sequence are padding."""
        ...

    def has(self, layer: int, operator: str) -> bool:
        """Whether this operator is there in the model."""
        ...


class _Comparison:
    """Compares one sequence's outputs and, where `forced`, puts the engine's in their place."""

    def __init__(self, sequence: dict[str, Any], device: torch.device, forced: bool, found: Differences) -> None:
        self._outputs = {name: tensor.to(device) for name, tensor in sequence["outputs"].items()}
        self._num_prompt, self._forced, self._found = sequence["num_prompt"], forced, found

    def see(self, layer: int, operator: str, actor: Tensor) -> Tensor:
        """Compare and, where forced, put the engine's in its place; see `Taps`."""
        engine = self._outputs[operator if layer < 0 else key(layer, operator)]
        rows = engine.shape[0]
        mine = actor.detach()[:rows]
        for phase, part in (("prefill", slice(0, self._num_prompt)), ("decode", slice(self._num_prompt, rows))):
            self._found.setdefault((operator, phase), Difference()).add(mine[part], engine[part], layer)
        return torch.cat((engine.to(actor.dtype), actor[rows:])) if self._forced else actor

    def has(self, layer: int, operator: str) -> bool:
        return key(layer, operator) in self._outputs


class _RopeTap:
    """Stands in a core attention's rope: the first call rotates q, the second k."""

    def __init__(self, rope: Any, comparison: Taps, layer: int) -> None:
        self._rope, self._comparison, self._layer, self._calls = rope, comparison, layer, 0

    def rotate(self, x: Tensor, *args: Any) -> Tensor:
        """Rotate x [T, heads, D], compare, pass on."""
        out = self._rope.rotate(x, *args)
        name = ("q_rope", "k_rope")[self._calls % 2]
        self._calls += 1
        return self._comparison.see(self._layer, name, out.flatten(1)).view(out.shape)


class _Grouped:
    """Megatron's fused qkv, one [queries | key | value] for each kv head, and back from [q | k | v]."""

    def __init__(self, actor: Actor) -> None:
        arch = actor.arch
        self.kv, self.queries, self.dim = arch.num_kv_heads, arch.num_heads // arch.num_kv_heads, arch.head_dim

    def apart(self, fused: Tensor) -> Tensor:
        parts = fused.view(-1, self.kv, self.queries + 2, self.dim).split((self.queries, 1, 1), dim=2)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def fused(self, apart: Tensor) -> Tensor:
        widths = [self.kv * n * self.dim for n in (self.queries, 1, 1)]
        parts = [part.view(-1, self.kv, part.shape[1] // (self.kv * self.dim), self.dim) for part in apart.split(widths, dim=1)]
        return torch.cat(parts, dim=2).flatten(1)


@contextmanager
def _tapped(model: Any, actor: Actor, comparison: Taps) -> Iterator[None]:
    """Hook every operator of the actor's model for the length of a forward; its steps run one by one, with BF16 in between."""
    handles: list[Any] = []
    ropes: list[tuple[Any, Any]] = []
    grouped = _Grouped(actor)

    def flat(layer: int, operator: str, tensor: Tensor, width: int) -> Tensor:
        return comparison.see(layer, operator, tensor.reshape(-1, width)).view(tensor.shape)

    def after(module: Any, layer: int, operator: str) -> None:
        def hook(_m: Any, _i: Any, out: Any) -> Any:
            first = out[0] if isinstance(out, tuple) else out
            seen = flat(layer, operator, first, first.shape[-1])
            return (seen, *out[1:]) if isinstance(out, tuple) else seen

        handles.append(module.register_forward_hook(hook))

    def after_heads(module: Any, layer: int, operator: str, width: int) -> None:
        handles.append(module.register_forward_hook(lambda _m, _i, out: flat(layer, operator, out, width)))

    def after_qkv(module: Any, layer: int) -> None:
        def hook(_m: Any, _i: Any, out: Any) -> Any:
            seen = comparison.see(layer, "qkv", grouped.apart(out[0].flatten(0, 1)))
            return (grouped.fused(seen).view(out[0].shape), *out[1:])

        handles.append(module.register_forward_hook(hook))

    def before(module: Any, layer: int, operator: str) -> None:
        def hook(_m: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (flat(layer, operator, inputs[0], inputs[0].shape[-1]), *inputs[1:])

        handles.append(module.register_forward_pre_hook(hook))

    for number, layer in enumerate(model.decoder.layers):
        attention = layer.self_attention
        after(layer.input_layernorm, number, "attn_norm")
        after_qkv(attention.linear_qkv, number)
        if comparison.has(number, "q_norm"):
            after_heads(attention.q_layernorm, number, "q_norm", actor.arch.num_heads * actor.arch.head_dim)
            after_heads(attention.k_layernorm, number, "k_norm", actor.arch.num_kv_heads * actor.arch.head_dim)
        core = attention.core_attention
        ropes.append((core, core.rope))
        core.rope = _RopeTap(core.rope, comparison, number)
        after(core, number, "attention")
        after(attention.linear_proj, number, "o")
        before(layer.pre_mlp_layernorm, number, "residual")
        after(layer.pre_mlp_layernorm, number, "mlp_norm")
        after(layer.mlp.linear_fc1, number, "gate_up")
        before(layer.mlp.linear_fc2, number, "swiglu")
        after(layer.mlp.linear_fc2, number, "down")
    after(model.decoder.final_layernorm, -1, FINAL_NORM)
    try:
        with actor.sides.in_bf16_steps():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for core, rope in ropes:
            core.rope = rope


def compare(actor: Actor, sequences: list[dict[str, Any]], *, temperature: float, forced: bool) -> Differences:
    """Run the training forward over every recorded sequence; `forced` gives the view `alone`. The actor is on one rank.

    Behind taps a layer's steps run one by one. In place, logits and log-probs are of the forward without taps, as training runs it.
    """
    found: Differences = {}
    for sequence in sequences:
        logits, logp = forward(actor, sequence, temperature, _Comparison(sequence, actor.device, forced, found))
        if not forced:
            logits, logp = forward(actor, sequence, temperature, None)
        engine = sequence["outputs"][LOGITS].to(logits.device)[:, : logits.shape[1]]
        found.setdefault((LOGITS, "decode"), Difference()).add(logits, engine.to(logits.dtype), -1)
        found.setdefault((LOGPROB, "decode"), Difference()).add(logp, torch.tensor(sequence["logprobs"], device=logp.device), -1)
    return found


@torch.no_grad()  # with gradients fc1 and SwiGLU run as one function, and no hook sees what passes between them
def forward(actor: Actor, sequence: dict[str, Any], temperature: float, taps: Taps | None) -> tuple[Tensor, Tensor]:
    """Run one sequence through the model, tapped where there are taps.

    Returns undivided logits [drawn, V] and log-probs [drawn] of the drawn tokens, float32.
    """
    model: PolicyModel = actor.chunks[0].eval()
    entered = sequence["tokens"][:-1]  # the last drawn token never enters an engine
    total = -(-len(entered) // _ROWS) * _ROWS
    context, positions = packed_context([len(entered)], total, actor.device)
    tokens = torch.tensor([*entered, *[0] * (total - len(entered))], device=actor.device)
    with megatron_scope(actor.device), nullcontext() if taps is None else _tapped(model, actor, taps):
        hidden = model(tokens[None], positions[None], None, packed_seq_params=context).squeeze(1)
    drawing = hidden[sequence["num_prompt"] - 1 : len(entered)]
    shard, weight = head_shard(model, actor.arch.vocab_size), model.head_weight()
    labels = torch.tensor(sequence["tokens"][sequence["num_prompt"] :], device=actor.device)
    logp, _ = token_logprobs(drawing, weight, labels, shard, temperature)
    return head_logits(drawing, weight, shard, 1.0)[:, : shard.valid], logp
