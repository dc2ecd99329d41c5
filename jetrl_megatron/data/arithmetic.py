"""The synthetic task: two-operand additions, `37+58=` with the answer `95`; learnable from nothing by a tiny model.

Enters: a name, `arithmetic` or `arithmetic-<d>digit` (d from 1 to 6, 2 when left out), and the split `train` or `test`. Leaves: rows,
always the same. Operands have up to d digits. About one problem in ten, chosen by a hash of its text, is in `test`, so the splits are
disjoint whatever their size. With d of 1 or 2 every pair of operands occurs; above that, 20,000 pairs are drawn.
"""

import hashlib
import random
import re

from jetrl_megatron.data.adapters import Row

SPLITS = ("train", "test")
DEFAULT_DIGITS = 2
MAX_DIGITS = 6
MAX_PAIRS = 20_000
ALPHABET = "0123456789+="
"""Every character of a question or an answer."""


def parse_name(name: str) -> int | None:
    """Return the digits of an arithmetic source name, None when the name is of something else; ValueError for a wrong suffix."""
    if not re.match(r"arithmetic\b", name):
        return None
    match = re.fullmatch(r"arithmetic(?:-(\d+)digit)?", name)
    digits = int(match.group(1) or DEFAULT_DIGITS) if match else 0
    if not 1 <= digits <= MAX_DIGITS:
        raise ValueError(f"source {name!r}: write `arithmetic` or `arithmetic-<d>digit` with d from 1 to {MAX_DIGITS}")
    return digits


def arithmetic_rows(digits: int, split: str) -> list[Row]:
    """Return the problems of one split in their fixed, shuffled order."""
    if split not in SPLITS:
        raise ValueError(f"arithmetic has no split {split!r}; it has {', '.join(SPLITS)}")
    draw = random.Random(f"arithmetic-{digits}digit")
    end = 10**digits
    if end * end <= MAX_PAIRS:
        pairs = [(a, b) for a in range(end) for b in range(end)]
        draw.shuffle(pairs)
    else:
        pairs = list(dict.fromkeys((draw.randrange(end), draw.randrange(end)) for _ in range(MAX_PAIRS)))
    problems = ((f"{a}+{b}=", str(a + b)) for a, b in pairs)
    wanted = split == "test"
    return [Row(question=question, answer=answer, target=answer) for question, answer in problems if _is_test(question) == wanted]


def _is_test(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % 10 == 0
