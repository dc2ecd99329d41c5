r"""Normal forms of answer strings: what is equal before any algebra is done. Applied to the gold and to the answer alike.

Commas: stripped only in true 3-digit groups outside brackets (`1,000`, `12{,}345`); `12,34`, `0,1` and `(1,200)` are several parts.
Percent and units: a percent sign, a currency sign, degrees and a unit behind a number are dropped and never compared. So `28%` equals
`28` and not `0.28`; `12 cm` equals `12` (and `12 m`). A single bare letter is a variable, never a unit, and a word that changes
the value ("million", "dozen") or is mathematics ("pi", "and") is no unit.
Decimals: numbers are compared exactly, as fractions. Only a decimal written with at least 5 places and 5 significant digits also
stands for what rounds or truncates to it: `0.6666666667` equals `2/3`, `0.67` does not.
Several parts: `a, b`, `a and b`, `a \pm b` are unordered lists, `\{a, b\}` is a set, `(a, b)` and `[a, b]` keep their order.

No sympy here: this runs in the trainer's process as the fast path, and again in the workers.
"""

import re
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal, localcontext
from fractions import Fraction

MIN_ROUNDED_PLACES = 5
MAX_NUMBER_CHARS = 100

_REPLACED = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "°": r"^\circ",
    "√": r"\sqrt ", "·": r"\cdot ", "\u222a": r"\cup ", "±": r"\pm ", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac",
    "\\left": "", "\\right": "", "\\displaystyle": "", "\\!": "", "\\;": " ", "\\:": " ", "\\quad": " ", "\\ ": " ", "~": " ",
    "\\geq": "\\ge", "\\leq": "\\le", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\degree": "^\\circ", "**": "",
}  # fmt: skip
_LATEX_GROUPS = re.compile(r"(?<![\d.])[1-9]\d{0,2}(?:(?:\{,\}|\\,)\d{3})+(?!\d|\{,\}\d)")
_COMMA_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?\d{{1,2}}))?"
    rf"|(?P<whole>\d+)\s+(?P<mixed_top>\d+)\s*/\s*(?P<mixed_bottom>\d+)"
    rf"|(?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})"
    r"|(?P<latex_whole>\d*)\s*\\frac\s*(?:\{\s*(?P<latex_top>\d+)\s*\}\s*\{\s*(?P<latex_bottom>\d+)\s*\}|(?P<short>\d\d)))"
)
_NO_UNIT = frozenset({
    "and", "or", "pi", "sqrt", "mod", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "times", "over", "plus", "minus",
    "to", "choose", "inf", "infinity", "oo", "div", "if", "for", "where", "of", "is", "hundred", "hundreds", "thousand", "thousands",
    "million", "millions", "billion", "billions", "trillion", "dozen", "dozens", "half", "halves", "score",
})  # fmt: skip
_TEXT_TAG = r"\\(?:text|mathrm|textbf|mathbf|textrm|textit|mbox|rm)"
_LATEX_UNIT = re.compile(rf"\s*{_TEXT_TAG}\s*\{{([^{{}}]*)\}}\s*(?:\^\s*\{{?[23]\}}?)?$")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\bdegrees?)\s*[CF]?$")
_PERCENT = re.compile(r"\s*(?:\\?%|\bper\s?cent|\\text\{\s*per\s?cent\s*\})\s*$")
_CURRENCY = re.compile(r"^(-?)\s*(?:\\?\$|€|£|¥|USD\s)\s*(?=[\d.\\(-])")
_WORD_UNIT = re.compile(r"(?<=[\d})])\s+\(?([A-Za-z][A-Za-z./\- ]*)\)?(?:\s*\^\s*\{?[23]\}?)?$")
_ATTACHED_UNIT = re.compile(r"(?<=\d)(?:cm|mm|km|kg|mg|ft|lbs?|mph|ml|mL|hrs?|mins?|secs?)(?:\^\{?[23]\}?)?$")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}[.,']?\s+[A-Za-z]{2,}")
_OPENERS, _CLOSERS = "([{", ")]}"


@dataclass(frozen=True, kw_only=True)
class Number:
    """An exactly read number; `places` counts the decimal places it was written with, 0 for integers and fractions."""

    value: Fraction
    places: int = 0
    digits: int = 0
    """Significant digits of a decimal."""

    def equals(self, other: "Number") -> bool:
        """Exact equality, or one is a long decimal that the other rounds or truncates to."""
        return self.value == other.value or self.stands_for(other.value) or other.stands_for(self.value)

    def stands_for(self, value: Fraction) -> bool:
        """Whether `value` rounds (half up) or truncates to this decimal; never for short decimals."""
        if self.places < MIN_ROUNDED_PLACES or self.digits < MIN_ROUNDED_PLACES:
            return False
        with localcontext() as context:
            context.prec = 4 * MAX_NUMBER_CHARS
            unit = Decimal(1).scaleb(-self.places)
            exact = Decimal(value.numerator) / Decimal(value.denominator)
            if exact.adjusted() > 2 * MAX_NUMBER_CHARS:
                return False
            return any(Fraction(exact.quantize(unit, rounding)) == self.value for rounding in (ROUND_HALF_UP, ROUND_DOWN))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """An answer cut into its parts; `kind` is "" for one value, "list", or the brackets: "{}", "()", "[]", "[)", "(]"."""

    kind: str
    items: tuple[str, ...]


def normalise(answer: str) -> str:
    """Return the answer without delimiters, spacing commands and digit grouping; units are left (see `strip_unit`)."""
    text = answer.strip()
    for symbol, plain in _REPLACED.items():
        text = text.replace(symbol, plain)
    for start, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(start) + len(end) and text.startswith(start) and text.endswith(end):
            text = text[len(start) : -len(end)].strip()
    if text.startswith("\\boxed{") and text.endswith("}"):
        text = text[7:-1].strip()
    text = re.sub(r"\\(?:text|mathrm)\{\s*(and|or)\s*\}", r" \1 ", text)
    text = re.sub(rf"{_TEXT_TAG}\s*\{{\s*([-+(]*[\d.,]+\)?)\s*\}}", r"\1", text)
    text = _LATEX_GROUPS.sub(lambda m: m.group().replace("{,}", "").replace("\\,", ""), text)
    text = text.replace("{,}", ",").replace("\\,", " ")
    text = _COMMA_GROUPS.sub(lambda m: m.group().replace(",", "") if _depth(text, m.start()) == 0 else m.group(), text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".").strip()


def strip_unit(text: str) -> str:
    """Drop one currency sign, percent sign, degree sign or unit (the rule of this module) from a normalised answer."""
    for pattern in (_PERCENT, _DEGREES, _ATTACHED_UNIT):
        shorter = pattern.sub("", text)
        if shorter:
            text = shorter
    text = _CURRENCY.sub(r"\1", text)
    word = _WORD_UNIT.search(text)
    if word and _NUMBER.fullmatch(text[: word.start()]):
        names = re.findall(r"[A-Za-z]+", word.group(1))
        if all(len(name) > 1 and name.lower() not in _NO_UNIT for name in names):
            return text[: word.start()]
    latex = _LATEX_UNIT.search(text)
    if latex and latex.start() > 0 and re.search(r"[\d})]$", text[: latex.start()]):
        names = re.findall(r"[A-Za-z]+", latex.group(1))
        if not any(name.lower() in _NO_UNIT for name in names if name.lower() not in ("of", "for")):
            return text[: latex.start()].strip()
    return text


def plain_number(text: str) -> Number | None:
    r"""Read an integer, decimal, `a/b`, `\frac{a}{b}` or mixed number exactly; None for anything else."""
    text = strip_unit(text).strip()
    if len(text) > MAX_NUMBER_CHARS:
        return None
    while len(text) > 2 and text[0] + text[-1] in ("{}", "()"):
        text = text[1:-1].strip()
    match = _NUMBER.fullmatch(text)
    if not match:
        return None
    g = match.groupdict()
    sign = -1 if g["sign"] == "-" else 1
    if g["decimal"]:
        value = Fraction(g["decimal"] + "e" + (g["exponent"] or "0"))
        places = len(g["decimal"].partition(".")[2]) if not g["exponent"] else 0
        return Number(value=sign * value, places=places, digits=len(g["decimal"].replace(".", "").lstrip("0")))
    whole = int(g["whole"] or g["latex_whole"] or 0)
    top, bottom = g["mixed_top"] or g["top"] or g["latex_top"], g["mixed_bottom"] or g["bottom"] or g["latex_bottom"]
    if g["short"]:
        top, bottom = g["short"][0], g["short"][1]
    if Fraction(bottom) == 0:
        return None
    return Number(value=sign * (whole + Fraction(top) / Fraction(bottom)))


def text_answer(text: str) -> str | None:
    r"""Return the words of an answer that is text (`\text{Monday}`, one bare word, a choice letter), None for mathematics.

    Letters of a choice keep their case; words are case-folded.
    """
    tagged = re.fullmatch(rf"{_TEXT_TAG}\s*\{{([^{{}}]*)\}}(.*)", text)
    inner = tagged.group(1).strip() if tagged else text.strip()
    letter = re.fullmatch(r"\(?([A-Z])\)?(?:[.:]\s.*)?|\(([A-Z])\)\s.*", inner)
    if letter:
        return letter.group(1) or letter.group(2)
    if tagged and tagged.group(2).strip():
        return None
    if tagged and inner and not re.search(r"\d", inner):
        return " ".join(inner.casefold().split())
    if re.fullmatch(r"[A-Za-z]{3,}(?:-[A-Za-z]+)*|[Nn]o", inner) and inner.lower() not in _NO_UNIT:
        return inner.casefold()
    return None


def is_prose(text: str) -> bool:
    r"""Whether a normalised answer holds two words in a row outside `\text{}`: a sentence, not mathematics."""
    return bool(_PROSE.search(re.sub(rf"{_TEXT_TAG}\s*\{{[^{{}}]*\}}", " ", text)))


def split_parts(text: str) -> Parts:
    """Cut a normalised answer at its top-level commas, semicolons, "and", "or"; brackets around all of it become the kind."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return Parts(kind="{}", items=_split(text[2:-2]))
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and _matching_close(text) == len(text) - 1:
        items = _split(text[1:-1])
        if len(items) > 1:
            return Parts(kind=text[0] + text[-1], items=items)
    items = tuple(value for item in _split(text) for value in _plus_minus(item))
    return Parts(kind="list" if len(items) > 1 else "", items=items)


def _plus_minus(text: str) -> tuple[str, ...]:
    if "\\pm" not in text and "\\mp" not in text:
        return (text,)
    upper = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", text))
    lower = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", text))
    return upper.strip().removeprefix("+").strip(), lower.strip()


def _depth(text: str, end: int) -> int:
    return sum((c in _OPENERS) - (c in _CLOSERS) for c in text[:end])


def _matching_close(text: str) -> int:
    depth = 0
    for index, char in enumerate(text):
        depth += (char in _OPENERS) - (char in _CLOSERS)
        if depth == 0:
            return index
    return -1


def _split(text: str) -> tuple[str, ...]:
    items, depth, start = [], 0, 0
    for match in re.finditer(r"[(\[{]|[)\]}]|[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", text):
        token = match.group()
        depth += (token in _OPENERS) - (token in _CLOSERS)
        if depth == 0 and token not in _OPENERS and token not in _CLOSERS:
            items.append(text[start : match.start()])
            start = match.end()
    items.append(text[start:])
    return tuple(item.strip() for item in items if item.strip())
