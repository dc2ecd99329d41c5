"""`jetrl bench rollout`: completion tokens a second of the recipe's vLLM servers, FP8 against BF16 in one run.

Enters: a recipe and the load. Leaves: one row an arm. Prompts are random ids, completions have a fixed length (no token ends one), so that
the arms draw equally many tokens. The first rounds warm kernels and graphs up and are not counted: DeepGEMM compiles a kernel for each new
range of rows, for seconds, so an arm is warm only when its rounds no longer get faster; the row shows the seconds of every round.
`--precompile` compiles them beforehand, several at a time (precompile.py).
Checked: every server holds the actor's bytes (the push verifies), every completion has its length.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

from conversion.layout import fp8_modules
from jetrl_megatron.bench.engine_arms import Record, parser, run_arms
from jetrl_megatron.bench.precompile import precompile, server_linears
from jetrl_megatron.bench.sync import pushed, wire_of
from jetrl_megatron.bench.timing import positive, require_cuda
from jetrl_megatron.config import LinearPrecision, Recipe
from jetrl_megatron.contracts import Prompt, SamplingParams
from jetrl_megatron.layout import architecture_of
from jetrl_megatron.loop.setup import Session
from jetrl_megatron.rollout.engine import Request


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit code."""
    options = parser("rollout", "Rollout throughput of the vLLM servers, FP8 against BF16.")
    options.add_argument("--prompts", type=positive, default=256)
    options.add_argument("--prompt-toks", type=positive, default=512)
    options.add_argument("--new-toks", type=positive, default=512)
    options.add_argument("--rounds", type=positive, default=3, help="counted rounds")
    options.add_argument("--warm-up-rounds", type=positive, default=3, help="rounds before them")
    options.add_argument(
        "--pushes", type=positive, help="then time this many weight pushes as bench sync does, without another start of the servers"
    )
    options.add_argument("--precompile", action="store_true", help="compile the FP8 kernels of the servers' linears first, in parallel")
    return run_arms("rollout", options, argv, measure, prepare)


def prepare(recipes: Sequence[Recipe], args: argparse.Namespace) -> None:
    """Compile the kernels of the arms' FP8 linears, where asked for; raises ValueError where there is no CUDA device for them."""
    in_fp8 = [recipe for recipe in recipes if recipe.precision.rollout_linear is LinearPrecision.fp8]
    if args.precompile and in_fp8:
        require_cuda("bench rollout --precompile")
        recipe = in_fp8[0]  # the arms differ in precision.arm alone: one model, the same servers
        arch = architecture_of(recipe.model)
        seconds = precompile(server_linears(arch, recipe.rollout.vllm.tp, fp8_modules(arch, recipe.precision.bf16_layers)))
        print(f"kernels compiled in {seconds:.0f} s", file=sys.stderr, flush=True)


def measure(session: Session, args: argparse.Namespace) -> Record:
    """Push once, draw round after round, and push as often as asked."""
    assert session.publisher is not None
    wire = wire_of(session) if args.pushes else None
    session.publisher.push()
    params = SamplingParams(max_new_toks=args.new_toks, temperature=session.recipe.rollout.temperature)
    seconds = []
    for number in range(args.warm_up_rounds + args.rounds):
        requests = make_requests(number, args.prompts, args.prompt_toks, session.arch.vocab_size)
        mine = requests[session.ranks.dp_rank :: session.ranks.dp]
        start_s = time.perf_counter()
        drawn = session.engine.generate(mine, params, seed=number)
        seconds.append(time.perf_counter() - start_s)
        if session.ranks.is_logger:
            print(f"round {number + 1} of {args.warm_up_rounds + args.rounds}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
        assert [len(c.token_ids) for c in drawn] == [args.new_toks] * len(mine), "a completion has another length"
    rates = [args.prompts * args.new_toks / s for s in seconds[args.warm_up_rounds :]]
    record: Record = {
        "toks_a_s": statistics.median(rates),
        "toks_a_s_min": min(rates),
        "toks_a_s_max": max(rates),
        "rounds_s": [round(s, 2) for s in seconds],
        "prompts": args.prompts,
        "prompt_toks": args.prompt_toks,
        "new_toks": args.new_toks,
    }
    return record | (pushed(session, args.pushes, wire) if args.pushes else {})


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
