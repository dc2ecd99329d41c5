"""What this project adds to a vLLM worker process: it says which bytes the engine computes with, and loads them by CUDA IPC.

Enters: calls over the server's `/collective_rpc`. Leaves: fingerprints of every rectangle of the canonical (Hugging Face) tensors that this
worker holds, in checkpoint layout, and which of them were read back with negative zeros made positive. vLLM loads the class by name
(`--worker-extension-cls jetrl_megatron.rollout.vllm_worker.WeightReader`) and mixes it into its own worker.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from conversion.architecture import ModelArchitecture
from conversion.names import EMBEDDING
from jetrl_megatron.rollout.bucket import open_bucket
from jetrl_megatron.rollout.compat import (
    begin_reload,
    end_reload,
    prepare_device,
    unlike_numerics,
    worker_model,
    worker_tp_rank,
)
from jetrl_megatron.rollout.compat_weights import embedding_rows, has_packed_head, held_weight, holds_checkpoint_bytes, refresh_tied_head
from jetrl_megatron.rollout.fingerprint import Algorithm, Hashing, unsigned_zero
from jetrl_megatron.rollout.held_views import HeldViews, KeptViews
from jetrl_megatron.rollout.published import HeldRectangle, rectangle
from jetrl_megatron.rollout.vllm_in_place import InPlaceWriter
from jetrl_megatron.rollout.vllm_plugin import registered


class WeightReader:
    """Mixin of vLLM's worker."""

    _jetrl_loading: "_Loading | None" = None
    """Between the first bucket of a push and the last."""
    _jetrl_kept: KeptViews | None = None

    def jetrl_prepare(self) -> dict[str, int]:
        """Make the device ready for the first request; called once behind the start. Returns `context_toks` of the engine.

        Raises RuntimeError where the engine does not run the actor's operators, or was started with other numerics.
        """
        if not registered():
            raise RuntimeError("vLLM did not load the plugin jetrl: is it missing in VLLM_PLUGINS?")
        unlike = unlike_numerics(cast(Any, self).model_config, torch.cuda.is_available())
        if unlike:
            raise RuntimeError(f"the engine was started with other numerics than the run's: {'; '.join(unlike)}")
        self._jetrl_buffers = _buffers(worker_model(self))
        prepare_device()
        return {"context_toks": int(cast(Any, self).model_config.max_model_len)}  # vLLM's route makes text of a bare number

    @torch.no_grad()
    def jetrl_load(self, bucket: dict[str, Any], in_place: dict[str, Any] | None = None) -> None:
        """Load one bucket of whole canonical tensors from a buffer of the actor on this worker's GPU; see `rollout/bucket.py`.

        The first one of a push readies the model for all, the last one completes it. in_place: the model's config.json, as the actor reads
        it, with the first bucket, where weights are written into the parameters straight from the buffer; None where vLLM's loader takes
        copies of them. Raises RuntimeError for a bucket whose push has not begun here.
        """
        model, worker = worker_model(self), cast(Any, self)
        if bucket["first"]:
            self._jetrl_loading = _Loading(writer=None if in_place is None else InPlaceWriter(self._jetrl_held(model, in_place)))
            if in_place is None:
                begin_reload(model)
        loading = self._jetrl_loading
        if loading is None:
            raise RuntimeError("a bucket came whose push has not begun in this worker")
        if loading.writer is not None:
            loading.writer.write(open_bucket(bucket, worker.device, loading.opened, copies=False))
        else:
            cast(Any, model).load_weights(open_bucket(bucket, worker.device, loading.opened))
        torch.accelerator.synchronize()  # from here on the buffer is the actor's again
        if bucket["last"]:
            self._jetrl_loading = None
            if loading.writer is None:
                end_reload(model, self)

    def _jetrl_held(self, model: torch.nn.Module, config: dict[str, Any]) -> HeldViews:
        self._jetrl_kept = self._jetrl_kept or KeptViews()
        tp = cast(Any, self).parallel_config.tensor_parallel_size
        return self._jetrl_kept.of(model, ModelArchitecture.from_hf_config(config), tp, worker_tp_rank())

    @torch.no_grad()
    def jetrl_fingerprints(self, config: dict[str, Any], algorithm: str, refresh: bool, slept: bool) -> dict[str, Any]:
        """Return `rank`, `held` (rectangle -> fingerprint), `unsigned_zeros` (rectangle names), `fp8_linears` and `changed_buffers`.

        config: the model's config.json, as the actor reads it. algorithm: see fingerprint.py. refresh: first bring up to date what vLLM
        derives from weights and does not derive again at a reload. slept: name the buffers too (what the model computes with and no
        checkpoint holds) that are not what they were at the start.
        """
        model = worker_model(self)
        if refresh:
            refresh_tied_head(model)
        held = self._jetrl_held(model, config)
        reader = _Reader(held, cast(Algorithm, algorithm))
        texts = reader.texts(tied=held.arch.tie_embeddings)
        changed = _changed(self._jetrl_buffers, _buffers(model)) if slept else []
        return {
            "rank": worker_tp_rank(),
            "held": texts,
            "unsigned_zeros": reader.unsigned_zeros,
            "fp8_linears": len(held.fp8),
            "changed_buffers": changed,
        }


