"""The synthetic tasks: two-operand additions, `37+58=` with the answer `95`, or the larger of two, `max(37,58)=` with the answer `58`.

Enters: a name, `arithmetic[-max][-<d>digit][-hedged]` (d from 1 to 6, 2 when left out), and the split `train` or `test`. Leaves: rows,
always the same. A tiny model learns the larger of two from nothing in a hundred steps, additions in some hundreds. Operands have up to
d digits. About one problem in ten (of the hundred that one digit gives: one in four), chosen by a hash of its text, is in `test`, so the
splits are disjoint whatever their size. With d of 1 or 2 every pair of operands occurs; above that, 20,000 pairs are drawn.
"""

import hashlib
import random
import re
from dataclasses import dataclass

from jetrl_megatron.data.adapters import Row

SPLITS = ("train", "test")
DEFAULT_DIGITS = 2
MAX_DIGITS = 6
MAX_PAIRS = 20_000
ALPHABET = "0123456789+=max(,)?"
"""Every character of a question or an answer."""


@dataclass(frozen=True, kw_only=True)
class ArithmeticTask:
    """Which problems: the operation and the size of its operands."""

    digits: int = DEFAULT_DIGITS
    larger: bool = False
    """True: the larger of two operands; False: their sum."""
    hedged: bool = False
    """True: the supervised target of every second problem, by hash, is `?`: a warm start then teaches to abstain half of the time, and
    only the reward teaches that answering pays."""

    def target(self, question: str, answer: str) -> str:
        """Return what a warm start teaches for this problem."""
        return "?" if self.hedged and hashlib.sha256(question.encode()).digest()[1] % 2 else answer

    def problem(self, a: int, b: int) -> tuple[str, str]:
        """Return question and answer."""
        return (f"max({a},{b})=", str(max(a, b))) if self.larger else (f"{a}+{b}=", str(a + b))


def parse_name(name: str) -> ArithmeticTask | None:
    """Return the task of an arithmetic source name, None when the name is of something else; ValueError for a wrong suffix."""
    if not re.match(r"arithmetic\b", name):
        return None
    match = re.fullmatch(r"arithmetic(-max)?(?:-(\d+)digit)?(-hedged)?", name)
    digits = int(match.group(2) or DEFAULT_DIGITS) if match else 0
    if match is None or not 1 <= digits <= MAX_DIGITS:
        raise ValueError(f"source {name!r}: write `arithmetic[-max][-<d>digit][-hedged]`, d from 1 to {MAX_DIGITS}")
    return ArithmeticTask(digits=digits, larger=match.group(1) is not None, hedged=match.group(3) is not None)


def arithmetic_rows(task: ArithmeticTask, split: str) -> list[Row]:
    """Return the problems of one split in their fixed, shuffled order."""
    if split not in SPLITS:
        raise ValueError(f"arithmetic has no split {split!r}; it has {', '.join(SPLITS)}")
    draw = random.Random(f"arithmetic-{task.digits}digit")
    end = 10**task.digits
    if end * end <= MAX_PAIRS:
        pairs = [(a, b) for a in range(end) for b in range(end)]
        draw.shuffle(pairs)
    else:
        pairs = list(dict.fromkeys((draw.randrange(end), draw.randrange(end)) for _ in range(MAX_PAIRS)))
    problems = (task.problem(a, b) for a, b in pairs)
    wanted = split == "test"
    share = 4 if task.digits == 1 else 10
    return [Row(question=q, answer=a, target=task.target(q, a)) for q, a in problems if _is_test(q, share) == wanted]


def _is_test(question: str, share: int) -> bool:
    """Whether a problem is in `test`, which about one in `share` is."""
    return hashlib.sha256(question.encode()).digest()[0] % share == 0
