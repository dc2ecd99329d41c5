"""Checkpoints between Hugging Face, the Megatron actor and a vLLM engine, as moves of bytes that never change a bit.

Every layout is described against one canonical space, the tensors of the Hugging Face checkpoint: a stored tensor is a list of
rectangles of canonical tensors. A plan is the intersection of two such descriptions, so adding a layout is adding a description and
adding a family is adding a table. FP8 codes and their block scales travel in the same operation.

In the order the data flows:

- `architecture`  a `config.json` as a checked, torch-free dataclass
- `layout`        how a model is cut over TP, PP and VPP; which cuts are legal, and which TP degrees would be
- `names`         one table a family: Hugging Face names and shapes, Megatron names, how each is cut
- `shards`        what each rank stores, as pieces of canonical tensors: Hugging Face, Megatron ranks, `torch_dist`, vLLM ranks
- `plan`          the pure planner: two descriptions in, copy operations out, every destination element written once
- `reading`       parsing of small files that others wrote: what is wrong in one is a ValueError that names it
- `files`         safetensors as bytes: rectangles read, tensors written at their offset
- `scales`        block scales in FP32, BF16 or e8m0 read as FP32
- `quantization_config`
                  which linears are FP8, in config.json and in the tensors
- `inert_pickle`  pickles read as data, so that a foreign file cannot run code
- `torch_dist_chunk`
                  one tensor inside a `.distcp` file: where its bytes lie, dtype, shape, checksum
- `torch_dist_reader`
                  a `torch_dist` directory of Megatron-core, read by rectangles
- `checkpoint`    a directory opened and checked: Hugging Face, Megatron rank shards, or `torch_dist`
- `output`        a directory written beside its place, resumable, then renamed into it; carried files, manifest
- `replaceable`   which directories the writer may touch
- `cast`          the two explicit changes of precision, FP8 -> BF16 and BF16 -> FP8
- `assemble`      one target tensor in memory, from rectangles of the source; copies of one weight compared
- `torch_dist_writer`
                  `.distcp` files and `.metadata` as Megatron-core loads them
- `targets`       one class for each kind of checkpoint that can be written
- `execute`       runs a plan with bounded memory, file by file
- `convert`       one checkpoint to another, whole
- `verify`        the first difference between two checkpoints of any kinds, or between one and its manifest
- `actor_io`      what the actor calls: its own shard of a Hugging Face directory in, its own shard out, merge
- `random_checkpoint`
                  a Hugging Face directory of random bytes, to measure and test with
- `bench`         speed and memory of a conversion against `cp`
- `cli`           `python -m conversion to-megatron | to-hf | reshard | verify | bench`

Only `actor_io`, `cast` and `torch_dist_writer` need torch, none needs Megatron.
"""
