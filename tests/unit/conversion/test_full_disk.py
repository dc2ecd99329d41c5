"""Writing beyond what the system allows, with the real command: the file and the way out are named, and nothing stands at the target."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.conversion.directories import write_bf16
from tests.unit.conversion.test_damage import CONFIG


@pytest.mark.parametrize("words", [["--tp", "2"], ["--format", "torch_dist"]], ids=["ranks", "torch_dist"])
def test_a_limit_that_the_system_sets_is_an_error_and_no_directory(tmp_path, words):
    source = write_bf16(tmp_path / "source", CONFIG)
    command = [sys.executable, "-m", "conversion", "to-megatron", str(source), str(tmp_path / "m"), *words, "--json"]
    limit = (500_000, 500_000)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"File too large: '\S+\.m\.partial/\S+'; nothing was put at the target: make room", done.stderr), done.stderr
    assert not (tmp_path / "m").exists()
