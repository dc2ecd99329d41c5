"""`python -m jetrl_megatron.bench quant|linear|step|rollout|sync [options]`."""

import sys

from jetrl_megatron.bench import linear, quant, step


def _rollout(argv: list[str]) -> int:
    from jetrl_megatron.bench import rollout  # needs vLLM, unlike the others

    return rollout.main(argv)


def _sync(argv: list[str]) -> int:
    from jetrl_megatron.bench import sync

    return sync.main(argv)


COMMANDS = {"quant": quant.main, "linear": linear.main, "step": step.main, "rollout": _rollout, "sync": _sync}


def main(argv: list[str]) -> int:
    """Run the benchmark that argv[0] names with the rest as its options; returns its exit code, 2 for an unknown name."""
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m jetrl_megatron.bench {{{'|'.join(COMMANDS)}}} [options]", file=sys.stderr)
        return 2
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
