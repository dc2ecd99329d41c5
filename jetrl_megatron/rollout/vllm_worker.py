"""What this project adds to a vLLM worker process: it says which bytes the engine computes with, and loads them by CUDA IPC.

Enters: calls over the server's `/collective_rpc`. Leaves: fingerprints of every rectangle of the canonical (Hugging Face) tensors that this
worker holds, in checkpoint layout, and which of them were read back with negative zeros made positive. vLLM loads the class by name
(`--worker-extension-cls jetrl_megatron.rollout.vllm_worker.WeightReader`) and mixes it into its own worker.
"""

from typing import Any, cast

import torch
from torch import Tensor

from conversion.architecture import ModelArchitecture
from conversion.names import EMBEDDING, SCALE_SUFFIX
from conversion.shards import Piece, StoredTensor
from jetrl_megatron.rollout.bucket import open_bucket
from jetrl_megatron.rollout.compat import (
    begin_reload,
    embedding_rows,
    end_reload,
    has_packed_head,
    held_weight,
    prepare_device,
    refresh_tied_head,
    unlike_numerics,
    worker_model,
    worker_tp_rank,
)
from jetrl_megatron.rollout.fingerprint import Algorithm, Hashing, unsigned_zero
from jetrl_megatron.rollout.published import engine_pieces, in_blocks, rectangle, rectangle_name, shifted
from jetrl_megatron.rollout.vllm_in_place import InPlaceWriter, fp8_linears
from jetrl_megatron.rollout.vllm_plugin import registered


class WeightReader:
    """Mixin of vLLM's worker."""

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
        it, where weights are written into the parameters, from a copy of the bucket; None where vLLM's loader takes them.
        """
        model, worker = worker_model(self), cast(Any, self)
        if in_place is not None:
            if bucket["first"]:
                arch = ModelArchitecture.from_hf_config(in_place)
                self._jetrl_writer = InPlaceWriter(model, arch, worker.parallel_config.tensor_parallel_size, worker_tp_rank())
            self._jetrl_writer.write(open_bucket(bucket, worker.device))
            torch.accelerator.synchronize()
            if bucket["last"]:
                del self._jetrl_writer
            return
        if bucket["first"]:
            begin_reload(model)
        cast(Any, model).load_weights(open_bucket(bucket, worker.device))
        torch.accelerator.synchronize()
        if bucket["last"]:
            end_reload(model, self)

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
        arch = ModelArchitecture.from_hf_config(config)
        tp = cast(Any, self).parallel_config.tensor_parallel_size
        rank = worker_tp_rank()
        reader = _Reader(model, cast(Algorithm, algorithm))
        fp8 = fp8_linears(model)
        for stored, piece in engine_pieces(arch, tp, fp8)[rank]:
            reader.read(stored, piece)
        held = reader.held(arch.tie_embeddings)
        changed = _changed(self._jetrl_buffers, _buffers(model)) if slept else []
        return {
            "rank": rank,
            "held": held,
            "unsigned_zeros": reader.unsigned_zeros,
            "fp8_linears": len(fp8),
            "changed_buffers": changed,
        }


def _buffers(model: torch.nn.Module) -> dict[str, str]:
    hashing = Hashing()
    for name, buffer in model.named_buffers():
        hashing.add(name, buffer)
    return hashing.texts()


def _changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


class _Reader:
    """Reads tensors of one model, each once, and hashes their rectangles."""

    def __init__(self, model: torch.nn.Module, algorithm: Algorithm) -> None:
        self.unsigned_zeros: list[str] = []
        self._model, self._hashing = model, Hashing(algorithm)
        self._last: tuple[str, Tensor, bool] | None = None

    def read(self, stored: StoredTensor, piece: Piece) -> None:
        weight, unsigned = self._tensor(stored.name)
        rows, cols = shifted(piece.rows, piece.row_at), shifted(piece.cols, piece.col_at)
        self._note(rectangle_name(piece.hf, piece.rows, piece.cols), rectangle(weight, rows, cols), unsigned)
        if stored.fp8:
            scales = self._module(stored.name).weight_scale_inv.detach()
            part = rectangle(scales, in_blocks(rows), in_blocks(cols))
            self._note(rectangle_name(piece.hf + SCALE_SUFFIX, in_blocks(piece.rows), in_blocks(piece.cols)), part, False)

    def held(self, tied: bool) -> dict[str, str]:
        """Return the rectangles read so far; waits for the device.

        tied: hold the embedding's to what the head multiplies by, where that is a copy: one that is stale fails the push.
        """
        texts = self._hashing.texts()
        if tied and self._head_is_stale():
            texts |= {key: "the tied head multiplies by another copy" for key in texts if key.startswith(EMBEDDING)}
        return texts

    def _head_is_stale(self) -> bool:
        head: Any = self._model.lm_head
        if not has_packed_head(head):
            return False
        rows, _ = held_weight(head, "weight")
        table = unsigned_zero(embedding_rows(self._model.get_submodule(EMBEDDING.removesuffix(".weight"))))
        return not torch.equal(rows.view(torch.int16), table.view(torch.int16))

    def _note(self, key: str, part: Tensor, unsigned: bool) -> None:
        self._hashing.add(key, part)
        if unsigned:
            self.unsigned_zeros.append(key)

    def _module(self, name: str) -> Any:
        return self._model.get_submodule(name.rpartition(".")[0])

    def _tensor(self, name: str) -> tuple[Tensor, bool]:
        if self._last is None or self._last[0] != name:
            module, kind = self._module(name), name.rpartition(".")[2]
            weight, unsigned = (embedding_rows(module), False) if name == EMBEDDING else held_weight(module, kind)
            self._last = (name, weight, unsigned)
        return self._last[1], self._last[2]
