"""Tensors for vLLM's sender are all made on one CUDA stream, whichever of its own it takes them on; streams are objects of Python here."""

from contextlib import contextmanager

import pytest
import torch

from jetrl_megatron.sync import cuda
from jetrl_megatron.sync.cuda import made_on


class Streams:
    """torch's current stream, and who waited for whom."""

    def __init__(self, monkeypatch):
        self.current, self.waits, self.device = self, [], torch.device("cpu")
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.waits.append((stream, "keeps", tensor.item())))

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, streams, name):
        self.streams, self.name, self.device = streams, name, torch.device("cpu")

    def wait_stream(self, other):
        self.streams.waits.append((self, "waits for", other))


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


@pytest.mark.parametrize("together", [1, 3, 4, 9])
@pytest.mark.parametrize("num_bytes", [8, 24, 1000])
def test_every_tensor_is_made_at_home_and_its_taker_waits_and_keeps_it(streams, monkeypatch, together, num_bytes):
    """A tensor has 8 bytes: as many as `group` are made before the first of them is taken."""
    monkeypatch.setattr(cuda, "_MADE_TOGETHER", together)
    monkeypatch.setattr(cuda, "_MADE_BYTES", num_bytes)
    group = min(together, num_bytes // 8)
    home, first, second = (Stream(streams, name) for name in ("home", "first", "second"))
    made_at = []

    def tensors():
        for number in range(4):
            made_at.append(streams.current)
            streams.waits.append(("made", number))
            yield f"t{number}", torch.tensor(number)
        made_at.append(streams.current)

    wrapped, taken = made_on(home, tensors()), []
    for taker in (first, first, second, first):
        with streams.on(taker):
            taken.append(next(wrapped))
            assert streams.current is taker, "what the sender does next runs on its own stream"
    with streams.on(second):
        assert list(wrapped) == []
    assert made_at == [home] * 5 and [(name, int(tensor)) for name, tensor in taken] == [(f"t{n}", n) for n in range(4)]
    events = iter(streams.waits)
    wanted, waiting = [first, first, second, first], set()
    for n, taker in enumerate(wanted):
        if n % group == 0:  # whoever takes one of the next group waits behind all that it holds
            waiting.clear()
            assert [next(events) for _ in range(min(group, 4 - n))] == [("made", k) for k in range(n, min(n + group, 4))]
        if taker not in waiting:
            assert next(events) == (taker, "waits for", home)
        waiting.add(taker)
        assert next(events) == (taker, "keeps", n)
    assert list(events) == []
