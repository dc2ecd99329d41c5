"""A sender that takes tensors on streams of its own, in turn, gets their bytes however late they are written, and keeps their memory."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from jetrl_megatron.sync.cuda import made_on  # noqa: E402

NUMBERS = range(1, 9)


def late():
    """Yield tensors cut out of buffers that live for two of them, each written a while after it was asked for."""
    for number in NUMBERS:
        if number % 2:
            buffer = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
            torch.cuda._sleep(20_000_000)
            buffer[:] = torch.arange(number, number + 2, device="cuda", dtype=torch.int32).repeat_interleave(1 << 19)
        yield str(number), buffer[: 1 << 19].clone() if number % 2 else buffer[1 << 19 :].clone()


def test_what_is_taken_on_another_stream_is_complete():
    takers = [torch.cuda.Stream() for _ in range(2)]
    tensors, sums = made_on(torch.cuda.current_stream(), late()), []
    for number in NUMBERS:
        with torch.cuda.stream(takers[number // 2 % 2]):  # a buffer is begun on one and ended on the other
            _, tensor = next(tensors)
            sums.append(tensor.sum(dtype=torch.int64))
            del tensor
    torch.cuda.synchronize()
    assert [int(total) for total in sums] == [number << 19 for number in NUMBERS]
