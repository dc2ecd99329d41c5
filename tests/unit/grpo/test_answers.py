"""The comparison itself, without processes. math-verify has no timeout here; nothing below runs long."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from jetrl_megatron.grpo.answers import normalise, plain_number, split_parts, strip_unit
from jetrl_megatron.grpo.equality import Verdict, compare, compare_plain, gold_parses

EQUAL = [
    ("0,1", "(0,1)"),
    ("1,000", "1000"),
    ("5000000", "5,000,000"),
    ("12345", "12{,}345"),
    ("10000", r"10\,000"),
    ("28%", "28"),
    ("28", r"28\%"),
    ("28 percent", "28"),
    ("1331 and 1728", "1728, 1331"),
    (r"1331 \text{ and } 1728", "1331 and 1728"),
    ("12 cm", "12"),
    ("12", r"12\text{ cm}^2"),
    ("12", "12 cm"),
    ("18", "$18"),
    (r"\$5.00", "5"),
    (r"60^\circ", "60"),
    ("1/2004!", r"\frac{1}{2004!}"),
    ("x>1", r"(1,\infty)"),
    ("3x+4y+14=0", "3*x+4*y+14=0"),
    (r"\sqrt{17}", "sqrt(17)"),
    (r"\sqrt{17}", "4.123106"),
    (r"\dfrac{9}{7}", "9/7"),
    (r"\dfrac{9}{7}", "1.2857142857"),
    ("0.6666666667", "2/3"),
    ("3.33333", "10/3"),
    ("0.333333", r"\frac13"),
    ("1,2", "2,1"),
    (r"\{1,2\}", "2,1"),
    ("[1,2)", "[1,2)"),
    (r"\pm 3", "3, -3"),
    (r"2\pm\sqrt{3}", r"2-\sqrt{3}, 2+\sqrt{3}"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("5", "x = 2 + 3 = 5"),
    (r"\pi/2", "pi/2"),
    ("12", r"\text{12}"),
    ("073", r"\textbf{(073)}"),
    ("No", "no"),
    ("5:45", "5:45"),
    ("C", "(C)"),
    ("C", r"\textbf{(C)}\ 12"),
    (r"\text{Monday}", "monday"),
    ("3 1/2", "7/2"),
    (r"3\frac{1}{2}", "3.5"),
    (r"(x+1)^2", "x^2+2x+1"),
    ("x^(2)", "x^2"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\frac{\pi}{4}", r"\frac{\pi}{4}\text{ radians}"),
    ("e^2", "7.389056"),
    ("3+4i", "4i+3"),
    ("x=1, y=2", "(1,2)"),
    (r"\infty", "inf"),
]
DIFFERENT = [
    ("0,1", "01"),
    ("0,1", "1"),
    ("12,34", "1234"),
    ("1234", "12,34"),
    ("1234", "12{,}34"),
    ("28%", "0.28"),
    ("0.28", "28%"),
    ("1331 and 1728", "1728"),
    ("3,4,5", "3,4"),
    ("5", "5, 6"),
    ("1/2004!", "1/2006!"),
    (r"x>\frac{1}{2004!}", r"x>\frac{1}{2006!}"),
    ("10^{-6}", r"2 \cdot 10^{-6}"),
    ("0.00001", "0.00002"),
    ("0.0000001", "0"),
    ("1/100001", "1/100002"),
    ("10^{60}+1", "10^{60}"),
    (r"(1,\infty)", "x>1"),
    ("(1,inf)", "x>1"),
    ("3*x-1*y+13=0", "3x + 4y + 14=0"),
    (r"\sqrt{17}", "4.1231"),
    (r"\frac{1}{3}", "0.33"),
    ("1000000", "1000000.5"),
    ("5x", "5"),
    ("5", "5x"),
    ("12m", "12"),
    ("5 million", "5"),
    ("2", r"2\pi"),
    ("(1,200)", "1200"),
    ("(1,2)", "(2,1)"),
    ("[1,2)", "(1,2)"),
    ("x=1", "y=1"),
    ("C", "c"),
    ("5:45", "45"),
    ("No", "yes"),
    ("C", "D"),
    ("1 000", "0"),
    (r"\{1,2\}", "(1,2)"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal(gold: str, answer: str) -> None:
    assert compare(gold, answer) is Verdict.equal


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_not_equal(gold: str, answer: str) -> None:
    assert compare(gold, answer) is not Verdict.equal


@pytest.mark.parametrize(
    ("gold", "usable"),
    [
        (r"\sqrt{17}", True),
        (r"\dfrac{9}{7}", True),
        ("6", True),
        ("12 apples", True),
        ("1331 and 1728", True),
        ("3*x-y=0", True),
        (r"(1,\infty)", True),
        (r"\text{no solution}", True),
        ("C", True),
        ("the quick brown fox", False),
        ("Mrs. Hilt", False),
        ("", False),
        ("   ", False),
        (r"\frac{", False),
        ("$", False),
    ],
)
def test_gold_is_checked_before_training(gold: str, usable: bool) -> None:
    assert gold_parses(gold) is usable


def test_an_unusable_gold_never_scores() -> None:
    for gold in ("", "the quick brown fox"):
        for answer in ("", "the quick brown fox", "5"):
            assert compare(gold, answer) is not Verdict.equal, (gold, answer)


def test_unparseable_answers_are_told_from_wrong_ones() -> None:
    assert compare(r"\sqrt{2}", "the quick fox") is Verdict.answer_unparseable
    assert compare(r"\sqrt{2}", r"\sqrt{3}") is Verdict.different


def test_normal_forms() -> None:
    assert normalise("$1,234.$") == "1234"
    assert normalise("(1,200)") == "(1,200)"
    assert normalise("1,234, 5,678") == "1234, 5678"
    assert normalise("\u22123") == "-3"
    assert strip_unit("7 gold stars") == "7"
    assert strip_unit("7 m") == "7 m", "one letter is a variable"
    assert strip_unit("3 or 4") == "3 or 4"
    assert split_parts("(0,1)").kind == "()" and split_parts("(0,1)").items == ("0", "1")
    assert split_parts("f(1,2)").kind == ""
    assert plain_number("-1.50e2").value == Fraction(-150)
    assert plain_number("1/0") is None
    assert plain_number("9" * 200) is None


_numbers = st.one_of(
    st.integers(-2000, 2000).map(str),
    st.tuples(st.integers(-50, 50), st.integers(1, 20)).map(lambda p: f"\\frac{{{p[0]}}}{{{p[1]}}}".replace("{-", "{-")),
    st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda p: f"{p[0]}/{p[1]}"),
    st.decimals(-1000, 1000, places=3).map(str),
    st.integers(0, 10**7).map(lambda n: f"{n:,}"),
)


@settings(max_examples=150, deadline=None)
@given(_numbers, _numbers, st.booleans())
def test_the_fast_path_accepts_nothing_that_math_verify_refuses(gold: str, other: str, same: bool) -> None:
    answer = gold if same else other
    if compare_plain(gold, answer) is Verdict.equal:
        boxed = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
        assert verify(*boxed, timeout_seconds=None), (gold, answer)


@settings(max_examples=100, deadline=None)
@given(st.fractions(-1000, 1000, max_denominator=50), st.fractions(-1000, 1000, max_denominator=50))
def test_fractions_are_equal_exactly_when_their_values_are(a: Fraction, b: Fraction) -> None:
    verdict = compare_plain(f"{a.numerator}/{a.denominator}", f"{b.numerator}/{b.denominator}")
    assert verdict is (Verdict.equal if a == b else Verdict.different)
