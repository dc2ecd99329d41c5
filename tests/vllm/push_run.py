"""What a process of the push tests does, on GPUs and on CPUs: the actor pushes to a real server, draws greedily, changes its weights and
pushes again."""

from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.actor.actor import Actor
from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.load import load_recipe
from jetrl_megatron.loop import vllm_setup
from jetrl_megatron.loop.setup import Session, build_actor, open_session
from jetrl_megatron.rollout import vllm_server
from tests.dist.ranks import on_shared_gpu

ROOT = Path(__file__).parents[2]
WORDS = (
    "rollout.engine=vllm_pool",
    "rollout.vllm.gpu_memory_utilization=0.05",
    "rollout.vllm.kv_cache_gib=1",
    "rollout.vllm.start_timeout_s=300",
)
GREEDY = SamplingParams(max_new_toks=32, temperature=0.0)
PROMPTS = tuple(tuple(3 + (7 * i + j * j) % 190 for j in range(40)) for i in range(4))


def run(model: str, run_dir: str, words: list[str], fresh: bool, shared: bool) -> list[list[Any]]:
    """Return (token ids, log-probs) of each prompt's completion after each push; only rank 0 draws.

    fresh: the only push is of the changed weights, so that the server has seen no others. Else: the model's, the changed ones, those again.
    shared: server and actor are on one GPU.
    """
    if shared and "rollout.vllm.transport=nccl" in words:
        _share_the_gpu()
    recipe = load_recipe(
        ROOT / "recipes" / "grpo-tiny-1n2p-tp2pp1-jetrl.yaml", [*WORDS, *words, f"model.path={model}", f"run.dir={run_dir}"]
    )
    session = open_session(recipe, ["test"])
    try:
        build_actor(session, session.source_dir, trainable=False)
        drawn = [] if fresh else [_pushed(session)]
        change(session.actor)
        drawn.append(_pushed(session))
        if not fresh:
            session.actor.version += 1
            drawn.append(_pushed(session))
    finally:
        session.close()
    return drawn


def change(actor: Actor) -> None:
    """Move every weight, as an optimizer step would, by an amount that depends on its value alone: on no layout."""
    with torch.no_grad():
        for chunk in actor.chunks:
            for parameter in chunk.parameters():
                parameter.add_(0.05 * torch.cos(300.0 * parameter.float()))
    actor.sides.invalidate()
    actor.sides.refresh()
    actor.version += 1


def _pushed(session: Session) -> list[Any]:
    assert session.publisher is not None
    session.publisher.push()
    if not session.ranks.is_logger:
        return []
    pool = session.engine.pool  # type: ignore[attr-defined]
    drawn = [pool.complete(0, list(ids), GREEDY, 0) for ids in PROMPTS]
    return [(one.token_ids, one.logprobs) for one in drawn]


def _share_the_gpu() -> None:
    """Let NCCL join the actor with a server on the same GPU, which a recipe may not ask for."""
    environment = vllm_server.server_environment
    vllm_setup.server_gpus = lambda cfg, num_actors: list(cfg.gpus)
    vllm_server.server_environment = lambda *words: environment(*words) | on_shared_gpu("server")
