"""The wire that a push is compared with."""

import pytest

from jetrl_megatron.bench import sync
from jetrl_megatron.config import Transport


@pytest.mark.parametrize(
    ("transport", "link", "wire", "seconds"),
    [
        (Transport.nccl, 50.0, "copy between GPUs", 8.0),
        (Transport.nccl, None, "copy within a GPU", 2.0),  # the actor sees its own GPU only
        (Transport.ipc, 50.0, "copy within a GPU", 2.0),
        (Transport.disk, 50.0, "copy within a GPU", 2.0),
    ],
)
def test_a_push_is_compared_with_a_copy_along_its_way(monkeypatch, transport, link, wire, seconds):
    monkeypatch.setattr(sync, "link_bandwidth", lambda: link)
    monkeypatch.setattr(sync, "copy_bandwidth", lambda: 400.0)  # bytes read plus bytes written
    assert sync.wire_time(transport, 400, 16.0) == {"wire": wire, "wire_s": seconds, "times_wire": 16.0 / seconds}
