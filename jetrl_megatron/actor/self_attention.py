"""Megatron-core's self-attention with q normalised where the linear wrote it.

    [q .. q k v] of each kv head = linear_qkv(x);   q, k = norm(q), norm(k)

Enters: [T/TP, 1, H] (sequence parallel) or [T, 1, H] BF16. Leaves: q, k, v before rope, [T, 1, heads, D]. Megatron's own splitting copies q
together before the norm reads it, 2 bytes an element read, written and kept for the backward; the norm writes a new tensor anyhow and
reads rows at any stride. Invariant: the same rows in the same order, so the same bits as Megatron's.
Without a norm on q and k (Llama, Qwen2) the copy is still made here: rope takes the heads of a token at one stride.
"""

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class FlowSelfAttention(SelfAttention):
    """Megatron's SelfAttention; the TP degree must divide the number of kv heads, as every legal layout's does."""

    def get_query_key_value_tensors(self, hidden_states: Tensor, key_value_states: Tensor | None = None, **_: Any) -> Any:
        """Return query [T, 1, Hq/TP, D], key and value [T, 1, Hkv/TP, D]; the options are of models that this project does not have."""
        mixed, widths = super().get_query_key_value_tensors(hidden_states, key_value_states, split_qkv=False)
        query, key, value = mixed.split(widths, dim=3)  # [T, 1, Hkv/TP, heads of a group * D]
        heads = query.unflatten(3, (-1, self.hidden_size_per_attention_head))
        return self.q_layernorm(heads).flatten(2, 3), self.k_layernorm(key), value
