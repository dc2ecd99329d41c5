"""Warnings of other packages that say nothing about a run here, left out of every rank's standard error.

Enters: nothing. Leaves: filters for exactly the messages below; every other warning is shown as before. Each one is expected: this project
swaps Megatron's norms, linears and losses for its own, so it needs neither Transformer Engine nor Apex; the other two answer arguments that
Megatron-core gives to itself or to torch. Checked on megatron-core 0.16.1 and torch 2.13. pytest's configuration holds the same list.
"""

import warnings

EXPECTED: tuple[tuple[str, type[Warning]], ...] = (
    (r"Transformer Engine and Apex are not installed\. Falling back to ", UserWarning),
    (r"Apex is not installed\. Falling back to Torch Norm", UserWarning),
    (r"full scope is deprecated\. Use empty cuda_graph_scope to capture the whole layer", UserWarning),
    (r"MLP requires ffn_hidden_size, but it was not provided\. Using ", DeprecationWarning),
    (r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated\.", FutureWarning),
)
"""Regular expression of the beginning of the message, and the category."""


def ignore_expected_warnings() -> None:
    """Filter them in this process; call before megatron is imported, because most are raised by its imports."""
    for message, category in EXPECTED:
        warnings.filterwarnings("ignore", message=message, category=category)
