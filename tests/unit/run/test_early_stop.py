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


def run_counting_handlers(words: list[str]) -> tuple[list[str], str]:
    """(the signals that a command set a handler of, in turn; what it said), after a check that the first handlers are back."""
    code = (
        "import signal, sys; from jetrl_megatron import cli; old, put = signal.getsignal(signal.SIGTERM), signal.signal; "
        "signal.signal = lambda number, handler: print(signal.Signals(number).name) or put(number, handler); "
        "code = cli.main(sys.argv[1:]); assert code == 2 and signal.getsignal(signal.SIGTERM) is old, code"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_the_handlers_come_back_when_the_checks_of_a_run_end():
    put, said = run_counting_handlers(["train", "no.yaml"])
    assert sorted(put) == ["SIGINT", "SIGINT", "SIGTERM", "SIGTERM"] and "recipe no.yaml does not exist" in said


def test_another_command_keeps_its_handlers_throughout():
    put, said = run_counting_handlers(["eval", "nowhere", "--data", "gsm8k"])
    assert put == [] and "nowhere" in said
