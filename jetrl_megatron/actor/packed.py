"""What attention must know of a packed micro-batch or of a decoding step: where each sequence lies and which positions its tokens have.

Enters: a TrainBatch, or the local engine's prompts and next tokens. Leaves: a `PackedContext` that travels through Megatron's layers in the
argument `packed_seq_params`, so that no Megatron class needs to change. All lengths are host integers: no device synchronisation.
"""

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


class KVCache:
    """Keys (already rotated) and values of every layer of one pipeline rank, one slot a sequence.

    Args:
        num_slots: sequences held at once.
        max_length: positions a slot.
        dtype: storage type; the local engine on a CPU keeps the wide accumulation type to avoid converting at every step.
    """

    def __init__(self, num_slots: int, max_length: int, dtype: torch.dtype) -> None:
        """Remember the sizes; each layer's tensors are made at its first write."""
        self.num_slots, self.max_length, self.dtype = num_slots, max_length, dtype
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, layer_number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return one layer's tensors [slots, max_length, kv_heads, head_dim]; key, value: [T, kv_heads, head_dim] give the widths."""
        if layer_number not in self._layers:
            shape = (self.num_slots, self.max_length)
            self._layers[layer_number] = (
                key.new_zeros((*shape, *key.shape[1:]), dtype=self.dtype),
                value.new_zeros((*shape, *value.shape[1:]), dtype=self.dtype),
            )
        return self._layers[layer_number]

    def copy_slot(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` positions of one slot into others, in every layer."""
        if targets:
            for pair in self._layers.values():
                for tensor in pair:
                    tensor[targets, :length] = tensor[source, :length]


@dataclass
class PackedContext(PackedSeqParams):
    """Megatron's packed-sequence parameters with positions, host-side segments and, while decoding, the cache."""

    qkv_format: str = "thd"
    positions_T: Tensor | None = None
    """[T] int64; padding tokens have position 0."""
    segments: tuple[tuple[int, int], ...] = ()
    """Start and end of each real sequence in the packed axis; what lies outside is padding and attends to nothing."""
    cu_seqlens: Tensor | None = None
    """[S + 1] int32 on the device: segment bounds, with the padding behind them as one more segment (the GPU kernel wants every row
    covered); None while decoding."""
    num_positions: int = 0
    """Host-side bound, larger than every position and than the padding."""
    cache: KVCache | None = None
    slots_S: Tensor | None = None
    """[S] int64, cache slot of each segment."""
    decode: bool = False
    """True: every segment is one new token that attends to its whole slot; False: segments start at position 0."""
    lengths_S: Tensor | None = field(default=None)
    """[S] int64, tokens in each slot after this step (decode only)."""

    @property
    def num_real_toks(self) -> int:
        """Positions before the padding."""
        return self.segments[-1][1] if self.segments else 0


def packed_context(lengths: list[int], total: int, device: torch.device) -> tuple[PackedContext, Tensor]:
    """Lay sequences of `lengths` end to end in `total` positions; returns the context and positions_T [total] int64.

    Raises:
        AssertionError: when the lengths do not fit into `total`.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    assert starts[-1] <= total, (starts[-1], total)
    pinned = device.type == "cuda"  # from pageable memory a copy would wait for all that the device has to do
    positions = torch.zeros(total, dtype=torch.int64, pin_memory=pinned)
    for start, length in zip(starts, lengths, strict=False):
        positions[start : start + length] = torch.arange(length)
    positions = positions.to(device, non_blocking=True)
    segments = tuple((s, s + n) for s, n in zip(starts, lengths, strict=False))
    bounds = [*starts, total] if starts[-1] < total else starts
    context = PackedContext(
        positions_T=positions,
        segments=segments,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, pin_memory=pinned).to(device, non_blocking=True),
        num_positions=max([1, total - starts[-1], *lengths]),
    )
    return context, positions


def with_zero_padding(out: Tensor, num_real: int, total: int) -> Tensor:
    """Give `total` rows: the first `num_real` of `out`, then zeros, whatever an attention made of the padding (a bias of v is not zero)."""
    if num_real == total:
        return out
    return torch.cat((out[:num_real], out.new_zeros(total - num_real, *out.shape[1:])))
