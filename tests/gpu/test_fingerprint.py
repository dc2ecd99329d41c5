"""The kernel of the fingerprint `mix` on a GPU: its definition bit for bit, no waiting before the end, and its speed (`-s` shows it)."""

from itertools import pairwise

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

from jetrl_megatron.rollout.fingerprint import Hashing, fingerprint  # noqa: E402
from tests.rectangles import by_kernel, matrix  # noqa: E402


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


def test_nothing_waits_for_the_device_before_the_end_and_memory_may_be_used_again():
    hashing, wanted = Hashing("mix"), []
    hashing.add("compiled", matrix(1024, 4096)[:, :2048])
    hashing.texts()
    sources = [matrix(1024 + number, 4096)[:, :2048] for number in range(20)]
    wanted = [fingerprint(source, "mix") for source in sources]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, source in enumerate(sources):
            part = source.clone()  # freed, and used again by the next, while its kernel may still be queued
            hashing.add(str(number), part)
            del part
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert list(hashing.texts().values())[1:] == wanted


@pytest.mark.parametrize("what", ["whole", "half of each row", "64 columns"])
def test_how_fast_it_reads(what):
    """A floor far below any GPU's memory: a path that copies first, or reads byte by byte, falls under it."""
    base = matrix(32768, 16384)
    part = {"whole": base, "half of each row": base[:, 8192:], "64 columns": base[:, 64:128]}[what]
    hashing = Hashing("mix")
    hashing.add("compiled", part)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
    for number, mark in enumerate(marks):
        mark.record()
        if number < 10:
            hashing.add(str(number), part)
    torch.cuda.synchronize()
    best_ms = min(start.elapsed_time(end) for start, end in pairwise(marks))
    gb_per_s = part.numel() / best_ms / 1e6
    print(f"\nmix, {what}: {gb_per_s:.0f} GB/s, {part.numel() / 1e6:.0f} MB in {best_ms:.3f} ms")
    assert gb_per_s > (30 if what == "64 columns" else 300)  # 64 bytes of every 16 KiB
