"""The worker's side of CUDA IPC where there is no GPU: the buffer that is shown is a file. All else is the real worker's."""

from typing import Any

import torch

from jetrl_megatron.rollout import vllm_worker
from jetrl_megatron.rollout.bucket import read_bucket
from jetrl_megatron.rollout.vllm_worker import WeightReader


class FileReader(WeightReader):
    """WeightReader that maps a file where the real one opens a GPU buffer."""

    def jetrl_load(self, bucket: dict[str, Any]) -> None:
        """Load one bucket out of the file that it names."""
        shown = bucket["handles"]["file"]
        buffer = torch.from_file(shown["path"], size=shown["num_bytes"], dtype=torch.uint8)
        plain = vllm_worker.open_bucket
        vllm_worker.open_bucket = lambda bucket, device, opened: read_bucket(bucket, buffer)
        try:
            super().jetrl_load(bucket)
        finally:
            vllm_worker.open_bucket = plain
