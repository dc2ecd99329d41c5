"""What one rank does in the tests of drawing ahead: the whole of `train`, with servers of Python under the real engine and publisher.

The pool draws tokens from (digest of the weights that it holds, seed), so that a draw with other weights is another draw. It blocks draws
beside an update until the update has begun, and the update until such a draw has begun: a run that ends has overlapped them in every step.
"""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from jetrl_megatron import train as loop
from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop import ahead, vllm_setup
from jetrl_megatron.rollout.background_draw import BackgroundDraw
from jetrl_megatron.rollout.vllm_client import Drawn, ServerGone
from jetrl_megatron.rollout.vllm_pool import PoolCounts
from jetrl_megatron.sync.publish import Publisher

ROOT = Path(__file__).parents[2]
STEPS = 5
SMALL = [
    *(f"run.steps={STEPS}", "run.save_every=2", "run.eval_every=2", "run.tensorboard=false", "warm_start.steps=0", "precision.arm=jetrl"),
    *("rollout.engine=vllm_pool", "rollout.max_staleness=1", "grpo.correction=tis", "grpo.minibatches=2", "model.synthetic.num_layers=1"),
    *("rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_toks=4", "reward.function=tests.dist.interrupt.text_reward:reward"),
    *("reward.workers=1", "data.max_eval_prompts=4", "eval.samples=2", "optim.lr=1e-3", "rollout.vllm.max_num_seqs=4"),
]
WAIT_S = 60


class FakePool:
    """A pool as engine and publisher see it."""

    def __init__(self) -> None:
        self.version, self.digest, self.closed, self.log = -1, "", False, []
        self.beside, self.asked, self.learning = False, threading.Event(), threading.Event()
        self.failure: Exception | None = None
        self.servers: list[int] = [0, 1]
        self.counts = PoolCounts()

    def update(self, published: Any, load: Any) -> None:
        self.digest, self.version, self.servers = published.expected.result().version.sha256, published.step, [0, 1]
        self.log.append(f"push {self.version}")

    def blank(self) -> bool:
        return not self.servers

    def asleep(self) -> bool:
        return False

    def shortest(self) -> None:
        return None

    def ready(self) -> list[int]:
        if self.closed:
            raise RunFailure("the engine servers were stopped")
        return self.servers

    def gone(self, number: int, cause: ServerGone) -> None:
        assert not self.servers, cause

    def complete(self, number: int, prompt_ids: Any, params: Any, seed: int) -> Drawn:
        if self.beside:
            self.asked.set()
            while not self.learning.wait(0.05):
                if self.closed:
                    raise RunFailure("the engine servers were stopped")
            if self.failure is not None:
                raise self.failure
        if number not in self.servers:
            raise ServerGone("reset")
        rng = random.Random(f"{self.digest}/{seed}")
        number = rng.randint(1, params.max_new_toks)
        ids = tuple(rng.randrange(3, 13) for _ in range(number))
        return Drawn(token_ids=ids, logprobs=tuple(-3.0 * rng.random() for _ in ids), finish_reason="length" if number == 4 else "stop")

    def close(self) -> None:
        self.closed = True


class Watch:
    """Notes the order of things on this rank, makes draw and update meet, and makes trouble at an update: (step, what)."""

    def __init__(self, trouble: tuple[int, str]) -> None:
        self.pool, self.trouble, self.log, self.step = FakePool(), trouble, [], 0
        self.left: list[bool] = []
        self.rests = False
        self._push, Publisher.push = Publisher.push, lambda publisher: self.push(publisher)  # type: ignore[assignment]
        self.pool.log = self.log
        self._begin, self._finish, self._train_step = ahead.begin, ahead.finish, Actor.train_step
        ahead.begin, ahead.finish = self.begin, self.finish  # type: ignore[assignment]
        Actor.train_step = lambda actor, *rest: self.train_step(actor, *rest)  # type: ignore[assignment]
        self._leave, BackgroundDraw.leave = BackgroundDraw.leave, lambda draw, timeout_s: self.leave(draw, timeout_s)  # type: ignore[assignment]
        for name in ("_evaluate", "save"):
            setattr(loop, name, self.noting(name.strip("_"), getattr(loop, name)))

    def noting(self, name: str, function: Any) -> Any:
        def noted(session: Any, *rest: Any) -> Any:
            assert session.drawing is None, "a draw is under way"
            self.log.append(name)
            return function(session, *rest)

        return noted

    def begin(self, session: Any, step: int) -> Any:
        self.pool.asked.clear(), self.pool.learning.clear()
        self.step, self.pool.beside = step - 1, step <= STEPS
        return self._begin(session, step)

    def finish(self, session: Any, begun: Any) -> Any:
        if self.trouble == (self.step, "blank") and session.ranks.rank == 1:
            time.sleep(2.0)  # rank 0 has learned and wants to push, this rank is not there yet
        self.rests = True
        drawn = self._finish(session, begun)
        self.pool.beside = self.rests = False
        self.log.append(f"drawn {sorted({v for c in drawn.completions for v in c.versions})}")
        return drawn

    def push(self, publisher: Publisher) -> Any:
        if threading.current_thread().name == "draw":
            assert self.rests, "a push reads weights that are being learned"
            self.log.append("push by the draw")
        return self._push(publisher)

    def leave(self, draw: BackgroundDraw, timeout_s: float) -> bool:
        self.left.append(self._leave(draw, 6 * timeout_s))
        return self.left[-1]

    def train_step(self, actor: Actor, *rest: Any) -> Any:
        if actor.ranks.rank == 0 and self.pool.beside:
            assert self.pool.asked.wait(WAIT_S), "the update came before the draw"
        at, what = self.trouble
        if self.step == at:
            self.make(what, actor.ranks.rank)
        self.log.append("update")
        self.pool.learning.set()
        return self._train_step(actor, *rest)

    def make(self, what: str, rank: int) -> None:
        if what == "stop" and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if what == "crash" or (what == "crash of rank 1" and rank == 1):
            raise RunFailure("the update failed")
        if what == "blank":
            self.pool.servers = []
        if what == "refused":
            self.pool.failure = ValueError("the server refuses")
        if what == "lost":
            self.pool.failure = RunFailure("no engine server is left")


def run(folder: str, trouble: tuple[int, str] = (0, "")) -> dict[str, Any]:
    """Train; returns how it ended on this rank, in which order things happened and whether a draw that was left had ended."""
    watch = Watch(trouble)
    vllm_setup.check_vllm = lambda *parts: None
    vllm_setup.server_pool = lambda *parts: watch.pool  # type: ignore[assignment]
    recipe = load_recipe(ROOT / "recipes" / "grpo-tiny-1n2p-tp2pp1-jetrl.yaml", [*SMALL, f"run.dir={folder}"])
    ended: Any
    if trouble[1] == "crash of rank 1":
        ended = loop.train(recipe, ["test"])
    else:
        try:
            ended = loop.train(recipe, ["test"])
        except (RunFailure, ValueError) as error:
            ended = (type(error).__name__, str(error))
    return {"ended": ended, "log": watch.log, "left": watch.left}
