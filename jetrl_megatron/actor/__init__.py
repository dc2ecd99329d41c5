"""The policy on Megatron-core, in the unified precision flow.

In the order the data flows:
- `device`, `cpu_device`: where a rank runs; the one file that lets Megatron-core run without a GPU.
- `parallel_state`: process groups. `model`, `spec`: GPTModel and the only place where its classes are swapped.
- `embedding`, `norm`, `rope`, `self_attention`, `attention`, `linears`, `mlp`, `packed`: the operators of the precision flow; on a GPU
  `flash`, `flash_backward`, `triton_rope`.
- `sides`: which precision each linear runs on the training and on the rollout side; the weight caches.
- `logprobs`, `pipeline_step`: vocab-parallel log-probs (on a GPU `fused_logprobs`, `triton_logprobs`, and for rows that
  ranks share `triton_vocab_blocks`), and the schedules that run micro-batches.
- `optimizer` (`optimizer_state`: what a checkpoint holds of it), `actor`: AdamW with FP32 masters, and the object that the loop holds.
"""
