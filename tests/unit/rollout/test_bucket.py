"""A bucket holds what went in, bit for bit, at whatever sizes and dtypes; what is shown of a buffer is plain JSON."""

import json

import pytest
import torch

from jetrl_megatron.rollout import bucket as module
from jetrl_megatron.rollout.bucket import fill_buckets, open_bucket, open_buffer, read_bucket, show_buffer
from jetrl_megatron.rollout.fingerprint import flat_bytes

CPU = torch.device("cpu")


def tensors():
    draw = torch.Generator().manual_seed(1)

    def bits(dtype, *shape):
        size = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=draw).view(dtype).view(shape)

    return {
        "codes": bits(torch.float8_e4m3fn, 3, 5),  # 15 bytes: what follows lies at an odd place
        "scales": bits(torch.float32, 2, 3),
        "norm": bits(torch.bfloat16, 7),
        "turned": bits(torch.bfloat16, 4, 6).t(),
        "cell": bits(torch.bfloat16, 8)[::8],  # one element with the stride of what it was cut from
        "large": bits(torch.bfloat16, 10, 10),
    }


def same(a, b):
    return a.dtype is b.dtype and a.shape == b.shape and flat_bytes(a).equal(flat_bytes(b))


@pytest.fixture
def shown(monkeypatch):
    """Buffers by what is shown of them, as if another process had them."""
    buffers = {}
    monkeypatch.setattr(module, "gpu_name", lambda device: "gpu 7")
    monkeypatch.setattr(module, "open_buffer", lambda handle, device: buffers[handle])
    return buffers


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize(("num_bytes", "number"), [(200, 6), (600, 3), (10_000, 1)])
def test_every_tensor_comes_out_once_with_its_bits_whatever_fits_a_bucket(shown, num_bytes, number, copies):
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2)]
    shown.update(enumerate(buffers))
    found, ends, opened, wanted = {}, [], {}, tensors()
    for bucket in fill_buckets(wanted.items(), buffers):
        sent = json.loads(json.dumps({**bucket, "handles": {"gpu 7": bucket["buffer"]}}))
        for name, tensor in open_bucket(sent, CPU, opened, copies=copies):
            assert name not in found and same(tensor, wanted[name])
            assert (tensor.untyped_storage().data_ptr() != buffers[sent["buffer"]].data_ptr()) == copies
            found[name] = tensor
        if len(ends):
            assert buffers[1 - sent["buffer"]].any(), "the bucket before may still be read"
        ends.append((sent["first"], sent["last"], sent["buffer"]))
    for buffer in buffers:
        buffer.fill_(0)
    assert list(found) == list(wanted) and all(same(found[n], wanted[n]) == copies for n in wanted)
    assert ends == [(n == 0, n == number - 1, n % 2) for n in range(number)] and len(opened) == min(number, 2)


def test_the_bucket_before_stays_what_it_was_while_the_next_is_filled():
    buffers = [torch.zeros(200, dtype=torch.uint8) for _ in range(2)]
    filling, wanted = fill_buckets(tensors().items(), buffers), list(tensors().values())
    one = next(filling)
    next(filling)
    assert same(read_bucket(one, buffers[0])[0][1], wanted[0])


def test_a_tensor_larger_than_a_bucket_is_refused():
    with pytest.raises(ValueError, match="large has 200 bytes and a bucket has 199"):
        list(fill_buckets(tensors().items(), [torch.zeros(199, dtype=torch.uint8)]))


def test_a_worker_on_a_gpu_without_the_actor_says_so(shown):
    with pytest.raises(ValueError, match="no rank of the actor shows a buffer on GPU gpu 7, only on gpu 3"):
        open_bucket({"names": [], "dtypes": [], "shapes": [], "offsets": [], "handles": {"gpu 3": "handle"}}, CPU, {})


def test_what_is_shown_of_a_buffer_is_json_and_opens_it_with_torchs_own_arguments(monkeypatch):
    """The places of torch's arguments by name: a torch that moves them fails here."""
    import inspect

    from torch.multiprocessing import reductions

    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    values = {"storage_handle": b"\1\2", "storage_size_bytes": 64, "storage_offset_bytes": 512, "ref_counter_handle": b"\3"}
    values |= {
        "ref_counter_offset": 4,
        "event_handle": b"\5",
        "event_sync_required": True,
        "storage_device": 3,
        "tensor_size": torch.Size([64]),
    }
    values |= {"tensor_cls": torch.Tensor, "tensor_stride": (1,), "tensor_offset": 0, "storage_cls": torch.storage.TypedStorage}
    values |= {"dtype": torch.uint8, "requires_grad": False}
    monkeypatch.setattr(module, "reduce_tensor", lambda tensor: (None, tuple(values[name] for name in names)))
    asked = []
    monkeypatch.setattr(module, "rebuild_cuda_tensor", lambda *arguments: asked.append(arguments))
    open_buffer(json.loads(json.dumps(show_buffer(torch.zeros(64, dtype=torch.uint8)))), torch.device("cuda", 0))
    assert dict(zip(names, asked[0], strict=True)) == values | {"storage_device": 0}
