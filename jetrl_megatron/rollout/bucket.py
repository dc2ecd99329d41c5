"""Buckets of canonical tensors in one GPU buffer, shown by an actor rank to the engine worker on the same GPU by CUDA IPC.

Enters: on the actor a stream of (name, tensor), in the worker the JSON that describes a bucket. Leaves: there JSON, here the tensors. Codes
and scales are moved, never made. A buffer is used again for a later bucket, so a worker has copied what it reads, to wherever it goes, when
it answers. A bucket is plain numbers and hex text: nothing is pickled, so nothing that comes over HTTP can be run.
Left out: who may read when (sync/ipc.py).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from jetrl_megatron.rollout.fingerprint import flat_bytes

Bucket = dict[str, Any]
"""`names`, `dtypes` (torch's names), `shapes` and `offsets` (bytes) of tensors in the buffer; `buffer`: its number; `first` and `last`:
whether the bucket is that of its stream; `handles` by GPU, added by the sender."""
_ALIGN = 256
"""Bytes of which an offset is a multiple: views of any dtype, and whole words, can be read where they lie."""
_HANDLE = ("handle", "size_bytes", "offset_bytes", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required")
_PLACES = (7, 8, 9, 11, 12, 13, 14)
"""Of the fields above among the arguments of torch's `rebuild_cuda_tensor`."""


def fill_buckets(stream: Iterable[tuple[str, Tensor]], buffers: Sequence[Tensor]) -> Iterator[Bucket]:
    """Copy tensors into the first of `buffers`, [bytes] uint8 of one size, and yield a description whenever the next does not fit.

    The buffer is written by then. Then comes the next of them in turn, also where it is one that a bucket was shown in before: a bucket is
    asked for when that one has been read. Raises ValueError for a tensor that is larger than a buffer.
    """
    number, end = 0, 0
    buffer = buffers[0]
    bucket, size = _empty(number, buffers), buffer.numel()
    for name, tensor in stream:
        raw = flat_bytes(tensor)
        num_bytes = raw.numel()
        if num_bytes > size:
            raise ValueError(f"{name} has {num_bytes} bytes and a bucket has {size}; a bucket must hold the largest tensor")
        if end + num_bytes > size:
            yield _written(bucket, buffer)
            number, end = number + 1, 0
            buffer = buffers[number % len(buffers)]
            bucket = _empty(number, buffers)
        buffer[end : end + num_bytes].copy_(raw)
        bucket["names"].append(name)
        bucket["dtypes"].append(str(tensor.dtype).removeprefix("torch."))
        bucket["shapes"].append(list(tensor.shape))
        bucket["offsets"].append(end)
        end += -(-num_bytes // _ALIGN) * _ALIGN
    if bucket["names"]:
        bucket["last"] = True
        yield _written(bucket, buffer)


def _empty(number: int, buffers: Sequence[Tensor]) -> Bucket:
    place = {"buffer": number % len(buffers), "first": number == 0, "last": False}
    return {"names": [], "dtypes": [], "shapes": [], "offsets": [], **place}


def _written(bucket: Bucket, buffer: Tensor) -> Bucket:
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()
    return bucket


def gpu_name(device: torch.device) -> str:
    """Return what both processes call a GPU, whatever its number in each."""
    return str(torch.cuda.get_device_properties(device).uuid)


def show_buffer(buffer: Tensor) -> dict[str, Any]:
    """Return a CUDA buffer, [bytes] uint8, as JSON that another process on the same machine can open it by."""
    arguments = reduce_tensor(buffer)[1]
    values = [arguments[place] for place in _PLACES]
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in zip(_HANDLE, values, strict=True)}


def open_buffer(shown: Mapping[str, Any], device: torch.device) -> Tensor:
    """Return a view, [bytes] uint8, of a buffer that another process has shown."""
    values: list[Any] = [bytes.fromhex(value) if isinstance(value, str) else value for value in (shown[name] for name in _HANDLE)]
    arguments: list[Any] = [
        Tensor,
        torch.Size([shown["size_bytes"]]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        device.index,
        *[None] * 8,
    ]
    for place, value in zip(_PLACES, values, strict=True):
        arguments[place] = value
    arguments[10] = False  # no gradient
    return rebuild_cuda_tensor(*arguments)


def open_bucket(bucket: Bucket, device: torch.device, opened: dict[str, Tensor], *, copies: bool = True) -> list[tuple[str, Tensor]]:
    """Return a bucket's tensors on `device`: copies, or else views of the buffer, which are good until the caller answers.

    opened: buffers that are open, kept by the caller for one push: opening one again for every bucket would map its memory every time.
    Raises ValueError where no rank of the actor runs on that GPU.
    """
    name = gpu_name(device)
    if name not in bucket["handles"]:
        raise ValueError(f"no rank of the actor shows a buffer on GPU {name}, only on {', '.join(sorted(bucket['handles']))}")
    shown = bucket["handles"][name]
    key = json.dumps(shown, sort_keys=True)
    if key not in opened:
        opened[key] = open_buffer(shown, device)
    return read_bucket(bucket, opened[key], copies=copies)


def read_bucket(bucket: Bucket, buffer: Tensor, *, copies: bool = True) -> list[tuple[str, Tensor]]:
    """Return a bucket's tensors out of its buffer, [bytes] uint8: copies, or else views."""
    found = []
    for tensor, kind, shape, at in zip(bucket["names"], bucket["dtypes"], bucket["shapes"], bucket["offsets"], strict=True):
        dtype = getattr(torch, kind)
        part = buffer[at : at + prod(shape) * dtype.itemsize]
        found.append((tensor, (part.clone() if copies else part).view(dtype).view(shape)))
    return found
