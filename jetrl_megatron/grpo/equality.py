r"""Gold against answer. The symbolic part calls math-verify and may run forever or eat all memory: only reward workers call it.

Enters: two answer strings as `extraction.py` returns them (the gold as the data set has it). Leaves: a `Verdict`.
Order: the gold is always the first argument, because math-verify is not symmetric. Every string is put into a box before
it is parsed, because bare LaTeX and bare equations are misread. math-verify's own timeouts are switched off: they
need the main thread and do not bound the time; the pool kills the process instead.
Numbers are not compared by math-verify, which rounds to 6 places and so takes 1/2004! for 1/2006!, but exactly, or to 40
significant digits where irrational.
"""

import re
from enum import Enum
from fractions import Fraction
from typing import Any

from jetrl_megatron.grpo.answers import Number, Parts, is_prose, normalise, plain_number, split_parts, strip_unit, text_answer

_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne|neq|in|cup|cap|setminus|subset)(?![A-Za-z])")
_ASSIGNED = re.compile(r"([A-Za-z](?:_\{?\w+\}?)?|[A-Za-z]\([A-Za-z]\))\s*=\s*([^=]+)")
_BARE = re.compile(r"(?<![\\A-Za-z])(pi|infinity|infty|inf|oo)(?![A-Za-z])")
_BARE_LATEX = {"pi": r"\pi ", "infinity": r"\infty ", "infty": r"\infty ", "inf": r"\infty ", "oo": r"\infty "}
_SPLIT_DIGITS = re.compile(r"\d\s+\d")
_TINY = 1e-6
_DIGITS = 50
_SAME_DIGITS = 40


class Verdict(Enum):
    """What the comparison found; only `equal` scores 1."""

    equal = "equal"
    different = "different"
    gold_unparseable = "gold_unparseable"
    answer_unparseable = "answer_unparseable"


def compare_plain(gold: str, answer: str) -> Verdict | None:
    """Decide without sympy: both plain numbers, or both plain text; None when algebra is needed."""
    gold, answer = normalise(gold), normalise(answer)
    gold_number, number = plain_number(gold), plain_number(answer)
    if gold_number and number:
        return Verdict.equal if gold_number.equals(number) else Verdict.different
    gold_text, text = text_answer(gold), text_answer(answer)
    if gold_text is not None and text is not None:
        return Verdict.equal if gold_text == text else Verdict.different
    return None


def gold_is_plain(gold: str) -> bool | None:
    """Whether a gold answer can be used, decided without sympy; None when it must be parsed."""
    gold = normalise(gold)
    if not gold or is_prose(strip_unit(gold)):
        return False
    return True if plain_number(gold) or text_answer(gold) is not None else None


def gold_parses(gold: str) -> bool:
    """Whether every part of a gold answer parses to something that an answer can be compared with. Workers only."""
    plain = gold_is_plain(gold)
    if plain is not None:
        return plain
    gold = normalise(gold)
    items = (gold,) if _RELATION.search(gold) else split_parts(gold).items
    return bool(items) and all(_parses(item) for item in items)


def compare(gold: str, answer: str) -> Verdict:
    """Compare an answer with the gold answer by the rules of `answers.py` and, where needed, algebra. Workers only."""
    decided = compare_plain(gold, answer)
    if decided is not None:
        return decided
    gold, answer = normalise(gold), normalise(answer)
    if not gold:
        return Verdict.gold_unparseable
    if _RELATION.search(gold):
        return _compare_symbolic(gold, answer)
    return _compare_parts(split_parts(gold), split_parts(answer))


def _compare_parts(gold: Parts, answer: Parts) -> Verdict:
    if len(gold.items) != len(answer.items):
        return Verdict.different if all(_parses(item) for item in answer.items) else Verdict.answer_unparseable
    kinds = {gold.kind, answer.kind}
    if len(gold.items) == 1:
        return _compare_one(gold.items[0], answer.items[0])
    if kinds <= {"list", "{}"}:
        return _match_unordered(gold.items, answer.items)
    if len(kinds) > 1 and not kinds <= {"list", "()"} and not kinds <= {"list", "[]"}:
        return Verdict.different
    verdicts = [_compare_one(g, a) for g, a in zip(gold.items, answer.items, strict=True)]
    return next((verdict for verdict in verdicts if verdict is not Verdict.equal), Verdict.equal)


def _match_unordered(gold: tuple[str, ...], answer: tuple[str, ...]) -> Verdict:
    left = list(answer)
    for item in gold:
        verdicts = [_compare_one(item, candidate) for candidate in left]
        if Verdict.equal not in verdicts:
            return verdicts[0] if len(set(verdicts)) == 1 else Verdict.different
        left.pop(verdicts.index(Verdict.equal))
    return Verdict.equal


