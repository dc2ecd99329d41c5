"""The actor's weights to every engine, once per optimizer step: the bytes that were quantised once, verified where they arrived.

In the order the data flows:

- `wire`: this rank's shards -> canonical (Hugging Face) tensors on the leader of each pipeline stage, gathered within TP only, and put
  together by `rectangles`. The wire format is the checkpoint format: `X.weight` E4M3 with `X.weight_scale_inv` FP32, or BF16; each
  receiver slices and packs for itself.
- `transport`: what every transport does, and what it may not do. `disk`: a directory that servers reload from (CPUs, far-away pools).
  `cuda`: NCCL through vLLM's weight-transfer API, to other GPUs. `ipc`: CUDA IPC to workers on the actor's own GPUs, several servers
  through `relay`, one bucket ahead of them.
- `publish`: one push, on all ranks: send, let every server verify, only then move the version.

Invariant: no completion carries version v+1 before every server of the pool has reported the fingerprints of v+1 for every tensor it
computes with. A missing, an unknown or a differing tensor fails the push and is named.
"""
