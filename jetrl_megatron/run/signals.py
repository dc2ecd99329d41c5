"""SIGTERM and SIGINT as a stop that all ranks make at the same step boundary, or as an exit when the boundary does not come in time.

Enters: a signal, at any moment: during a rollout, a weight push, an evaluation, inside a collective. Leaves: `should_stop` true on every
rank at the next boundary, where the loop saves and exits 0; or, `grace_s` seconds after the signal, exit code `GRACE_EXIT_CODE` without
any further write, so the last complete checkpoint stays what the next start resumes.

The countdown runs in its own thread and is woken by the C-level handler, because a Python-level handler waits while the main thread is
inside one long call. A second SIGINT raises KeyboardInterrupt at once.
"""

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

GRACE_EXIT_CODE = 3
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LEAVE = b"\0"


class StopSignal:
    """Context manager of the main thread; handlers are restored when it is left.

    grace_s: seconds from the first signal to the forced exit; the loop must call `done` (or leave the context) before.
    """

    def __init__(self, grace_s: float, exit_now: Callable[[int], None] = os._exit) -> None:
        """Keep the settings; nothing is installed before the context is entered."""
        self._grace_s = grace_s
        self._exit_now = exit_now
        self._requested = threading.Event()
        self._done = threading.Event()
        self._num_interrupts = 0

    def __enter__(self) -> "StopSignal":
        """Install the handlers and start the watching thread."""
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._old_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._thread = threading.Thread(target=self._watch, name="stop-signal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Restore the handlers and end the countdown."""
        self.done()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        os.write(self._write_end, _LEAVE)  # not by closing: a forked child may hold a copy of this end
        self._thread.join()
        os.close(self._write_end)
        os.close(self._read_end)

    @property
    def requested(self) -> bool:
        """Whether this process was signalled; ask `should_stop` at a boundary, since another rank may not have been yet."""
        return self._requested.is_set()

    def should_stop(self, any_true: Callable[[bool], bool]) -> bool:
        """Give the same answer on all ranks: whether any of them was signalled. Collective, called once a step boundary.

        any_true: logical or over all ranks. A rank that learns of the stop from another starts its own countdown here.
        """
        stop = any_true(self.requested)
        if stop and not self.requested:
            os.write(self._write_end, bytes([signal.SIGTERM]))
        return stop

    def done(self) -> None:
        """Say that everything is saved: the countdown will not end the process any more."""
        self._done.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
        self._requested.set()

    def _watch(self) -> None:
        """Wait for a signal's byte, then for `done` or the end of the grace time."""
        while True:
            select.select([self._read_end], [], [])
            received = os.read(self._read_end, 1)
            if received == _LEAVE:
                return
            if received[0] in _SIGNALS:
                break
        self._requested.set()
        if not self._done.wait(self._grace_s):
            text = f"stopping took longer than run.grace_s = {self._grace_s:g} s; the last complete checkpoint is untouched\n"
            sys.stderr.write(text)
            sys.stderr.flush()
            self._exit_now(GRACE_EXIT_CODE)