def _compare_one(gold: str, answer: str) -> Verdict:
    decided = compare_plain(gold, answer)
    if decided is not None:
        return decided
    gold_name, gold_value = _assignment(gold)
    name, value = _assignment(answer)
    if text_answer(gold) is not None:
        return (compare_plain(gold, value) if name else None) or Verdict.different
    if gold_name and name and gold_name != name:
        return Verdict.different
    if gold_name and (name or "=" not in answer):
        return _compare_value(gold_value, value)
    if "=" not in gold and "=" in answer and not gold_name:
        return _compare_value(gold, answer.rsplit("=", 1)[1].strip())
    return _compare_value(gold, answer)


def _assignment(text: str) -> tuple[str, str]:
    match = _ASSIGNED.fullmatch(text)
    return (match.group(1), match.group(2).strip()) if match else ("", text)


def _compare_value(gold: str, answer: str) -> Verdict:
    decided = compare_plain(gold, answer)
    return decided if decided is not None else _compare_symbolic(gold, answer)


def _compare_symbolic(gold: str, answer: str) -> Verdict:
    from math_verify import verify

    gold_expr = _parse(gold)
    if gold_expr is None:
        return Verdict.gold_unparseable
    expr = _parse(answer)
    if expr is None:
        return Verdict.answer_unparseable
    if getattr(gold_expr, "is_number", False) and getattr(expr, "is_number", False):
        return Verdict.equal if _numbers_equal(gold_expr, expr, plain_number(gold), plain_number(answer)) else Verdict.different
    same = verify([gold_expr], [expr], timeout_seconds=None) and _tiny_constants(gold_expr) == _tiny_constants(expr)
    return Verdict.equal if same else Verdict.different


def _parses(text: str) -> bool:
    return bool(plain_number(text)) or text_answer(text) is not None or _parse(text) is not None


def _parse(text: str) -> Any:
    """Parse one answer inside a box to a sympy expression; None when it is no mathematics."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    text = strip_unit(text)
    if is_prose(text) or _SPLIT_DIGITS.search(text):
        return None
    latex = _BARE.sub(lambda m: _BARE_LATEX[m.group(1)], _braced_powers(text))
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=rules)
    found = parse(f"\\boxed{{{latex}}}", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _braced_powers(text: str) -> str:
    """Write `^(...)` as `^{(...)}`, which is what LaTeX needs."""
    start = 0
    while (start := text.find("^(", start)) >= 0:
        depth = 0
        for end in range(start + 1, len(text)):
            depth += (text[end] == "(") - (text[end] == ")")
            if depth == 0:
                text = f"{text[: start + 1]}{{{text[start + 1 : end + 1]}}}{text[end + 1 :]}"
                break
        start += 2
    return text


def _numbers_equal(gold: Any, answer: Any, gold_plain: Number | None, plain: Number | None) -> bool:
    import sympy

    gold = sympy.Rational(gold_plain.value.numerator, gold_plain.value.denominator) if gold_plain else gold.doit()
    answer = sympy.Rational(plain.value.numerator, plain.value.denominator) if plain else answer.doit()
    if gold == answer:
        return True
    if not (gold.is_finite and answer.is_finite):
        return False
    if gold.is_Rational and answer.is_Rational:
        return False
    left, right = gold.evalf(_DIGITS), answer.evalf(_DIGITS)
    for decimal, other in ((gold_plain, right), (plain, left)):
        if decimal and decimal.places and other.is_real and decimal.stands_for(Fraction(str(other))):
            return True
    if left == 0 or right == 0:
        return sympy.simplify(gold - answer) == 0
    digits = 9 if gold.has(sympy.Float) or answer.has(sympy.Float) else _SAME_DIGITS
    return bool(abs(left - right) <= sympy.Float(10, _DIGITS) ** -digits * max(abs(left), abs(right)))


def _tiny_constants(expr: Any) -> frozenset[Any]:
    """The constants too small for math-verify's rounding; equal expressions must hold the same ones."""
    import sympy

    if not isinstance(expr, sympy.Basic):
        return frozenset()
    found, walk = set(), sympy.preorder_traversal(expr)
    for node in walk:
        if getattr(node, "is_number", False):
            walk.skip()
            value = node.doit()
            if value.is_finite and value != 0 and abs(value.evalf(_DIGITS)) < _TINY:
                found.add(value)
    return frozenset(found)
