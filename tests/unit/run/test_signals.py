"""A signal at any moment ends in a common boundary or in the grace exit."""

import os
import signal
import subprocess
import sys
import time

import pytest

from jetrl_megatron.run.signals import GRACE_EXIT_CODE, StopSignal


def wait_for(condition) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_no_signal_no_stop():
    with StopSignal(1.0) as stop:
        assert not stop.requested
        assert not stop.should_stop(lambda mine: mine)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_only_sets_the_flag_and_a_saved_run_is_not_ended(number):
    exits = []
    with StopSignal(0.2, exits.append) as stop:
        os.kill(os.getpid(), number)
        assert wait_for(lambda: stop.requested)
        assert stop.should_stop(lambda mine: mine)
        stop.done()
        time.sleep(0.4)
    assert exits == []


def test_second_interrupt_stops_at_once():
    with StopSignal(60.0) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert wait_for(lambda: stop.requested)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0)


def test_all_ranks_agree_and_the_one_that_was_told_counts_down_too():
    exits = []
    with StopSignal(0.1, exits.append) as stop:
        assert stop.should_stop(lambda mine: True)  # another rank was signalled
        assert wait_for(lambda: stop.requested)
        assert wait_for(lambda: exits == [GRACE_EXIT_CODE])


def test_handlers_are_restored():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal(1.0):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


STUCK = """
import ctypes
from jetrl_megatron.run.signals import StopSignal
with StopSignal(0.5):
    print("ready", flush=True)
    libc = ctypes.CDLL(None)
    for _ in range(10):
        {call}
"""


@pytest.mark.parametrize("call", ["libc.usleep(900000)", "__import__('time').sleep(5)"])
def test_boundary_that_never_comes_exits_with_the_documented_code(call):
    process = subprocess.Popen([sys.executable, "-c", STUCK.format(call=call)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == GRACE_EXIT_CODE == 3
    assert time.monotonic() - start < 8
    assert "longer than run.grace_s = 0.5 s" in err
