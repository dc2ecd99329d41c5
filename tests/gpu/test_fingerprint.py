"""The kernel of the fingerprint `mix` on a GPU: its definition bit for bit, no waiting before the end, and its speed (`-s` shows it)."""

import gc
from itertools import pairwise

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from jetrl_megatron.rollout import fingerprint as module  # noqa: E402
from jetrl_megatron.rollout.fingerprint import Hashing, fingerprint  # noqa: E402
from tests.rectangles import by_kernel, matrix, words  # noqa: E402


def test_rectangles_of_real_shapes_have_the_sums_of_the_definition():
    codes, halves, scales = matrix(4096, 12288), matrix(6144, 4096, torch.bfloat16), matrix(48, 97, torch.float32)
    parts = [codes, codes[:, 6144:], codes[1024:2048, :3072], codes[:, 8:24], halves, halves[:, 2048:], halves[0], scales, scales[:, 48:]]
    parts += [scales[3:4, 5:6], codes[1:700, 3:1001], codes.view(-1)[7:-9], halves[:, 1:778], halves.t()]
    assert by_kernel(*parts) == [fingerprint(part, "mix") for part in parts]


def test_more_than_2_31_bytes_and_rows_that_lie_far_apart():
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    large = torch.empty(3 * 2**30 + 13, dtype=torch.uint8, device="cuda")
    large.view(-1)[: 3 * 2**30].view(torch.int64).random_()
    large[-13:] = 7
    wide = large[: 3 * 2**30].view(3, 2**30)[:, 5 : 5 + 4099]
    assert by_kernel(large, large[: 3 * 2**30].view(3, -1)[:, 8:], wide) == [
        fingerprint(part, "mix") for part in (large, large[: 3 * 2**30].view(3, -1)[:, 8:], wide)
    ]


def many():
    """As one launch may find them: 1500 of a few bytes to 600 MB, whole, cut and at odd places."""
    large = matrix(151_936, 4096)
    parts = [large[number : number + 1, : 512 + number % 9] for number in range(1400)]
    for number in range(16):
        codes, scales = matrix(4096 + number, 4096), matrix(32, 32 + number, torch.float32)
        parts += [codes, codes[:, 2048:], codes[number:], codes[:, :1024], scales, scales[:, 16:]]
    return [large, *parts, words(1, 10_000_001), words(2, 9_000_000)[3:], large[:, 4088:]]


def test_one_launch_over_many_has_the_sums_of_the_definition(monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES", 1 << 40)
    parts = many()
    hashing, wanted = Hashing("mix"), [fingerprint(part, "mix") for part in parts]
    for number, part in enumerate(parts):
        hashing.add(str(number), part)
    assert not hashing._queued and len(hashing._waiting.keys) == len(parts) > 1024
    assert list(hashing.texts().values()) == wanted
    moved = [part.clone() for part in parts]
    for part in parts:
        part.zero_()
    assert by_kernel(*moved) == wanted


def test_what_is_written_behind_a_flush_or_freed_is_hashed_as_it_was(monkeypatch):
    """The kernels are queued behind a long one: when they run, the host has long overwritten and freed what they read."""
    monkeypatch.setattr(module, "_KEPT_BYTES", 5 * 2**20)
    hashing = Hashing("mix")
    sources = [words(number, 2**21 + number) for number in range(12)]
    wanted = [fingerprint(source, "mix") for source in sources]
    assert by_kernel(*sources) == wanted, "and every kernel is compiled"
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for number, source in enumerate(sources):
        hashing.add(str(number), source.clone() if number % 2 else source, resident=not number % 2)
        gc.collect()
        torch.full((2**21 + number,), 255, dtype=torch.uint8, device="cuda")
    hashing.flush()
    for source in sources:
        source.zero_()
    assert list(hashing.texts().values()) == wanted


def test_nothing_waits_for_the_device_before_the_end_and_memory_may_be_used_again(monkeypatch):
    monkeypatch.setattr(module, "_KEPT_BYTES", 5 * 2**20)  # three of them
    hashing, wanted = Hashing("mix"), []
    hashing.add("compiled", matrix(1024, 4096)[:, :2048].clone())
    hashing.texts()
    sources = [matrix(1024 + number, 4096)[:, :2048] for number in range(20)]
    wanted = [fingerprint(source, "mix") for source in sources]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, source in enumerate(sources):
            part = source.clone()  # freed, and used again by another, while its kernel may still be queued
            hashing.add(str(number), part)
            del part
        hashing.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert list(hashing.texts().values())[1:] == wanted


@pytest.mark.parametrize("what", ["whole", "half of each row", "64 columns", "many"])
def test_how_fast_it_reads(what, monkeypatch):
    """A floor far below any GPU's memory: a path that copies first, or reads byte by byte, falls under it."""
    monkeypatch.setattr(module, "_KEPT_BYTES", 1 << 40)
    base = matrix(32768, 16384)
    layers = [base.view(-1)[at : at + size] for at in range(0, base.numel(), 2**24) for size in (2**24 - 2**13, 4096, 512)]
    parts = {"whole": [base], "half of each row": [base[:, 8192:]], "64 columns": [base[:, 64:128]], "many": layers}[what]
    num_bytes = sum(part.numel() for part in parts)
    hashing = Hashing("mix")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    torch.cuda.synchronize()
    for number, mark in enumerate(marks):
        if number == 1:  # compiled; the host then gets ahead of the device
            torch.cuda._sleep(100_000_000)
        mark.record()
        for place, part in enumerate(parts):
            hashing.add(f"{number} {place}", part)
        hashing.flush()
    torch.cuda.synchronize()
    best_ms = min(start.elapsed_time(end) for start, end in pairwise(marks[1:]))
    gb_per_s = num_bytes / best_ms / 1e6
    print(f"\nmix, {what}: {gb_per_s:.0f} GB/s, {num_bytes / 1e6:.0f} MB in {best_ms:.3f} ms")
    assert gb_per_s > (30 if what == "64 columns" else 300)  # 64 bytes of every 16 KiB
