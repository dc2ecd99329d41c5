"""What one rank of the colocated test does: steps of the tiny recipe with servers that sleep while the actor learns; one dies asleep."""

import os
import signal
from pathlib import Path
from typing import Any

from jetrl_megatron import train as loop
from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop.setup import Session, open_session
from jetrl_megatron.rollout.vllm_client import EngineClient, ServerGone
from jetrl_megatron.run.signals import StopSignal
from tests.vllm.engines import verify

ROOT = Path(__file__).parents[2]
STEPS = 3
WORDS = (
    "rollout.engine=vllm_colocated", "rollout.vllm.transport=disk", "parallel.tp=1", "rollout.vllm.max_num_seqs=4",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_toks=24", "rollout.vllm.request_timeout_s=120",
    "warm_start.steps=0", "data.max_eval_prompts=4", "eval.samples=1", "optim.lr=1.0e-3", "grpo.dynamic_sampling=false",
    "reward.function=tests.vllm.grpo_run:odd_length",
)  # fmt: skip


class Watch:
    """On rank 0: writes down every call to a server, looks at the servers while the actor learns, and kills one of them then, in step 2."""

    def __init__(self, session: Session) -> None:
        self.pool: Any = session.engine.pool  # type: ignore[attr-defined]
        self.calls: dict[str, list[str]] = {}
        self.asleep: list[list[bool]] = []
        self.silent: list[bool] = []
        plain = EngineClient._call

        def call(client: EngineClient, verb: str, path: str, body: Any, timeout_s: float) -> dict[str, Any]:
            what = body["method"] if path == "/collective_rpc" else path
            if path != "/health":
                self.calls.setdefault(client.url, []).append(what)
            return plain(client, verb, path, body, timeout_s)

        self._plain = plain
        EngineClient._call = call  # type: ignore[method-assign]

    def look(self, step: int) -> None:
        """Ask each server whether it sleeps, and one of them for a completion all the same."""
        clients = [m.client for m in self.pool._members]
        self.asleep.append([self._plain(c, "GET", "/is_sleeping", None, 30.0)["is_sleeping"] for c in clients])
        assert self.pool.ready() == []
        if step == 1:
            try:
                EngineClient.complete(clients[0], [5, 6], SamplingParams(max_new_toks=1), 1, 3.0)
            except ServerGone:
                self.silent.append(True)
            self.calls[clients[0].url].pop()
        if step == 2:
            os.kill(self.pool.pids()[1], signal.SIGKILL)


def run(run_dir: str) -> dict[str, Any]:
    """Run the steps; returns what the servers were asked, and what came of it."""
    recipe = load_recipe(ROOT / "recipes" / "grpo-tiny-1n2p-tp2pp1-bf16.yaml", [*WORDS, f"run.dir={run_dir}"])
    out: dict[str, Any] = {"drawn": [], "versions": [], "evaluated": []}
    learn = loop.learn
    with StopSignal(60.0) as stop:
        session = open_session(recipe, ["test"])
        try:
            loop._prepare(session, stop)
            watch = Watch(session) if session.ranks.is_logger else None
            loop.push(session)
            for step in range(1, STEPS + 1):
                _watched(watch, learn, step, out)
                loop._step(session, None, step)
                out["versions"].append(session.publisher.version)  # type: ignore[union-attr]
                assert session.eval_prompts is not None
                out["evaluated"].append(loop.evaluate(session, session.eval_prompts)["num_prompts"])
            if watch is not None:
                counts = {"restarts": watch.pool.counts.restarts, "ready": watch.pool.ready()}
                out |= {"calls": [list(calls) for calls in watch.calls.values()], "asleep": watch.asleep, "silent": watch.silent, **counts}
                for member in watch.pool._members:
                    verify(watch.pool, member.number, member.client, watch.pool._published)
        finally:
            session.close()
    return out


def _watched(watch: Watch | None, learn: Any, step: int, out: dict[str, Any]) -> None:
    def looked(session: Session, samples: Any) -> dict[str, Any]:
        out["drawn"].append(sorted({v for s in samples for v in s.completion.versions}))
        if watch is not None:
            watch.look(step)
        values: dict[str, Any] = learn(session, samples)
        return values

    loop.learn = looked
