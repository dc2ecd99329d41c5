"""Which groups a step learns from: dynamic sampling, the order of pairs, the seeds of draws; and what an evaluation counts."""

import re
from types import SimpleNamespace

import pytest

from jetrl_megatron.config import EvalConfig, GrpoConfig, Recipe, RolloutConfig
from jetrl_megatron.contracts import Completion, Prompt, SamplingParams
from jetrl_megatron.data.order import PromptOrder
from jetrl_megatron.loop import collect as collecting
from jetrl_megatron.loop import held_out
from jetrl_megatron.run.phases import Phases

PROMPTS = tuple(Prompt(id=f"p{i}", token_ids=(1,), text="", answer="", source="test") for i in range(12))


def session_of(dynamic, rounds=3, prompts_per_step=4):
    """What `collect` reads of a session: prompt order without shuffling."""
    grpo = GrpoConfig(dynamic_sampling=dynamic, dynamic_max_rounds=rounds)
    recipe = Recipe(rollout=RolloutConfig(prompts_per_step=prompts_per_step, group_size=2, max_new_toks=3), grpo=grpo)
    return SimpleNamespace(
        recipe=recipe,
        order=PromptOrder(len(PROMPTS), "f", 0, shuffle=False),
        train_prompts=SimpleNamespace(prompts=PROMPTS),
        sampling=lambda: SamplingParams(max_new_toks=3),
        phases=Phases(),
        stop_ids=(2,),
        rewards=None,
    )


def completion(prompt, sample):
    return Completion(prompt_id=prompt.id, sample_index=sample, token_ids=(5,), logprobs=(-1.0,), finish_reason="length", versions=(0,))


@pytest.fixture
def draws(monkeypatch):
    """Every call of `draw_and_score`: (prompt ids, seed). Groups of the prompts in `flat` have no spread."""
    calls = SimpleNamespace(seen=[], flat=set())

    def draw_and_score(session, prompts, num_samples, params, seed):
        calls.seen.append(([p.id for p in prompts], seed))
        return [(completion(p, j), 1.0 if p.id in calls.flat else float(j)) for p in prompts for j in range(num_samples)]

    monkeypatch.setattr(collecting, "draw_and_score", draw_and_score)
    monkeypatch.setattr(held_out, "draw_and_score", draw_and_score)
    monkeypatch.setattr(collecting, "from_leader", lambda value: value)
    monkeypatch.setattr(collecting, "gather_replicas", lambda value: [value, 3])
    return calls


def ids(rollouts):
    return list(rollouts.prompts)


def test_without_dynamic_sampling_one_round_keeps_every_group(draws):
    draws.flat = {"p0", "p1", "p2", "p3"}
    rollouts = collecting.collect(session_of(dynamic=False), 1)
    assert ids(rollouts) == ["p0", "p1", "p2", "p3"] and len(draws.seen) == 1
    assert rollouts.rewards == [1.0] * 8
    assert [(c.prompt_id, c.sample_index) for c in rollouts.completions] == [(f"p{i}", j) for i in range(4) for j in range(2)]


def test_groups_without_spread_are_replaced_by_fresh_prompts(draws):
    draws.flat = {"p1", "p2", "p4", "p6"}
    session = session_of(dynamic=True)
    rollouts = collecting.collect(session, 1)
    assert [seen for seen, _ in draws.seen] == [["p0", "p1", "p2", "p3"], ["p4", "p5"], ["p6"], ["p7"]]
    assert ids(rollouts) == ["p0", "p3", "p5", "p7"]
    assert rollouts.rewards == [0.0, 1.0] * 4
    assert len({seed for _, seed in draws.seen}) == 4, "each round draws with other numbers"
    assert session.order.take(1) == [8], "a resume goes on behind all that was drawn"


def test_enough_spread_needs_one_round(draws):
    rollouts = collecting.collect(session_of(dynamic=True), 1)
    assert ids(rollouts) == ["p0", "p1", "p2", "p3"] and rollouts.reward_failures == 3, "those of the other replica"
    assert len(draws.seen) == 1


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_last_round_keeps_what_it_got(draws, rounds):
    """A task that is solved has no spread at all: the step still has its size, with advantages of 0."""
    draws.flat = {p.id for p in PROMPTS}
    rollouts = collecting.collect(session_of(dynamic=True, rounds=rounds), 1)
    assert len(draws.seen) == rounds + 1
    assert ids(rollouts) == [f"p{i}" for i in range(4 * rounds, 4 * rounds + 4)]


def test_a_prompt_is_never_twice_in_a_step(draws):
    """Fewer prompts than the rounds ask for: the second epoch brings kept ones again, which are left out, even if nothing is left."""
    draws.flat = {"p0", "p1", "p2", "p8", "p9", "p10", "p11"}
    rollouts = collecting.collect(session_of(dynamic=True, rounds=2, prompts_per_step=10), 1)
    first, second, third = (seen for seen, _ in draws.seen)
    assert first == [f"p{i}" for i in range(10)] and second == ["p10", "p11", "p0", "p1", "p2"]
    assert third == [], "p3 to p7 come again, and are here already"
    assert ids(rollouts) == ["p3", "p4", "p5", "p6", "p7"]
    assert len(rollouts.completions) == len(rollouts.rewards) == 10


