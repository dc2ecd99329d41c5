"""On-policy FP8 reinforcement learning on Megatron-core: rollout and training are one model, bit for bit.

The tour, in the order the data flows; each package's docstring says which file holds what:

- `config`, `config_rl`, `config_vllm`, `choices`: the recipe as frozen dataclasses. `load`: YAML and `key=value` to a recipe. `layout`:
  which recipes are legal for a model's dimensions. `contracts`: what passes between the stages below.
- `data`: prompts and their order. `fp8`: the quantiser, the three GEMMs, the weight cache; a leaf, torch only.
- `actor`: the policy on Megatron-core. `rollout`: engines that draw completions with its weights. `sync`: its bytes to every engine,
  verified before they serve.
- `grpo`: rewards, advantages, batches, loss, mismatch.
- `loop`: the parts of one run; `train`: the loop itself; `evaluate`: a model on a benchmark; `metrics`: what a step reports.
- `flow`: every operator of vLLM against the actor's.
- `run`: run directory, checkpoints, signals, records, report, local launch.
- `cli`, `expected_warnings`: the command `jetrl`. `failure`: the error that ends it with one line.
- `bench`: timings of kernels, linears, the update step and engines.

The sibling package `conversion` moves weights between Hugging Face and any layout of the actor. Nothing is imported here.
"""
