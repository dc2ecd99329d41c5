"""What one rank of the GRPO test does: three steps of the tiny recipe, with real servers that are killed at the worst moments."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from jetrl_megatron import train as loop
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop.setup import Session, open_session
from jetrl_megatron.run.signals import StopSignal
from tests.vllm.engines import verify

ROOT = Path(__file__).parents[2]
STEPS = 3
WORDS = (
    "rollout.engine=vllm_pool", "rollout.vllm.servers=2", "rollout.vllm.max_num_seqs=4", "rollout.prompts_per_step=4",
    "rollout.group_size=4", "rollout.max_new_toks=24", "rollout.vllm.request_timeout_s=120", "warm_start.steps=0", "data.eval=[]",
    "optim.lr=1.0e-3", "reward.function=tests.vllm.grpo_run:odd_length",
)  # fmt: skip


def odd_length(text: str, answer: str) -> float:
    """A reward that an untrained model gets now and then, so that every step changes the weights."""
    return float(len(text) % 2)


class Killer:
    """On rank 0: kills a server in the middle of the rollout of step 2, another in the middle of the push after step 3."""

    def __init__(self, session: Session) -> None:
        self.pool, self.step, self.sent, self.kills = session.engine.pool, 0, 0, []  # type: ignore[attr-defined]
        self.first_use: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        self._complete, self.pool.complete = self.pool.complete, self.complete
        transport: Any = session.publisher._transport  # type: ignore[union-attr]
        self._load, transport._load = transport._load, self.load

    def kill(self, number: int, why: str) -> None:
        self.kills.append(why)
        os.kill(self.pool.pids()[number], signal.SIGKILL)

    def complete(self, number: int, *rest: Any) -> Any:
        """Verify a server before its first request, as an outsider; kill server 0 at the sixth request of step 2."""
        client = self.pool._members[number].client
        with self._lock:
            if client.url not in [url for url, _ in self.first_use]:
                verify(self.pool, number, client, self.pool._published)
                self.first_use.append((client.url, self.pool._published.step))
            self.sent += 1
            if self.step == 2 and self.sent == 6:
                self.kill(0, "rollout")
        return self._complete(number, *rest)

    def load(self, client: Any, published: Any) -> None:
        if published.step == 3 and client is self.pool._members[1].client:
            self.kill(1, "push")
        self._load(client, published)


def run(run_dir: str, arm: str) -> dict[str, Any]:
    """Run the steps; returns what the completions, versions and servers were."""
    recipe = load_recipe(ROOT / "recipes" / f"grpo-tiny-1n2p-tp2pp1-{arm}.yaml", [*WORDS, f"run.dir={run_dir}"])
    out: dict[str, Any] = {"drawn": [], "versions": [], "digests": [], "mismatch": []}
    with StopSignal(60.0) as stop:
        session = open_session(recipe, ["test"])
        try:
            loop._prepare(session, stop)
            killer = Killer(session) if session.ranks.is_logger else None
            loop.push(session)
            for step in range(1, STEPS + 1):
                if killer is not None:
                    killer.step, killer.sent = step, 0
                rollouts = loop.collect(session, step)
                out["drawn"].append([(c.prompt_id, c.sample_index, c.token_ids, c.versions) for c in rollouts.completions])
                samples = loop.make_samples(rollouts.prompts, rollouts.completions, rollouts.rewards, recipe.grpo, 24)
                out["mismatch"].append(loop.learn(session, samples)["logprob_abs_diff"])
                loop.push(session)
                out["versions"].append(session.publisher.version.step)  # type: ignore[union-attr]
                out["digests"].append(session.publisher.version.sha256)  # type: ignore[union-attr]
            if killer is not None:
                out |= _after(killer)
        finally:
            session.close()
    return out


def _after(killer: Killer) -> dict[str, Any]:
    """Verify every server once more and say what happened."""
    pool = killer.pool
    for member in pool._members:
        verify(pool, member.number, member.client, pool._published)
    directory = sorted(p.name for p in pool._published.directory.parent.iterdir())
    counts = {"restarts": pool.counts.restarts, "ready": pool.ready(), "version": pool.version}
    return {"kills": killer.kills, "first_use": [step for _, step in killer.first_use], "directory": directory, **counts}
