"""Scores, bounds of time and memory, and failures, through the real worker processes."""

import os
import re
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jetrl_megatron.config import RewardConfig
from jetrl_megatron.grpo.rewards import RewardPool, gold_parses, with_open_think

TOWER = r"\boxed{(5^(5^(5^(5^5)) - 4) - 5)/16}"
USER_FUNCTIONS = """
    import os, signal, sys, time

    kept = []

    def hostile(text, answer):
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "sleep":
            time.sleep(60)
        if text == "hoard":
            return float(len(bytearray(1 << 33)))
        if text == "leak":
            kept.append(bytearray(80 << 20))
        if text == "raise":
            raise KeyError("no such thing")
        if text in ("nan", "inf", "1e300", "-1000001"):
            return float(text)
        if text == "fork":
            child = os.fork()
            if child == 0:
                return 0.75
            os.waitpid(child, 0)
        if text == "huge":
            return 10**400
        return 0.25 if text == answer else 0.0

    def numpy_number(text, answer):
        import numpy

        return getattr(numpy, text)(answer)

    def loaded_torch(text, answer):
        return float("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(RewardConfig(workers=2, timeout_s=10.0)) as made:
        yield made


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "reward_functions_of_a_user.py").write_text(textwrap.dedent(USER_FUNCTIONS))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "reward_functions_of_a_user"


def test_one_score_a_sample_in_order(pool: RewardPool) -> None:
    texts = [r"\boxed{\sqrt{9}}", "so 4", "#### 1,080", r"\boxed{\frac{1}{2}}", "nothing", "the answer is (B)", r"\boxed{12 \text{ cm}}"]
    golds = ["3", "5", "1080", "0.5", "1", "B", "12"]
    assert pool.score(texts, golds) == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]


def test_the_same_score_from_a_thread(pool: RewardPool) -> None:
    texts, golds = [r"\boxed{(x+1)^2}", r"\boxed{\sqrt{5}}"], ["x^2+2x+1", r"\sqrt{6}"]
    with ThreadPoolExecutor(4) as threads:
        results = [job.result() for job in [threads.submit(pool.score, texts, golds) for _ in range(8)]]
    assert results == [[1.0, 0.0]] * 8


def test_expressions_that_never_return_are_killed_and_the_pool_is_whole() -> None:
    with RewardPool(RewardConfig(workers=2, timeout_s=1.5)) as pool:
        before = pool.worker_pids()
        texts = [TOWER, r"\boxed{\sqrt{4}}", TOWER, r"\boxed{\frac{5^{5^{5^{5^{5}}} - 4} - 5}{16}}", r"\boxed{x+x}"]
        begun = time.monotonic()
        assert pool.score(texts, [r"\sqrt{2}", "2", r"\sqrt{2}", "1", "2x"]) == [0.0, 1.0, 0.0, 0.0, 1.0]
        assert time.monotonic() - begun < 60.0
        assert (pool.counters.timeouts, pool.counters.crashes, pool.counters.scored) == (3, 0, 5)
        assert len(pool.worker_pids()) == 2
        assert pool.score([r"\boxed{y+y}"] * 4, ["2y"] * 4) == [1.0] * 4
        for pid in set(before) - set(pool.worker_pids()):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_gold_answers_are_checked_in_one_batch(pool: RewardPool) -> None:
    golds = [r"\sqrt{17}", r"\dfrac{9}{7}", "6", "a long sentence here", "", r"\frac{1}{"]
    expected = [True, True, True, False, False, False]
    assert pool.gold_parses(golds) == expected
    assert gold_parses(golds) == expected


def test_unfinished_reasoning_scores_nothing(pool: RewardPool) -> None:
    before = pool.counters.open_think
    assert pool.score([r"<think> so \boxed{5}", r"<think> so </think> \boxed{5}"], ["5", "5"]) == [0.0, 1.0]
    assert pool.counters.open_think == before + 1
    opened = with_open_think("user: 2+3? <think>\n", r"it is \boxed{5}")
    assert pool.score([opened], ["5"]) == [0.0]
    assert with_open_think("<think></think>", "x") == "x"
    with RewardPool(RewardConfig(workers=1, require_closed_think=False)) as lenient:
        assert lenient.score([r"<think> so \boxed{5}"], ["5"]) == [1.0]


def test_counters_tell_unparseable_from_wrong(pool: RewardPool) -> None:
    before = pool.counters.unparseable
    assert pool.score(["no number", r"\boxed{7}", r"\boxed{\frac{}}"], ["7", "8", r"\sqrt{2}"]) == [0.0, 0.0, 0.0]
    assert pool.counters.unparseable == before + 2


def test_user_function_failures_stay_with_their_sample(user_module: str) -> None:
    cfg = RewardConfig(function=f"{user_module}:hostile", workers=2, timeout_s=1.5, memory_mb=256)
    with RewardPool(cfg) as pool:
        numbers = ["nan", "inf", "1e300", "-1000001", "huge"]
        texts = ["good", "die", "good", "sleep", "good", "hoard", "good", "raise", *numbers, "bad", "good"]
        assert pool.score(texts, ["good"] * len(texts)) == [0.25, 0, 0.25, 0, 0.25, 0, 0.25, 0, *[0] * 5, 0, 0.25]
        counters = pool.counters
        assert (counters.crashes, counters.timeouts, counters.out_of_memory, counters.errors) == (1, 1, 1, 6)
        assert len(pool.worker_pids()) == 2


def test_a_process_that_a_reward_function_forks_sends_no_reply(user_module: str) -> None:
    """Its reply would be taken for that of this sample or of the next."""
    with RewardPool(RewardConfig(function=f"{user_module}:hostile", workers=1, timeout_s=10.0)) as pool:
        assert pool.score(["fork", "good", "fork", "bad"], ["fork", "good", "fork", "good"]) == [0.25, 0.25, 0.25, 0.0]
        assert (pool.counters.crashes, pool.counters.timeouts) == (0, 0)


def test_numbers_of_numpy_are_rewards(user_module: str) -> None:
    with RewardPool(RewardConfig(function=f"{user_module}:numpy_number", workers=1, memory_mb=2048, timeout_s=60.0)) as pool:
        assert pool.score(["float32", "float64", "int64"], ["0.5", "0.25", "2"]) == [0.5, 0.25, 2.0]
        assert pool.score(["float32", "float32", "str_"], ["1", "nan", "1"]) == [1.0, 0.0, 0.0]
        assert pool.counters.errors == 2


def test_a_number_of_many_digits_is_reported_in_few(user_module: str) -> None:
    with RewardPool(RewardConfig(function=f"{user_module}:hostile", workers=1)) as pool, pytest.raises(RuntimeError) as caught:
        pool.score(["huge"], [""])
    assert re.search(r"returned 10+\.\.\.0+; it must return a number within 1e\+06 of 0", str(caught.value)), caught.value


def test_memory_kept_by_one_sample_is_not_charged_to_the_next(user_module: str) -> None:
    with RewardPool(RewardConfig(function=f"{user_module}:hostile", workers=1, memory_mb=256, timeout_s=60.0)) as pool:
        assert pool.score(["leak"] * 8, ["leak"] * 8) == [0.25] * 8
        assert pool.counters.out_of_memory == 0


def test_a_function_that_always_fails_stops_the_run(user_module: str) -> None:
    with RewardPool(RewardConfig(function=f"{user_module}:hostile", workers=1)) as pool, pytest.raises(RuntimeError, match="no such thing"):
        pool.score(["raise", "raise"], ["", ""])


def test_workers_do_not_load_torch(user_module: str) -> None:
    with RewardPool(RewardConfig(function=f"{user_module}:loaded_torch", workers=1)) as pool:
        assert pool.score(["x"], ["x"]) == [0.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_package_at_all:f", "cannot be imported.*PYTHONPATH"),
        ("math:no_such_function", "has no function 'no_such_function'"),
        ("nonsense", "package.module:function"),
    ],
)
def test_a_function_that_is_not_there_is_named(function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardPool(RewardConfig(function=function, workers=1))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("1 / 0", r"ZeroDivisionError\('division by zero'\) at .*/NAME.py:1"),
        ("raise SystemExit(3)", r"SystemExit\(3\) at .*/NAME.py:1"),
        ("def broken(:", r"SyntaxError: .*\(NAME.py, line 1\)"),
    ],
)
def test_a_module_that_raises_on_import_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, what: str
) -> None:
    name = f"broken_rewards_{abs(hash(line))}"
    (tmp_path / f"{name}.py").write_text(line + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = rf"'{name}:f', but {name} cannot be imported, it raises {what.replace('NAME', name)}; mend it$"
    with pytest.raises(ValueError, match=message):
        RewardPool(RewardConfig(function=f"{name}:f", workers=1))


def test_bounds_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"reward\.timeout_s is 0"):
        RewardPool(RewardConfig(timeout_s=0))


def test_a_worker_killed_while_idle_costs_no_sample(pool: RewardPool) -> None:
    crashes = pool.counters.crashes
    os.kill(pool.worker_pids()[0], 9)
    time.sleep(0.2)
    assert pool.score([r"\boxed{z+z}"] * 4, ["2z"] * 4) == [1.0] * 4
    assert pool.counters.crashes == crashes and len(pool.worker_pids()) == 2
