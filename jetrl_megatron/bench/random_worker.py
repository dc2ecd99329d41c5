"""What a bench of servers alone adds to a vLLM worker process: it draws weights where it computes, in the place of a push.

Enters: one call over `/collective_rpc`. Leaves: a model full of random canonical (Hugging Face) tensors, which take the way of a push's
(written in place or through vLLM's loader), and the fingerprints of what was drawn, so that the pool verifies a server as behind a push.
Codes use most of E4M3's range and matrices look trained: vLLM's own dummies are nearly zero, and zeros draw less power, so that a GPU
clocks higher and its timings are too good. One seed gives one model on all workers of a kind of device, and, but for the rounding to FP8,
in all arms.
Left out: parameters that are no canonical tensor. They are named in the answer, and whoever asked refuses them.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from conversion.architecture import ModelArchitecture
from conversion.names import LM_HEAD
from conversion.shards import StoredTensor, hf_tensors, vllm_tensors
from jetrl_megatron.rollout.compat import begin_reload, end_reload, worker_model, worker_tp_rank
from jetrl_megatron.rollout.fingerprint import Algorithm
from jetrl_megatron.rollout.held_views import fp8_linears
from jetrl_megatron.rollout.published import Fingerprints
from jetrl_megatron.rollout.vllm_in_place import InPlaceWriter
from jetrl_megatron.rollout.vllm_worker import WeightReader

NAME = f"{__name__}.RandomWeights"
_CODE_STD, _CODE_MAX = 100.0, 448.0
_SCALE = 2.0**-12
"""Of every block, for weights of a standard deviation of 0.024; a power of two is a scale in either format."""
_STD = _CODE_STD * _SCALE
"""Of BF16 matrices."""


class RandomWeights(WeightReader):
    """WeightReader that can fill its model by itself."""

    @torch.no_grad()
    def jetrl_random_weights(self, config: dict[str, Any], algorithm: str, in_place: bool, seed: int) -> dict[str, Any]:
        """Return `rank`, `expected` and `unsigned` (see published.Expected, of this rank), `fp8_linears` (names), `unknown` parameters.

        config, algorithm: see `WeightReader.jetrl_fingerprints`. in_place: write into the parameters; else vLLM's loader takes the tensors.
        Nothing is drawn where there are unknown parameters.
        """
        model, worker = worker_model(self), cast(Any, self)
        arch, fp8 = ModelArchitecture.from_hf_config(config), fp8_linears(model)
        tp, rank = worker.parallel_config.tensor_parallel_size, worker_tp_rank()
        report: dict[str, Any] = {"rank": rank, "fp8_linears": sorted(fp8), "unknown": unknown_parameters(model, arch, tp, fp8)}
        if report["unknown"]:
            return report
        prints = Fingerprints(arch, tp, fp8, cast(Algorithm, algorithm))
        tensors = _hashed(random_tensors(arch, fp8, worker.device, seed), prints)
        if in_place:
            InPlaceWriter(self._jetrl_held(model, config)).write(tensors)
        else:
            begin_reload(model)
            cast(Any, model).load_weights(tensors)
            end_reload(model, self)
        expected, unsigned = prints.take()
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()  # what the draws took is not the engine's, which has measured its share
        return report | {"expected": expected[rank], "unsigned": unsigned}


def unknown_parameters(model: torch.nn.Module, arch: ModelArchitecture, tp: int, fp8: frozenset[str]) -> list[str]:
    """Return the names of a vLLM model's parameters that canonical tensors do not fill."""
    stored = vllm_tensors(arch, tp, fp8)
    known = {name for tensor in stored for name in ((tensor.name, tensor.scale_name) if tensor.fp8 else (tensor.name,))}
    if arch.tie_embeddings:
        known |= {LM_HEAD}  # a CPU's head multiplies by a packed copy, made anew of the embedding's rows when the pool verifies
    return sorted(name for name, _ in model.named_parameters() if name not in known)


def random_tensors(arch: ModelArchitecture, fp8: frozenset[str], device: torch.device, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draw the canonical tensors of a model one by one, each FP8 linear's scales behind its codes; vectors are ones, biases zeros."""
    generator = torch.Generator(device).manual_seed(seed)
    for stored in hf_tensors(arch, fp8):
        yield stored.name, _drawn(stored, device, generator)
        if stored.fp8:
            yield stored.scale_name, torch.full(stored.scale_shape, _SCALE, dtype=torch.float32, device=device)


def _drawn(stored: StoredTensor, device: torch.device, generator: torch.Generator) -> Tensor:
    x = torch.empty(stored.shape, dtype=torch.bfloat16, device=device)  # and never in FP32: an embedding would take gigabytes
    if stored.fp8:
        return x.normal_(0.0, _CODE_STD, generator=generator).clamp_(-_CODE_MAX, _CODE_MAX).to(torch.float8_e4m3fn)
    if len(stored.shape) > 1:
        return x.normal_(0.0, _STD, generator=generator)
    return x.fill_(0.0 if stored.name.endswith("bias") else 1.0)


def _hashed(tensors: Iterator[tuple[str, Tensor]], prints: Fingerprints) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        prints.add(name, tensor)
