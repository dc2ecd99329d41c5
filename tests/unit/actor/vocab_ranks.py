"""Tensor-parallel ranks of a vocabulary in one process: a thread each, of which one runs at a time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from jetrl_megatron.actor.logprobs import VocabShard, vocab_shard

_TIMEOUT_S = 60.0


class _Meeting:
    """Where the ranks hand tensors to each other. Triton's interpreter takes one thread at a time: who waits lets another one run."""

    def __init__(self, ranks: int) -> None:
        self.running = threading.Lock()
        self._barrier, self._box = threading.Barrier(ranks), [torch.empty(0)] * ranks

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._box[rank] = tensor.clone()
        self._wait()
        found = list(self._box)
        self._wait()
        return found

    def _wait(self) -> None:
        self.running.release()
        try:
            self._barrier.wait(_TIMEOUT_S)
        finally:
            self.running.acquire()

    def leave(self) -> None:
        self._barrier.abort()


@dataclass(frozen=True, kw_only=True)
class _Member(VocabShard):
    rank: int
    size: int
    meeting: _Meeting

    @property
    def ranks(self) -> int:
        return self.size

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, tensor))

    def reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        assert op == dist.ReduceOp.MAX
        return tensor.copy_(torch.stack(self.meeting.exchange(self.rank, tensor)).amax(0))


def on_ranks(vocab_size: int, rows: int, ranks: int, work: Callable[[VocabShard], Any]) -> list[Any]:
    """Return what `work` returned on each rank; each holds `rows` rows of a vocabulary of `vocab_size` tokens."""
    meeting = _Meeting(ranks)

    def run(rank: int) -> Any:
        plain = vocab_shard(vocab_size, rows, rank, None)
        shard = _Member(start=plain.start, valid=plain.valid, vocab_size=vocab_size, group=None, rank=rank, size=ranks, meeting=meeting)
        with meeting.running:
            try:
                return work(shard)
            except BaseException:
                meeting.leave()
                raise

    with ThreadPoolExecutor(max_workers=ranks) as threads:
        futures = [threads.submit(run, rank) for rank in range(ranks)]
    broken = [e for e in (f.exception() for f in futures) if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if broken:
        raise broken[0]
    return [future.result() for future in futures]
