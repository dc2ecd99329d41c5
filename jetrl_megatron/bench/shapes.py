"""The shapes that are timed: dimensions of a decoder layer, and (N, K) of its four fused linears at TP 1."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Dimensions of one dense decoder layer."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    num_layers: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) by name: fused q, k, v; attention output; fused gate and up; down."""
        attention = self.num_heads * self.head_dim
        return {
            "qkv": (attention + 2 * self.num_kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, attention),
            "fc1": (2 * self.ffn, self.hidden),
            "fc2": (self.hidden, self.ffn),
        }


MODELS = {
    "qwen3-8b": DecoderShape(hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=12288, num_layers=36),
    "qwen3-14b": DecoderShape(hidden=5120, num_heads=40, num_kv_heads=8, head_dim=128, ffn=17408, num_layers=40),
    "qwen3-32b": DecoderShape(hidden=5120, num_heads=64, num_kv_heads=8, head_dim=128, ffn=25600, num_layers=64),
}
"""By name, from the models' published configurations."""
VOCAB = 151_936
MAX_POSITIONS = 40_960
"""Of all three."""
