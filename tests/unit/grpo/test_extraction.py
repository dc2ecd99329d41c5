import time

import pytest

from jetrl_megatron.grpo.extraction import after_reasoning, extract_answer

MATH = [
    (r"so \boxed{5}.", "5"),
    (r"\boxed{\frac{1}{2}} and more", r"\frac{1}{2}"),
    (r"first \boxed{1}. Then \boxed{2}", "2"),
    (r"first \boxed{1}, but no: 7 - \boxed{2}", "2"),
    (r"$\boxed{1331}$ and $\boxed{1728}$", "1331, 1728"),
    (r"\boxed{3}, then it was cut at \boxed{4", None),
    ("sum\n#### 1,234\nmore 9", "1,234"),
    ("#### 1\n#### 2", "2"),
    ("The answer is 5 apples and he was happy 3 times", "5"),
    ("The final answer is: **1,000**.", "1,000"),
    (r"the answer is $\frac{1}{2}$.", r"\frac{1}{2}"),
    ("The answer is $18.", "18"),
    ("The answer is $5 per day", "5"),
    ("the answer is 2x+3.", "2x+3"),
    ("The answer is x = 5.", "x = 5"),
    ("The answer is 5x + 3.", "5x + 3"),
    ("answer: 1331 and 1728", "1331, 1728"),
    ("He has 12 - 5 = 7", "7"),
    ("so -3", "-3"),
    ("range 5-7", "7"),
    ("pays $5 each, so $10 in total", "10"),
    ("it costs -$5", "-5"),
    ("1/2 of it", "1/2"),
    ("I got 3.5.", "3.5"),
    ("The 2nd is 5kg and 3x", "5"),
    ("12,34", "12,34"),
    ("about 1,000,000 people", "1,000,000"),
    ("so $x=3$ and done", "x=3"),
    ("28%", "28%"),
    ("they leave at 5:45", "5:45"),
    ("no number here", None),
    ("", None),
    (r"\boxed{}", None),
    (r"\boxed{oops \boxed{5}", "5"),
    (r"\boxed{1}, \boxed{2}, and \boxed{3}.", "1, 2, 3"),
    (r"\boxed{" + "1" * 2000 + "}", None),
]


@pytest.mark.parametrize(("text", "answer"), MATH)
def test_the_extraction_rule(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is (C).", "C"),
        ("I think B is wrong. Answer: D", "D"),
        ("reasoning\n(D)", "D"),
        (r"\boxed{A}", "A"),
        ("The answer is C) Paris", "C"),
        ("A big dog", None),
        ("it is 7", None),
    ],
)
def test_choices_are_letters_only(text: str, answer: str | None) -> None:
    assert extract_answer(text, "choice") == answer


def test_words_come_from_the_phrase_or_a_short_last_line() -> None:
    assert extract_answer("So the answer is Monday. Bye", "words") == "Monday"
    assert extract_answer("thinking about it\n**Purple**", "words") == "Purple"
    assert extract_answer("this last line is far too long to be an answer", "words") is None


def test_unfinished_reasoning_states_nothing() -> None:
    cut = r"<think> maybe \boxed{5}"
    assert after_reasoning(cut, require_closed_think=True) is None
    assert after_reasoning(cut, require_closed_think=False) == cut
    assert after_reasoning("<think>1</think> 2", require_closed_think=True) == " 2"
    assert after_reasoning("1</think> 2", require_closed_think=True) == " 2", "the prompt opened the block"
    assert after_reasoning("<think>1</think> 2 <think> 3", require_closed_think=True) is None
    assert after_reasoning("plain", require_closed_think=True) == "plain"


@pytest.mark.parametrize(
    "unit",
    ["\\[", "\\(", "$", "$ ", "\\boxed{", "\\boxed{1} ", "1,", "1,234,", "answer is ", "1a ", "\\text{", "- ", "1/ ", "#### ", " "],
)
def test_degenerate_completions_are_read_in_linear_time(unit: str) -> None:
    """The extraction runs in the trainer's own process, where nothing can kill it: a looping model must not stop the run."""
    text = unit * (60_000 // len(unit))
    begun = time.process_time()
    for expected in ("math", "choice", "words"):
        extract_answer(text, expected)
    assert time.process_time() - begun < 2.0
