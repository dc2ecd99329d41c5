"""What must be set before anything else is imported: without a GPU, Triton kernels run in Triton's interpreter."""

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
