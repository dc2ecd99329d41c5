"""Buckets of canonical tensors in one GPU buffer, shown by an actor rank to the engine worker on the same GPU by CUDA IPC.

Enters: on the actor a stream of (name, tensor), in the worker the JSON that describes a bucket. Leaves: there JSON, here the tensors. Codes
and scales are moved, never made. The buffer is used again for the next bucket, so a worker copies what it reads before it answers. A bucket
is plain numbers and hex text: nothing is pickled, so nothing that comes over HTTP can be run.
Left out: who may read when (sync/ipc.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

Bucket = dict[str, Any]
"""`names`, `dtypes` (torch's names), `shapes` and `offsets` (bytes) of tensors in the buffer; `first` and `last`: whether it is that of its
stream; `handles` by GPU, added by the sender."""
_HANDLE = ("handle", "size_bytes", "offset_bytes", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required")
_PLACES = (7, 8, 9, 11, 12, 13, 14)
"""Of the fields above among the arguments of torch's `rebuild_cuda_tensor`."""


def fill_buckets(stream: Iterable[tuple[str, Tensor]], buffer: Tensor) -> Iterator[Bucket]:
    """Copy tensors into `buffer`, [bytes] uint8, and yield a description whenever the next does not fit; the buffer is written by then.

    Raises ValueError for a tensor that is larger than the buffer.
    """
    bucket, end = _empty(first=True), 0
    for name, tensor in stream:
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        if raw.numel() > buffer.numel():
            raise ValueError(f"{name} has {raw.numel()} bytes and a bucket has {buffer.numel()}; a bucket must hold the largest tensor")
        if end + raw.numel() > buffer.numel():
            yield _written(bucket, buffer)
            bucket, end = _empty(first=False), 0
        buffer[end : end + raw.numel()] = raw
        bucket["names"].append(name)
        bucket["dtypes"].append(str(tensor.dtype).removeprefix("torch."))
        bucket["shapes"].append(list(tensor.shape))
        bucket["offsets"].append(end)
        end += raw.numel()
    if bucket["names"]:
        bucket["last"] = True
        yield _written(bucket, buffer)


def _empty(first: bool) -> Bucket:
    return {"names": [], "dtypes": [], "shapes": [], "offsets": [], "first": first, "last": False}


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


def open_bucket(bucket: Bucket, device: torch.device) -> list[tuple[str, Tensor]]:
    """Return copies of a bucket's tensors on `device`.

    Raises ValueError where no rank of the actor runs on that GPU.
    """
    name = gpu_name(device)
    if name not in bucket["handles"]:
        raise ValueError(f"no rank of the actor shows a buffer on GPU {name}, only on {', '.join(sorted(bucket['handles']))}")
    return read_bucket(bucket, open_buffer(bucket["handles"][name], device))


def read_bucket(bucket: Bucket, buffer: Tensor) -> list[tuple[str, Tensor]]:
    """Return copies of a bucket's tensors out of its buffer, [bytes] uint8."""
    found = []
    for tensor, kind, shape, at in zip(bucket["names"], bucket["dtypes"], bucket["shapes"], bucket["offsets"], strict=True):
        dtype = getattr(torch, kind)
        part = buffer[at : at + prod(shape) * dtype.itemsize].clone()  # aligned too, wherever it lay
        found.append((tensor, part.view(dtype).view(shape)))
    return found
