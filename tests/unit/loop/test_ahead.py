"""The order of draws, updates and pushes, with an engine of Python that holds the weights it was given."""

import threading
from types import SimpleNamespace

import pytest

from jetrl_megatron import train as loop
from jetrl_megatron.config import Correction, Engine, GrpoConfig, Recipe, RolloutConfig, RunConfig
from jetrl_megatron.contracts import Completion, Prompt, Sample, SamplingParams
from jetrl_megatron.data.order import PromptOrder
from jetrl_megatron.failure import RunFailure
from jetrl_megatron.grpo.staleness import batch_staleness
from jetrl_megatron.loop import collect as collecting
from jetrl_megatron.loop.checks import warn_uncorrected
from jetrl_megatron.loop.learn import learn
from jetrl_megatron.metrics import STEP_KEYS
from jetrl_megatron.rollout.background_draw import BackgroundDraw, PushHold
from jetrl_megatron.run.phases import BESIDE, Phases

PROMPTS = tuple(Prompt(id=f"p{i}", token_ids=(1,), text="", answer="", source="test") for i in range(12))
STEPS = 4


class FakeEngine:
    """Draws with the weights that were pushed last. In the background a draw begins, waits for `learning`, then ends."""

    def __init__(self, events):
        self.events, self.version, self.failure = events, 0, None
        self.drawing, self.learning = threading.Event(), threading.Event()

    def generate(self, requests, params, *, seed):
        beside = threading.current_thread() is not threading.main_thread()
        self.events.append(f"draw of {requests[0].prompt.id} with {self.version}{' beside' if beside else ''}")
        self.drawing.set()
        if beside:
            assert self.learning.wait(20), "nobody learned beside the draw"
        if self.failure is not None and beside:
            raise self.failure
        given = {"token_ids": (5,), "logprobs": (-1.0,), "finish_reason": "stop", "versions": (self.version,)}
        return [Completion(prompt_id=r.prompt.id, sample_index=r.sample_index, **given) for r in requests]

    def rest(self):
        self.events.append("rest")

    def begin(self, requests, params, *, seed):
        self.drawing.clear()
        self.learning.clear()
        return BackgroundDraw(lambda: self.generate(requests, params, seed=seed), PushHold())


@pytest.fixture
def made(monkeypatch):
    """A session whose parts note what they do, and the records of its steps."""
    events = []
    rollout = RolloutConfig(engine=Engine.vllm_pool, max_staleness=1, prompts_per_step=2, group_size=2, max_new_toks=3)
    engine = FakeEngine(events)
    session = SimpleNamespace(
        recipe=Recipe(rollout=rollout, run=RunConfig(steps=STEPS), grpo=GrpoConfig(minibatches=2)),
        ranks=SimpleNamespace(dp=1, dp_rank=0),
        order=PromptOrder(len(PROMPTS), "f", 0, shuffle=False),
        train_prompts=SimpleNamespace(prompts=PROMPTS),
        sampling=lambda: SamplingParams(max_new_toks=3),
        actor=SimpleNamespace(version=0),
        engine=engine,
        publisher=None,
        rewards=None,
        phases=Phases(),
        pending=None,
        drawing=None,
        failure=None,
    )
    rewards = [0.0, 1.0] * 2
    monkeypatch.setattr(collecting, "from_leader", lambda value: value if value is not None else rewards)
    monkeypatch.setattr(collecting, "gather_replicas", lambda value: [value])

    def fake_learn(session, samples):
        age = batch_staleness(samples, session.actor.version, 2, session.recipe.rollout.max_staleness)
        events.append(f"learn {samples[0].prompt.id} at {session.actor.version}")
        if session.drawing is not None:
            assert engine.drawing.wait(20), "no draw began before the update's end"
        if session.failure is not None:
            raise session.failure
        session.actor.version += 2
        engine.learning.set()
        return dict.fromkeys(STEP_KEYS, 0.0) | age

    def push(session):
        assert session.drawing is None
        events.append(f"push {session.actor.version}")
        engine.version = session.actor.version

    monkeypatch.setattr(loop, "learn", fake_learn)
    monkeypatch.setattr(loop, "push", push)
    records = []
    metrics = SimpleNamespace(log=lambda kind, step, values: records.append(values))
    return session, events, records, lambda step: loop._step(session, metrics, step)