@dataclass(frozen=True, kw_only=True)
class _Loading:
    """A push under way: its writer, None where vLLM's loader takes the tensors, and the actor's buffers that are open here."""

    writer: InPlaceWriter | None
    opened: dict[str, Tensor] = field(default_factory=dict)


def _buffers(model: torch.nn.Module) -> dict[str, str]:
    hashing = Hashing()
    for name, buffer in model.named_buffers():
        hashing.add(name, buffer, resident=True)
    return hashing.texts()


def _changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


class _Reader:
    """Hashes every rectangle of an engine rank: the bytes of the parameter, on a CPU what the layer multiplies by, read once a tensor."""

    def __init__(self, held: HeldViews, algorithm: Algorithm) -> None:
        self.unsigned_zeros: list[str] = []
        self._held, self._hashing = held, Hashing(algorithm)
        self._last: tuple[tuple[str, str], Tensor, bool] | None = None
        for place in held.plan.places:
            self._read(place)

    def _read(self, place: HeldRectangle) -> None:
        if place.scales or holds_checkpoint_bytes(self._held.parameters[place.module, place.parameter]):
            part, unsigned = self._held.view(place), False
        else:
            tensor, unsigned = self._tensor(place.module, place.parameter)
            part = rectangle(tensor, place.rows_held, place.cols_held)
        self._hashing.add(place.key, part, resident=True)  # on a GPU it is a parameter's; elsewhere nothing waits
        if unsigned:
            self.unsigned_zeros.append(place.key)

    def texts(self, tied: bool) -> dict[str, str]:
        """Return every rectangle's fingerprint; waits for the device.

        tied: hold the embedding's to what the head multiplies by, where that is a copy: one that is stale fails the push.
        """
        texts = self._hashing.texts()
        if tied and self._head_is_stale():
            texts |= {key: "the tied head multiplies by another copy" for key in texts if key.startswith(EMBEDDING)}
        return texts

    def _head_is_stale(self) -> bool:
        head: Any = self._held.model.lm_head
        if not has_packed_head(head):
            return False
        rows, _ = held_weight(head, "weight")
        table = unsigned_zero(embedding_rows(self._held.model.get_submodule(EMBEDDING.removesuffix(".weight"))))
        return not torch.equal(rows.view(torch.int16), table.view(torch.int16))

    def _tensor(self, name: str, parameter: str) -> tuple[Tensor, bool]:
        if self._last is None or self._last[0] != (name, parameter):
            module = self._held.modules[name]
            is_table = f"{name}.{parameter}" == EMBEDDING
            weight, unsigned = (embedding_rows(module), False) if is_table else held_weight(module, parameter)
            self._last = ((name, parameter), weight, unsigned)
        return self._last[1], self._last[2]
