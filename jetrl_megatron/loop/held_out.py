"""Evaluation on held-out prompts with the run's own engine: pass@1, avg@k, pass@k.

Enters: a session and its evaluation prompts. Leaves: plain numbers. Sampling is keyed by the run's seed, so two evaluations of the same
weights agree, and evaluations before and after training draw with the same random numbers.
"""

from jetrl_megatron.contracts import SamplingParams
from jetrl_megatron.data.prompts import PromptSet
from jetrl_megatron.loop.collect import draw_and_score, draw_seed
from jetrl_megatron.loop.setup import Session


def eval_sampling(session: Session) -> SamplingParams:
    """Return how evaluation completions are drawn."""
    cfg = session.recipe.eval
    return SamplingParams(
        max_new_toks=cfg.max_new_toks or session.recipe.rollout.max_new_toks,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        stop_token_ids=session.stop_ids,
    )


def evaluate(session: Session, prompts: PromptSet) -> dict[str, float]:
    """Score `eval.samples` completions of every prompt.

    Returns:
        `reward` = `avg@k` (mean over prompts and samples), `pass@1` (first sample of each), `pass@k` (any right), `num_prompts`,
        `samples` (k), `response_toks` (mean tokens).
    """
    k = session.recipe.eval.samples
    with session.phases("eval"):
        scored = draw_and_score(session, prompts.prompts, k, eval_sampling(session), draw_seed(session.recipe.run.seed, 0))
    rewards = [r for _, r in scored]
    groups = [rewards[i : i + k] for i in range(0, len(rewards), k)]
    avg = sum(rewards) / len(rewards)
    return {
        "reward": avg,
        "avg@k": avg,
        "pass@1": sum(g[0] for g in groups) / len(groups),
        "pass@k": sum(max(g) for g in groups) / len(groups),
        "samples": float(k),
        "num_prompts": float(len(groups)),
        "response_toks": sum(len(c.token_ids) for c, _ in scored) / len(scored),
    }