def test_draw_seeds_differ_by_run_step_and_round():
    seeds = [collecting.draw_seed(run, step, attempt) for run in (1, 2) for step in range(20) for attempt in range(64)]
    assert len(set(seeds)) == len(seeds)
    with pytest.raises(AssertionError):
        collecting.draw_seed(1, 5, 64)
    assert collecting.draw_seed(1, 5) == collecting.draw_seed(1, 5, 0)


def test_failures_of_the_reward_function_are_counted_from_a_mark_over_replicas(monkeypatch):
    """Not since the process began: a resumed run must write what the uninterrupted one wrote."""
    session = SimpleNamespace(rewards=SimpleNamespace(counters=SimpleNamespace(failures=7)))
    monkeypatch.setattr(collecting, "from_leader", lambda value: value)
    monkeypatch.setattr(collecting, "gather_replicas", lambda value: [value, 10])
    before = collecting.own_failures(session)
    session.rewards.counters.failures += 2
    assert collecting.reward_failures(session, before) == 12
    assert collecting.own_failures(SimpleNamespace(rewards=None)) == 0


class MergingTokenizer:
    """Ids 3 and 4 are the two halves of a word that has an id of its own: what it encodes is never what an engine may draw."""

    def __init__(self):
        self.words, self.encoded = {2: "", 3: "ab", 4: "cd", 7: "abcd", 8: "!"}, 0

    def batch_decode(self, sequences, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(self.words[i] for i in ids) for ids in sequences]

    def encode(self, text):
        self.encoded += 1
        return [7 if part == "abcd" else 8 for part in re.findall("abcd|!", text)]


def test_tokens_that_encode_to_others_stay_those_that_were_drawn(monkeypatch):
    """Text is for the reward alone: ids of the text that was drawn would belong to other log-probs, at another length."""
    tokenizer, engine_gave, scored = MergingTokenizer(), [], []
    assert tokenizer.encode("".join(tokenizer.batch_decode([[3, 4, 8]], True))) == [7, 8]

    def generate(requests, params, seed):
        drawn = {0: ((3, 4, 8, 2), (-0.5, -1.0, -1.5, -2.0)), 1: ((7, 2), (-0.25, -0.75))}
        for r in requests:
            ids, logprobs = drawn[r.sample_index]
            kept = {"prompt_id": r.prompt.id, "sample_index": r.sample_index, "versions": (6,) * len(ids), "finish_reason": "stop"}
            engine_gave.append(Completion(token_ids=ids, logprobs=logprobs, **kept))
        return list(engine_gave)

    def score(texts, answers):
        scored.extend(texts)
        return [float(len(text)) for text in texts]

    session = session_of(dynamic=False)
    session.ranks, session.tokenizer = SimpleNamespace(dp=1, dp_rank=0), tokenizer
    session.engine = SimpleNamespace(generate=generate)
    session.rewards = SimpleNamespace(score=score, counters=SimpleNamespace(failures=0))
    monkeypatch.setattr(collecting, "from_leader", lambda value: value)
    monkeypatch.setattr(collecting, "gather_replicas", lambda value: [value])
    encoded = tokenizer.encoded
    pairs = collecting.draw_and_score(session, PROMPTS[:2], 2, session.sampling(), seed=3)
    assert [c for c, _ in pairs] == engine_gave and len(engine_gave) == 4
    assert scored == ["abcd!", "abcd"] * 2 and [r for _, r in pairs] == [5.0, 4.0] * 2
    assert tokenizer.encoded == encoded, "a completion's text is never turned into ids"


def test_an_evaluation_counts_first_any_and_mean(draws):
    """Samples of a prompt score 0 then 1, but 1 and 1 for p2: pass@1 1/3, pass@k 1, avg@k 2/3."""
    draws.flat = {"p2"}
    session = session_of(dynamic=False)
    session.recipe = Recipe(eval=EvalConfig(samples=2, temperature=0.5, top_p=0.9, top_k=7), rollout=RolloutConfig(max_new_toks=33))
    found = held_out.evaluate(session, SimpleNamespace(prompts=PROMPTS[:3]))
    assert found["pass@1"] == pytest.approx(1 / 3) and found["pass@k"] == 1.0
    assert found["reward"] == found["avg@k"] == pytest.approx(2 / 3)
    assert (found["samples"], found["num_prompts"], found["response_toks"]) == (2.0, 3.0, 1.0)
    want = SamplingParams(max_new_toks=33, temperature=0.5, top_p=0.9, top_k=7, stop_token_ids=(2,))
    assert held_out.eval_sampling(session) == want
    held_out.evaluate(session, SimpleNamespace(prompts=PROMPTS[:3]))
    assert draws.seen[0] == draws.seen[1], "two evaluations draw the same numbers"
