"""`python -m jetrl_megatron.bench quant|linear|step|rollout|sync [options]`."""

import importlib
import sys

COMMANDS = ("quant", "linear", "step", "rollout", "sync")
"""Modules of this package, imported when named: each needs other packages (vLLM, Megatron-core)."""


def main(argv: list[str]) -> int:
    """Run the benchmark that argv[0] names with the rest as its options; returns its exit code, 2 for an unknown name."""
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m jetrl_megatron.bench {{{'|'.join(COMMANDS)}}} [options]", file=sys.stderr)
        return 2
    module = importlib.import_module(f"jetrl_megatron.bench.{argv[0]}")
    code: int = module.main(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
