"""`jetrl bench rollout`: completion tokens a second of the recipe's vLLM servers, FP8 against BF16 in one run.

Enters: a recipe and the load. Leaves: one row an arm. Prompts are random ids, completions have a fixed length (no token ends one), so that
the arms draw equally many tokens. The first rounds warm kernels and graphs up and are not counted: DeepGEMM compiles a kernel for each new
range of rows, for seconds, so an arm is warm only when its rounds no longer get faster; the row shows the seconds of every round.
`--precompile` compiles them beforehand, several at a time (precompile.py).
`--servers-only` builds no actor, so that a shape that does not fit beside one is measured too: the servers draw their weights (servers.py).
Checked: every server holds the actor's bytes (the push verifies), or what it has drawn itself, with the arm's linears in FP8; every
completion has its length.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from conversion.architecture import ModelArchitecture
from jetrl_megatron.bench.engine_arms import Record, parser, place, run_arms, with_actor
from jetrl_megatron.bench.precompile import precompile, server_linears
from jetrl_megatron.bench.servers import check_servers_only, servers_alone
from jetrl_megatron.bench.sync import pushed, wire_of
from jetrl_megatron.bench.timing import positive, require_cuda
from jetrl_megatron.config import LinearPrecision, Recipe
from jetrl_megatron.contracts import Prompt, SamplingParams
from jetrl_megatron.layout import architecture_of
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.rollout.engine import Request, RolloutEngine
from jetrl_megatron.sync.wire import server_fp8


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    options = parser("rollout", "Rollout throughput of the vLLM servers, FP8 against BF16.")
    options.add_argument("--prompts", type=positive, default=256, help="of one round, all at once; default: %(default)s")
    options.add_argument("--prompt-toks", type=positive, default=512, help="tokens of each prompt, random ones; default: %(default)s")
    options.add_argument("--new-toks", type=positive, default=512, help="tokens drawn for each; default: %(default)s")
    options.add_argument("--rounds", type=positive, default=3, help="counted rounds; default: %(default)s")
    options.add_argument("--warm-up-rounds", type=positive, default=3, help="rounds before them; default: %(default)s")
    options.add_argument(
        "--pushes", type=positive, help="then time this many weight pushes as bench sync does, without another start of the servers"
    )
    options.add_argument("--precompile", action="store_true", help="compile the FP8 kernels of the servers' linears first, in parallel")
    options.add_argument(
        "--servers-only", action="store_true", help="build no actor: the servers draw their own weights, nothing is pushed"
    )
    return run_arms("rollout", options, argv, measure_arm, prepare)


def prepare(recipes: Sequence[Recipe], args: argparse.Namespace) -> None:
    """Compile the kernels of the arms' FP8 linears, where asked for.

    Raises ValueError where there is no CUDA device for them, for sequences that the model has no positions for, and for what
    `--servers-only` does not go with.
    """
    arch = architecture_of(recipes[0].model)  # the arms differ in precision.arm alone: one model, the same servers
    length = args.prompt_toks + args.new_toks
    if length > arch.max_positions:
        raise ValueError(
            f"--prompt-toks {args.prompt_toks} and --new-toks {args.new_toks} make {length} tokens and the model has {arch.max_positions} "
            "positions: lower one of them"
        )
    if args.servers_only:
        check_servers_only(recipes[0], arch, args)
    in_fp8 = [recipe for recipe in recipes if recipe.precision.rollout_linear is LinearPrecision.fp8]
    if args.precompile and in_fp8:
        require_cuda("bench rollout --precompile")
        seconds = precompile(server_linears(arch, in_fp8[0].rollout.vllm.tp, server_fp8(in_fp8[0], arch)))
        print(f"kernels compiled in {seconds:.0f} s", file=sys.stderr, flush=True)


def measure_arm(recipe: Recipe, args: argparse.Namespace) -> Record | None:
    """Measure one arm, with its actor or without."""
    return measure_servers(recipe, args) if args.servers_only else with_actor(measure)(recipe, args)


def measure_servers(recipe: Recipe, args: argparse.Namespace) -> Record:
    """Let servers draw their weights, then draw round after round; there is no actor."""
    with servers_alone(recipe, args.nproc) as servers:
        servers.fill()
        record = draw_rounds(servers.engine(), servers.arch, recipe.rollout.temperature, args, check=servers.check_complete)
        record |= place(recipe, servers.cfg, servers.arch, servers.device.type == "cuda", num_actors=0)
        return record | {"transport": "none", "weights": "random, no actor", "fp8_linears": len(servers.fp8)}


def measure(session: Session, args: argparse.Namespace) -> Record:
    """Push once, draw round after round, and push as often as asked."""
    assert session.publisher is not None
    wire = wire_of(session) if args.pushes else None
    session.publisher.push()
    ranks = session.ranks
    record = draw_rounds(
        session.engine, session.arch, session.recipe.rollout.temperature, args, (ranks.dp_rank, ranks.dp), says=ranks.is_logger
    )
    return record | (pushed(session, args.pushes, wire) if args.pushes else {})


def draw_rounds(
    engine: RolloutEngine,
    arch: ModelArchitecture,
    temperature: float,
    args: argparse.Namespace,
    replica: tuple[int, int] = (0, 1),
    *,
    says: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Record:
    """Draw and time the rounds on servers that hold weights.

    replica: which of how many replicas this rank draws for. says: whether it reports each round. check: called behind each, may raise.
    """
    params = SamplingParams(max_new_toks=args.new_toks, temperature=temperature)
    seconds = []
    for number in range(args.warm_up_rounds + args.rounds):
        requests = make_requests(number, args.prompts, args.prompt_toks, arch.vocab_size)
        mine = requests[replica[0] :: replica[1]]
        start_s = time.perf_counter()
        drawn = engine.generate(mine, params, seed=number)
        seconds.append(time.perf_counter() - start_s)
        if says:
            print(f"round {number + 1} of {args.warm_up_rounds + args.rounds}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
        check()
        assert [len(c.token_ids) for c in drawn] == [args.new_toks] * len(mine), "a completion has another length"
    rates = [args.prompts * args.new_toks / s for s in seconds[args.warm_up_rounds :]]
    return {
        "toks_a_s": statistics.median(rates),
        "toks_a_s_min": min(rates),
        "toks_a_s_max": max(rates),
        "rounds_s": [round(s, 2) for s in seconds],
        "prompts": args.prompts,
        "prompt_toks": args.prompt_toks,
        "new_toks": args.new_toks,
    }


def make_requests(number: int, num_prompts: int, prompt_toks: int, vocab_size: int) -> list[Request]:
    """Return the requests of one round: random ids, other ones in each round, so that no prefix is cached."""
    draw = random.Random(number)
    prompts = [
        Prompt(
            id=f"{number}/{i}",
            token_ids=tuple(draw.randrange(vocab_size) for _ in range(prompt_toks)),
            text="",
            answer="",
            source="bench",
        )
        for i in range(num_prompts)
    ]
    return [Request(prompt=p, sample_index=0) for p in prompts]
