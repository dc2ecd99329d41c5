"""Scores for completions: the loop's view of the reward workers.

Enters: completion texts and gold answers. Leaves: one score a sample, in order, and counters of what went wrong. `math` scores 1.0 or
0.0: the answer is found by `extraction.py` and compared by `equality.py`. Plain numbers and plain words are decided here, in the
caller's process, by the same comparison that the workers begin with; only what needs algebra goes to a worker.
Left out: shaping of rewards by length (`advantages.py`).
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from jetrl_megatron.config import RewardConfig
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.grpo.answers import normalise, text_answer
from jetrl_megatron.grpo.equality import Verdict, compare_plain, gold_is_plain
from jetrl_megatron.grpo.extraction import Expected, after_reasoning, extract_answer
from jetrl_megatron.grpo.worker_pool import Outcome, WorkerPool

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RewardCounters:
    """What happened since the pool was made; every sample counts in `scored`, and in at most one of the others, with score 0."""

    scored: int = 0
    timeouts: int = 0
    crashes: int = 0
    """The worker process died while it had the sample."""
    out_of_memory: int = 0
    errors: int = 0
    """The reward function raised, or returned no number within the bound of `reward_worker.MAX_ABS_REWARD`."""
    unparseable: int = 0
    """The text states no answer, or one that is no mathematics."""
    open_think: int = 0
    """Reasoning that never ended, under `require_closed_think`."""
    gold_unparseable: int = 0
    """The gold cannot be compared with; the data loader should have dropped the prompt."""

    @property
    def failures(self) -> int:
        """Samples on which the function itself failed: timed out, died, out of memory or raised."""
        return self.timeouts + self.crashes + self.out_of_memory + self.errors


_COUNTED = {
    "timeout": "timeouts",
    "crash": "crashes",
    "memory": "out_of_memory",
    "error": "errors",
    "open_think": "open_think",
    Verdict.answer_unparseable.value: "unparseable",
    Verdict.gold_unparseable.value: "gold_unparseable",
}


class RewardPool:
    """Scores completions in killable worker processes; a context manager, usable from any thread.

    cfg: `function` is `math` or `package.module:function`, called in the workers as f(completion text, answer) -> float, with the whole
    text; under `require_closed_think` a text whose reasoning never ended scores 0 without a call.
    Raises ValueError when the function cannot be imported.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        """Start the workers; returns when all have finished their imports."""
        self.cfg = cfg
        self.counters = RewardCounters()
        self._pool = WorkerPool(cfg.workers, cfg.timeout_s, {"function": cfg.function, "memory_mb": cfg.memory_mb})
        self._counting = threading.Lock()

    def score(self, texts: Sequence[str], answers: Sequence[str]) -> list[float]:
        """Return one score a sample, in order.

        texts: completions as text. Where the prompt itself opened a `<think>` block, pass them through `with_open_think` first.
        answers: the gold answers. Raises RunFailure when the reward function itself fails on every sample.
        """
        if len(texts) != len(answers):
            raise ValueError(f"{len(texts)} texts but {len(answers)} answers; there must be one answer a text")
        outcomes: dict[int, Outcome] = {}
        tasks: dict[int, dict[str, str]] = {}
        for index, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            prepared = self._prepare(text, answer)
            if isinstance(prepared, Outcome):
                outcomes[index] = prepared
            else:
                tasks[index] = prepared
        outcomes.update(zip(tasks, self._pool.run(list(tasks.values())), strict=True))
        self._count(outcomes)
        return [outcomes[index].value for index in range(len(texts))]

    def gold_parses(self, answers: Sequence[str]) -> list[bool]:
        """Say for each gold answer whether an answer can be compared with it; always True for a user's own function."""
        if self.cfg.function != "math":
            return [True] * len(answers)
        known = [gold_is_plain(answer) for answer in answers]
        outcomes = iter(self._pool.run([{"kind": "gold", "answer": a} for a, k in zip(answers, known, strict=True) if k is None]))
        return [next(outcomes).value == 1.0 if plain is None else plain for plain in known]

    def worker_pids(self) -> list[int]:
        """Process ids of the live workers."""
        return self._pool.pids()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def __enter__(self) -> Self:
        """Return the pool itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the workers."""
        self.close()

    def _prepare(self, text: str, answer: str) -> dict[str, str] | Outcome:
        """The task for a worker, or the outcome where none is needed."""
        visible = after_reasoning(text, self.cfg.require_closed_think)
        if visible is None:
            return Outcome(status="open_think", value=0.0)
        if self.cfg.function != "math":
            return {"kind": "score", "text": text, "answer": answer}
        stated = extract_answer(visible, _expected(answer))
        if stated is None:
            return Outcome(status=Verdict.answer_unparseable.value, value=0.0)
        verdict = compare_plain(answer, stated)
        if verdict is None:
            return {"kind": "score", "text": stated, "answer": answer}
        return Outcome(status=verdict.value, value=float(verdict is Verdict.equal))

    def _count(self, outcomes: dict[int, Outcome]) -> None:
        failures = [outcome.detail for outcome in outcomes.values() if outcome.status == "error"]
        with self._counting:
            self.counters.scored += len(outcomes)
            for outcome in outcomes.values():
                name = _COUNTED.get(outcome.status)
                if name:
                    setattr(self.counters, name, getattr(self.counters, name) + 1)
        if failures:
            _LOG.warning(
                "reward.function %s failed on %d of %d samples; first:\n%s", self.cfg.function, len(failures), len(outcomes), failures[0]
            )
            if len(failures) == len(outcomes) and self.cfg.function != "math":
                raise RunFailure(f"reward.function {self.cfg.function} failed on all {len(failures)} samples; first:\n{failures[0]}")


def _expected(gold: str) -> Expected:
    words = text_answer(normalise(gold))
    if words is None:
        return "math"
    return "choice" if len(words) == 1 else "words"


def gold_parses(answers: Sequence[str], cfg: RewardConfig | None = None) -> list[bool]:
    """Say for each gold answer whether it can be used; workers are started only where plain reading does not decide.

    cfg: bounds and number of the workers, and the function: a user's own function takes any answer. None is the default configuration.
    """
    cfg = cfg or RewardConfig()
    if cfg.function != "math":
        return [True] * len(answers)
    known = [gold_is_plain(answer) for answer in answers]
    unknown = [answer for answer, plain in zip(answers, known, strict=True) if plain is None]
    if not unknown:
        return [bool(plain) for plain in known]
    with RewardPool(cfg) as pool:
        parsed = iter(pool.gold_parses(unknown))
    return [next(parsed) if plain is None else plain for plain in known]


def with_open_think(prompt_text: str, completion_text: str) -> str:
    """Return the completion with the `<think>` that its prompt left open in front, so that unfinished reasoning is seen as such."""
    opened = prompt_text.rfind("<think>") > prompt_text.rfind("</think>")
    return "<think>" + completion_text if opened else completion_text
