"""Timings against BF16 and, for kernels and linears, against other libraries, in one run, each checked first where there is a reference.

Files: timing.py (how a number is measured, and on what machine) <- shapes.py (which layers) <- rivals.py (torchao, Transformer Engine
and vLLM's quantiser, where installed) and timed_actor.py (a model and its batches) <- quant.py, linear.py, step.py (one command each);
engine_arms.py (a recipe with a vLLM pool, arm after arm), random_worker.py (weights that a server draws itself) <- servers.py (a pool
without an actor), precompile.py (a server's kernels, before they are timed) <- rollout.py, sync.py
<- __main__.py (`python -m jetrl_megatron.bench NAME`).
Options that `rollout` and `sync` share are in engine_arms.py, those of one of them in its own file; what `--servers-only` refuses is in
servers.py.
Every command has `main(argv)`, returns an exit code (1 where a check fails), prints a table, and with `--json FILE` appends one JSON
object a line.
"""