def test_each_draw_overlaps_the_update_before_and_has_the_weights_before_it(made):
    session, events, records, step = made
    for number in range(1, STEPS + 1):
        step(number)
    drawn, rest = [e for e in events if e.endswith("beside")], [e for e in events if not e.endswith("beside")]
    assert drawn == ["draw of p2 with 0 beside", "draw of p4 with 2 beside", "draw of p6 with 4 beside"], "none behind the last step"
    assert rest == ["draw of p0 with 0", *(e for i in range(4) for e in (f"learn p{2 * i} at {2 * i}", f"push {2 * i + 2}"))]
    for number, event in enumerate(drawn, start=1):  # after the push before it, before the push behind it
        assert number == 1 or events.index(f"push {2 * number - 2}") < events.index(event)
        assert events.index(event) < events.index(f"push {2 * number}")
    assert [r["staleness"] for r in records] == [r["staleness_max"] for r in records] == [0.0, 1.0, 1.0, 1.0]
    assert [BESIDE in r["seconds"] for r in records] == ["draw_wait" in r["seconds"] for r in records] == [True, True, True, False]
    assert ["rollout" in r["seconds"] for r in records] == [True, False, False, False]
    assert session.pending is None and session.order.take(1) == [8]


def test_between_steps_the_order_stands_behind_what_is_pending(made):
    session, _, _, step = made
    step(1)
    assert list(session.pending.prompts) == ["p2", "p3"] and session.order.state_dict()["position"] == 4
    assert session.drawing is None, "a save and an evaluation find no draw under way"


@pytest.mark.parametrize("failure", [ValueError("refused"), RunFailure("no engine server is left")])
def test_a_failed_draw_fails_the_step_behind_the_update(made, failure):
    session, events, records, step = made
    session.engine.failure = failure
    with pytest.raises(type(failure), match=str(failure)):
        step(1)
    assert "learn p0 at 0" in events and records == [] and "push 2" not in events


def test_a_failed_update_leaves_the_draw_to_the_end_of_the_session(made):
    session, _, _, step = made
    session.failure = RunFailure("not finite")
    with pytest.raises(RunFailure, match="not finite"):
        step(1)
    assert session.drawing is not None and not session.drawing.leave(0.1)
    session.engine.learning.set()
    assert session.drawing.leave(20)


def test_in_turn_nothing_is_drawn_beside_anything(made):
    session, events, records, step = made
    session.recipe = Recipe(rollout=RolloutConfig(prompts_per_step=2, group_size=2, max_new_toks=3), run=RunConfig(steps=STEPS))
    step(1)
    step(2)
    assert events == ["draw of p0 with 0", "learn p0 at 0", "push 2", "draw of p2 with 2", "learn p2 at 2", "push 4"]
    assert session.pending is None and [r["staleness_max"] for r in records] == [0.0, 0.0]
    assert BESIDE not in records[1]["seconds"]


def test_nothing_is_learned_from_what_is_older_than_the_recipe_allows():
    """Refused before the actor is touched: this one has nothing but a version."""
    drawn = {"token_ids": (5,), "logprobs": (-1.0,), "finish_reason": "stop", "versions": (2,)}
    old = Completion(prompt_id="p0", sample_index=0, **drawn)
    samples = [Sample(prompt=PROMPTS[0], completion=old, reward=0.0, advantage=0.0, loss_mask=(1,))]
    session = SimpleNamespace(recipe=Recipe(), actor=SimpleNamespace(version=3))
    with pytest.raises(RunFailure, match=r"prompt p0 has tokens of version 2 .* version 3: .* rollout\.max_staleness is 0\."):
        learn(session, samples)


def test_old_tokens_without_a_correction_are_warned_of(caplog):
    rollout = RolloutConfig(engine=Engine.vllm_pool, max_staleness=1)
    warn_uncorrected(Recipe())
    warn_uncorrected(Recipe(rollout=rollout, grpo=GrpoConfig(correction=Correction.tis)))
    assert caplog.text == ""
    warn_uncorrected(Recipe(rollout=rollout))
    assert "rollout.max_staleness is 1 and grpo.correction is none" in caplog.text and "grpo.correction=tis" in caplog.text
