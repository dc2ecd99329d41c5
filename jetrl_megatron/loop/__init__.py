"""The parts of one run, behind `train.py`, in the order the data flows.

- `synthetic_model`: a random-weight HF directory, for runs that name no checkpoint.
- `setup`: recipe -> ranks, run directory, tokenizer, prompts, actor, engine, rewards: one `Session`. `checks`: what of them must agree.
- `vllm_setup`: the vLLM servers of a session and the publisher that keeps them current, where the recipe asks for them. `colocated`: which
  server stands on which GPUs where they share the actor's.
- `warm_start`: the short supervised run before step 0. `replicas`: sharing plain values over data-parallel and model-parallel ranks.
- `rollouts`: what a step learns from, and its form in a checkpoint.
- `collect`: prompts -> completions -> rewards, with dynamic sampling. `ahead`: the same beside the update.
- `learn`: samples -> log-probs -> optimizer steps -> metrics.
- `persist`: checkpoints of a session and the HF export. `held_out`: evaluation on prompts that are not trained on.
"""
