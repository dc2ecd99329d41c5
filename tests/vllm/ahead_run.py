"""What one rank of the test of drawing ahead does: `train` with two real servers, one of which is killed while draw and update overlap."""

import os
import signal
import time
from typing import Any

from jetrl_megatron import train as loop
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop import ahead
from tests.vllm.engines import verify
from tests.vllm.grpo_run import ROOT, WORDS

STEPS = 4
KILL_AT = 2
"""The step whose update runs while a server dies."""
OWN_WORDS = (f"run.steps={STEPS}", "run.save_every=2", "run.tensorboard=false", "run.export_hf=false", "rollout.max_staleness=1",
             "grpo.correction=tis", "grpo.dynamic_sampling=false")  # fmt: skip


class Watch:
    """Notes when requests and updates ran, and what the servers held when an update had ended."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, float, float]] = []
        self.learned: list[tuple[float, float]] = []
        self.drawn: list[list[tuple[str, int, tuple[int, ...]]]] = []
        self.held: list[int] = []
        self.pool: Any = None
        self.step = 0
        self._learn, self._begin, self._finish = loop.learn, ahead.begin, ahead.finish
        loop.learn, ahead.begin, ahead.finish = self.learn, self.begin, self.finish  # type: ignore[assignment]

    def begin(self, session: Any, step: int) -> Any:
        self.step = step - 1
        if self.pool is None and session.ranks.is_logger:
            self.pool = session.engine.pool
            self._complete, self.pool.complete = self.pool.complete, self.complete
        return self._begin(session, step)

    def complete(self, number: int, *rest: Any) -> Any:
        step, start_s = self.step, time.monotonic()
        if step == KILL_AT and number == 0 and not self.pool.counts.restarts and self.pool.pids()[0]:
            os.kill(self.pool.pids()[0], signal.SIGKILL)
        drawn = self._complete(number, *rest)
        self.requests.append((step, start_s, time.monotonic()))
        return drawn

    def learn(self, session: Any, samples: Any) -> Any:
        start_s = time.monotonic()
        values = self._learn(session, samples)
        self.learned.append((start_s, time.monotonic()))
        if self.pool is not None:  # the actor is one version on, and every server that serves still holds the one before
            published = self.pool._published
            for number in self.pool.ready():
                verify(self.pool, number, self.pool._members[number].client, published)
            self.held.append(published.step)
        return values

    def finish(self, session: Any, begun: Any) -> Any:
        rollouts = self._finish(session, begun)
        self.drawn.append([(c.prompt_id, c.sample_index, c.versions) for c in rollouts.completions])
        return rollouts


def run(run_dir: str) -> dict[str, Any]:
    """Run all steps; returns what happened when."""
    recipe = load_recipe(ROOT / "recipes" / "grpo-tiny-1n2p-tp2pp1-bf16.yaml", [*WORDS, *OWN_WORDS, f"run.dir={run_dir}"])
    watch = Watch()
    code = loop.train(recipe, ["test"])
    out = {"code": code, "requests": watch.requests, "learned": watch.learned, "drawn": watch.drawn, "held": watch.held}
    return out | ({"restarts": watch.pool.counts.restarts} if watch.pool is not None else {})
