"""`jetrl bench quant|linear|step|rollout|sync [options]`, also `python -m jetrl_megatron.bench ...`."""

import importlib
import sys

COMMANDS = {
    "quant": "the FP8 quantisers and SwiGLU, byte for byte against their reference, and their share of copy bandwidth",
    "linear": "a layer's linears, forward + backward, against BF16, Transformer Engine and torchao",
    "step": "the actor's update step and its reference forward, BF16 against FP8",
    "rollout": "tokens a second of a recipe's vLLM servers, BF16 against FP8",
    "sync": "seconds of a verified weight push to them",
}
"""Modules of this package, imported when named: each needs other packages (vLLM, Megatron-core)."""


def main(argv: list[str]) -> int:
    """Run the benchmark that argv[0] names with the rest as its options; returns its exit code, 2 for an unknown name, 0 for --help."""
    if not argv or argv[0] not in COMMANDS:
        lines = [f"usage: jetrl bench {{{'|'.join(COMMANDS)}}} [options]    (NAME --help for its options)"]
        lines += [f"  {name:8} {what}" for name, what in COMMANDS.items()]
        asked = argv[:1] in (["-h"], ["--help"])
        print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    module = importlib.import_module(f"jetrl_megatron.bench.{argv[0]}")
    code: int = module.main(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
