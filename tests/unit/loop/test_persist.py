"""A checkpoint's state on a full disk."""

import errno
from pathlib import Path

import pytest
import torch

from jetrl_megatron.loop.persist import write_state


@pytest.mark.parametrize("numbers", [1, 1_000_000])
def test_a_full_disk_names_the_file(tmp_path: Path, numbers: int) -> None:
    path = tmp_path / "actor.pt"
    write_state({"a": torch.arange(numbers)}, path)
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.arange(numbers))
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        write_state({"a": torch.arange(numbers)}, path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
