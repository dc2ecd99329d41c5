"""A draw that runs in its own thread while the actor learns, and the rule for weight pushes in the meantime.

Enters: a draw to be made, on every rank of the run. Leaves: its completions, or the very error that it would have raised in the foreground,
where it is joined. Invariant: nobody reads the actor's weights, nor uses its process groups, between `PushHold.hold` and `release`; the
loop calls the first before the draw starts and the second when the actor has learned.
The thread is a daemon: a run that fails meanwhile ends without waiting for it.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal

from jetrl_megatron.contracts import Completion


class PushHold:
    """Says whether a draw may push the actor's weights to a server that came back without any; one on each rank.

    free: the actor rests, with the weights that the other servers hold: push at once. held: it is learning: never. moved: it rests again,
    with newer weights: only where no server serves, so that no request is under way while the version moves.
    """

    def __init__(self) -> None:
        """Start free."""
        self._state: Literal["free", "held", "moved"] = "free"
        self._rests = threading.Event()
        self._rests.set()

    def hold(self) -> None:
        """The actor is going to learn."""
        assert self._state == "free", self._state
        self._rests.clear()
        self._state = "held"

    def release(self) -> None:
        """The actor has learned, and its thread waits for the draw."""
        assert self._state == "held", self._state
        self._state = "moved"
        self._rests.set()

    def end(self) -> None:
        """The draw has ended."""
        assert self._state == "moved", self._state
        self._state = "free"

    def allows(self, serving: bool) -> bool:
        """Whether to push now; serving: some server is ready."""
        return self._state == "free" or (self._state == "moved" and not serving)

    def wait(self) -> None:
        """Wait until this rank's actor rests: another rank has begun a push that this one takes part in."""
        self._rests.wait()


class BackgroundDraw:
    """One draw in a thread, from its making on.

    draw: makes the completions. hold: of this rank's engine.
    """

    def __init__(self, draw: Callable[[], list[Completion]], hold: PushHold) -> None:
        """Hold pushes and start."""
        self._draw, self._hold = draw, hold
        self._completions: list[Completion] | None = None
        self._failure: BaseException | None = None
        self.seconds = 0.0
        """From start to end, once it has ended."""
        hold.hold()
        self._thread = threading.Thread(target=self._run, name="draw", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start_s = time.perf_counter()
        try:
            self._completions = self._draw()
        except BaseException as error:  # nothing is lost: it is raised where the draw is joined
            self._failure = error
        self.seconds = time.perf_counter() - start_s

    def join(self) -> list[Completion]:
        """Wait for the end and return the completions, or raise what the draw raised. The actor must have learned."""
        self._hold.release()
        self._thread.join()
        self._hold.end()
        if self._failure is not None:
            raise self._failure
        assert self._completions is not None
        return self._completions

    def leave(self, timeout_s: float) -> bool:
        """Wait a while for the end without asking how it went, for a run that has failed; returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
