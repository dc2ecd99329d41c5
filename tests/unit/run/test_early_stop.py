"""`jetrl train` told to stop in its first seconds leaves with 0 and one line, whatever it was importing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).parents[3] / "recipes" / "grpo-tiny-1n2p-tp2pp1-jetrl.yaml"
SIGNAL_AT_IMPORT = """
import os, sys
from jetrl_megatron import cli
number, module, recipe, folder = int(sys.argv[1]), *sys.argv[2:]

class Finder:
    def find_spec(name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Finder)
sys.exit(cli.main(["train", recipe, f"run.dir={folder}"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("module", ["jetrl_megatron.load", "omegaconf", "torch"])
def test_a_signal_during_the_imports_is_a_clean_stop(tmp_path, number, module):
    words = [sys.executable, "-c", SIGNAL_AT_IMPORT, str(int(number)), module, str(TINY), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.count("\n") == 1 and "stopped before anything was started: nothing was written" in done.stderr
    assert not (tmp_path / "run").exists()


def test_other_commands_keep_their_handlers():
    code = "import signal; from jetrl_megatron import cli; old = signal.getsignal(signal.SIGTERM); cli.main(['train', 'no.yaml']); "
    done = subprocess.run([sys.executable, "-c", code + "assert signal.getsignal(signal.SIGTERM) is old"], capture_output=True, text=True)
    assert done.returncode == 0 and "recipe no.yaml does not exist" in done.stderr, done.stderr
