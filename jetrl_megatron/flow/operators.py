"""Names of a layer's operators, the same for both engines, in the order in which a layer runs them.

`residual` is the stream that the MLP's norm reads; q, k and v lie beside each other ([q | k | v], heads in order), gate before up.
"""

LAYER_OPERATORS = (
    "attn_norm",
    "qkv",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "attention",
    "o",
    "residual",
    "mlp_norm",
    "gate_up",
    "swiglu",
    "down",
)
FINAL_NORM, LOGITS, LOGPROB = "final_norm", "logits", "logprob"


def key(layer: int, operator: str) -> str:
    """Return the name under which one layer's output is stored."""
    return f"{layer}.{operator}"
