"""Between sampled completions and gradients: score, compare within the group, cut into batches, weigh the tokens.

In the order the data flows:

- `extraction.py`: completion text to the answer string it states (the one rule: box, `####`, "answer is", last number).
- `answers.py`: answer string to a normal form: commas, percent, units, plain numbers, parts of a multi-part answer.
- `equality.py`: gold against answer; the symbolic part uses math-verify and is only imported inside reward workers.
- `reward_worker.py`: the process that scores one sample at a time; `worker_pool.py`: the processes and their kill switch.
- `rewards.py`: `RewardPool`, what the loop calls; `gold_parses`, what the data loader calls.
- `advantages.py`: rewards to advantages by group, overlong handling, the dynamic-sampling predicate.
- `packing.py`: which sequence goes into which micro-batch of which data-parallel rank (pure); `batch.py`: the `TrainBatch` tensors.
- `loss.py`: the clipped policy loss with KL and corrections, and the supervised loss of the warm start.
- `mismatch.py`: how far the rollout's log-probs are from the actor's. `staleness.py`: how old the tokens are, and the limit.

Nothing is imported here, so that a reward worker starts without torch.
"""
