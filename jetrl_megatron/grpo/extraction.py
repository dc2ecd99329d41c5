r"""From a completion's text to the answer it states. This file is the whole extraction rule.

Enters: the text of one completion. Leaves: an answer string for `answers.py`, or None when the text states none.

1. Reasoning is cut off: what counts is the text behind the last `</think>`. A `<think>` that is never closed leaves nothing
   unless the policy `require_closed_think` is off, in which case the whole text counts.
2. The last `\boxed{...}` (or `\fbox{...}`); boxes joined only by commas, "and", "or" are one answer of several parts. If the last
   box is not closed (cut at the length limit) the text states no answer.
3. Else what follows the last `####` on its line.
4. Else what follows the last "answer is", "answer:" or "answer =" on its line: delimited math, a number, or a short expression.
5. Else the last delimited math (`$..$`, `\(..\)`, `\[..\]`) or the last number of the text, whichever comes last.

For multiple choice (gold is one capital letter) steps 4 and 5 look for a letter instead; where the gold is words ("Monday"), for the
words behind "answer is", else a last line of at most five words.
Nothing here parses mathematics; every pattern is linear in the length of the text.
"""

import re
from collections.abc import Callable
from typing import Literal

Expected = Literal["math", "choice", "words"]
"""What the gold answer is: mathematics, one capital letter, or words."""
MAX_ANSWER_CHARS = 1000
"""A longer "answer" is prose or a runaway; it counts as no answer."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_JOINER = re.compile(r"(?:\s|\$|,|;|\\\(|\\\)|\\\[|\\\]|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")
_PHRASE = re.compile(r"(?i)\banswer\b\s*(?:is|:|=)\s*:?")
_NUMBER = re.compile(
    r"(?<![\w.,])(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)|\d+(?:,\d+)*)?(?:\.\d+|(?<=\d))"
    r"(?:(?::\d+)+|\s?/\s?\d+(?![\d.]))?(?:\s?\\?%)?"
)
_ATTACHED = re.compile(r"(?:cm|mm|km|kg|mg|ft|lbs?|mph|ml|mL|hrs?|mins?|secs?)?(?![A-Za-z_^])")
_MATH = re.compile(r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(((?:[^\\\n]|\\(?![()]))+)\\\)|\\\[((?:[^\\]|\\(?![\[\]]))+)\\\]")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textrm|mbox|operatorname)\s*\{[^{}]*\}")
_CHOICE = re.compile(r"\(([A-Z])\)|\b([A-Z])(?=[.,:)\s]|$)")


def after_reasoning(text: str, require_closed_think: bool) -> str | None:
    """Return the part of a completion that may state an answer, or None when its reasoning never ended.

    text: the completion, preceded by `<think>` when the prompt opened the block (`rewards.with_open_think`).
    """
    opened, closed = text.rfind("<think>"), text.rfind("</think>")
    if opened > closed:
        return None if require_closed_think else text
    return text[closed + len("</think>") :] if closed >= 0 else text


def boxed(text: str) -> str | None:
    """Return the content of the last box, or of the last run of boxes joined by commas; "" when the last box is not closed."""
    starts = list(_BOX.finditer(text))
    if not starts:
        return None
    parts: list[str] = []
    following = len(text)
    for match in reversed(starts):
        end = _closing_brace(text, match.end(), following)
        if parts:
            between = text[end + 1 : following]
            if end < 0 or not between.strip(" \n$") or not _JOINER.fullmatch(between):
                break
        elif end < 0:
            return ""
        parts.insert(0, text[match.end() : end])
        following = match.start()
    return ", ".join(parts)


def extract_answer(text: str, expected: Expected = "math") -> str | None:
    """Return the answer that a text states (the rule of this module), or None.

    text: a completion behind its reasoning. expected: what the gold answer is.
    """
    answer = boxed(text)
    if answer is None and "####" in text:
        answer = text[text.rindex("####") + 4 :].strip().split("\n")[0]
    if answer is None:
        search: dict[Expected, Callable[[str], str | None]] = {"math": _math_answer, "choice": _choice, "words": _words}
        answer = search[expected](text)
    if answer is None or not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return None
    return answer.strip()


def _closing_brace(text: str, start: int, stop: int) -> int:
    """Where the brace that was opened just before `start` closes, -1 when it does not before `stop`."""
    depth = 1
    for index in range(start, stop):
        char = text[index]
        if char in "{}" and text[index - 1] != "\\":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return index
    return -1


def _math_answer(text: str) -> str | None:
    return _from_phrase(text) or _last_value(text)


def _words(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        return re.split(r"[.!?](?:\s|$)", text[phrases[-1].end() :].strip().split("\n")[0].replace("*", ""))[0].strip()
    lines = [line.strip(" *.$") for line in text.split("\n") if line.strip()]
    return lines[-1] if lines and len(lines[-1].split()) <= 5 else None


def _choice(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        found = _CHOICE.search(text[phrases[-1].end() :].split("\n")[0].replace("*", ""))
        if found:
            return found.group(1) or found.group(2)
    lines = [line.strip(" *.$") for line in text.split("\n") if line.strip()]
    found = re.fullmatch(r"\(?([A-Z])\)?(?:[.:)]\s.*)?", lines[-1]) if lines else None
    return found.group(1) if found else None


def _from_phrase(text: str) -> str | None:
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return None
    tail = text[phrases[-1].end() :].strip().split("\n")[0].replace("**", "").strip()
    math = _MATH.match(tail)
    if math and _is_math(_content(math)):
        return _joined(tail, math.end(), _content(math), _MATH, _content)
    bare = tail.removeprefix("\\$").removeprefix("$").strip()
    sign = "-" if bare.startswith("-") else ""
    number = _NUMBER.match(bare, len(sign))
    if number and _ends_number(bare, number.end()):
        return _joined(bare, number.end(), sign + number.group(), _NUMBER, re.Match.group)
    clause = re.split(r"\.(?:\s|$)|[!?]", tail)[0].strip()
    return clause if clause and len(clause) <= 100 and _is_math(clause) and re.search(r"[\d\\=^]", clause) else None


def _joined(tail: str, end: int, first: str, pattern: re.Pattern[str], content: Callable[[re.Match[str]], str]) -> str:
    parts = [first]
    while (gap := re.compile(r"\s*(?:,\s*and|,\s*or|,|and|or)\s+").match(tail, end)) and (found := pattern.match(tail, gap.end())):
        parts.append(content(found))
        end = found.end()
    return ", ".join(parts)


def _ends_number(text: str, end: int) -> bool:
    return bool(_ATTACHED.match(text, end)) and not re.match(r"\s*[-+*/^=(\\]\s*[\dA-Za-z(\\]", text[end:])


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _is_math(content: str) -> bool:
    return not _WORD.search(_TEXT.sub(" ", content))


def _last_value(text: str) -> str | None:
    math_end, math = -1, None
    for match in _MATH.finditer(text):
        if _is_math(_content(match)):
            math_end, math = match.end(), _content(match)
    for match in reversed(list(_NUMBER.finditer(text, max(math_end, 0)))):
        if not match.group().strip() or not _ATTACHED.match(text, match.end()):
            continue
        before = text[: match.start()].rstrip("$\\")
        negative = before.endswith("-") and (len(before) == 1 or before[-2] in " \n\t(=:$*[")
        return ("-" if negative else "") + match.group()
    return math
