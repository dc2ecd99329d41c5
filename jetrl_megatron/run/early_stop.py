"""A stop in the first seconds of `jetrl train`, before any process of the run is there.

Enters: SIGTERM or SIGINT while the launcher still imports and checks. Leaves: one line and exit code 0 at once, since nothing has started
and nothing needs saving. `local_launch.launch` has handlers of its own from its first line on.
This file is imported first, so it imports nothing large.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOPPED_EARLY = "stopped before anything was started: nothing was written, and what an earlier start saved is as it was"


@contextmanager
def stopping_early() -> Iterator[None]:
    """Leave the process with 0 on a signal; the handlers that were there come back at the end."""
    old = {number: signal.signal(number, _leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, f"jetrl: {STOPPED_EARLY}\n".encode())
    os._exit(0)  # no exception: it would be raised inside whatever is being imported, which may catch it
