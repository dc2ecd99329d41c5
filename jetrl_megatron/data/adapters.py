r"""One adapter for each data set: its fields, and how a record becomes a question, a gold answer and a supervised target.

Enters: one record, as JSONL or the `datasets` library gives it. Leaves: a `Row`. Gold answers are strings in the form the reward compares
with: a number without a trailing `.0`, LaTeX as it stands, or the letter of an option. Targets are what the warm start teaches: the
worked solution where the set has a short one, else the gold answer.

`default_split` is for training, `eval_split` for evaluation: some sets have one split only, under whatever name it was uploaded. A data
set whose columns have changed since is refused when it is read, with the fields that were found.
"""

import hashlib
import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Record = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One question with its gold answer and the text that a warm start teaches."""

    question: str
    answer: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """How one data set is read."""

    name: str
    fields: tuple[str, ...]
    """What a record must have; `a|b` means either."""
    convert: Callable[[Record], Row]
    dataset: str = ""
    """Hugging Face name; empty when the set is read from files only."""
    config: str | None = None
    default_split: str = "train"
    eval_split: str = "test"

    def missing(self, record: Record) -> list[str]:
        """Return the required fields that a record lacks or has as null."""
        return [field for field in self.fields if all(record.get(name) is None for name in field.split("|"))]

    def row(self, record: Record) -> Row:
        """Convert one record; ValueError that says which field does not hold what it should."""
        return self.convert(record)


def number_text(value: object) -> str:
    """Return a gold answer as text: `27.0` as `27`, other numbers as written, strings stripped. ValueError for anything else
    and for an empty text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"the answer is {value!r}; it must be a number or a string")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the answer is {value}; it must be a finite number or a string")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    text = str(value).strip()
    if not text:
        raise ValueError("the answer is empty; mend or remove the row")
    return text.removesuffix(".0") if re.fullmatch(r"-?\d+\.0", text) else text


def last_box(solution: str) -> str:
    r"""Return the content of the last `\boxed{...}` of a solution, or "" where there is none (then the prompt is dropped)."""
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    if start < 0:
        return ""
    depth = 0
    for index in range(solution.index("{", start), len(solution)):
        depth += (solution[index] == "{") - (solution[index] == "}")
        if depth == 0:
            return solution[solution.index("{", start) + 1 : index].strip()
    return ""


def options_question(question: str, options: list[str]) -> str:
    """Return a question with lettered options under it."""
    lines = [f"({chr(ord('A') + index)}) {option.strip()}" for index, option in enumerate(options)]
    return "\n".join([question.strip(), *lines])


def _text(record: Record, *names: str) -> str:
    value = next((record[name] for name in names if record.get(name) is not None), None)
    if not isinstance(value, str):
        raise ValueError(f"field {' or '.join(names)} is {value!r}; it must be a string")
    return value.strip()


def _plain(question: str, answer: str) -> Row:
    return Row(question=question, answer=answer, target=answer)


def _gsm8k(record: Record) -> Row:
    solution = _text(record, "answer")
    if "####" not in solution:
        raise ValueError(f"field answer has no '#### ': {solution[-60:]!r}")
    worked = re.sub(r"<<[^<>]*>>", "", solution)
    return Row(question=_text(record, "question"), answer=solution.rsplit("####", 1)[1].strip(), target=worked)


def _mawps(record: Record) -> Row:
    return _plain(_text(record, "input"), number_text(record["target"]))


def _svamp(record: Record) -> Row:
    body = _text(record, "Body")
    body += "" if body.endswith((".", "?", "!")) else "."
    return _plain(f"{body} {_text(record, 'Question')}", number_text(record["Answer"]))


def _asdiv(record: Record) -> Row:
    answer = re.sub(r"\s+\([^()]*\)$", "", _text(record, "answer"))
    return _plain(f"{_text(record, 'body')} {_text(record, 'question')}", number_text(answer))


def _competition(record: Record) -> Row:
    solution = record.get("solution")
    answer = number_text(record["answer"])
    target = solution.strip() if isinstance(solution, str) and solution.strip() else answer
    return Row(question=_text(record, "problem", "question"), answer=answer, target=target)


def _math(record: Record) -> Row:
    solution = _text(record, "solution")
    return Row(question=_text(record, "problem"), answer=last_box(solution), target=solution)


def _deepmath(record: Record) -> Row:
    return _plain(_text(record, "question"), number_text(record["final_answer"]))


def _gpqa(record: Record) -> Row:
    question, right = _text(record, "Question"), _text(record, "Correct Answer")
    options = [right, *(_text(record, f"Incorrect Answer {index}") for index in (1, 2, 3))]
    # The order depends on the question only, so that it is the same in every run and on every machine.
    random.Random(hashlib.sha256(question.encode()).hexdigest()).shuffle(options)
    return _plain(options_question(question, options), chr(ord("A") + options.index(right)))


def _supergpqa(record: Record) -> Row:
    options = record["options"]
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise ValueError(f"field options is {options!r}; it must be a list of strings")
    letter = _text(record, "answer_letter")
    if len(letter) != 1 or not 0 <= ord(letter) - ord("A") < len(options):
        raise ValueError(f"field answer_letter is {letter!r}; it must be one of the letters of {len(options)} options")
    return _plain(options_question(_text(record, "question"), options), letter)


def _generic(record: Record) -> Row:
    answer = number_text(record["answer"])
    target = record.get("target", answer)
    if not isinstance(target, str):
        raise ValueError(f"field target is {target!r}; it must be a string")
    return Row(question=_text(record, "question"), answer=answer, target=target)


GENERIC = Adapter(name="generic", fields=("question", "answer"), convert=_generic)
"""For JSONL without an adapter: `question`, `answer` and, if there is one, `target`."""

_ALL = (
    Adapter(name="gsm8k", fields=("question", "answer"), convert=_gsm8k, dataset="openai/gsm8k", config="main"),
    Adapter(name="mawps", fields=("input", "target"), convert=_mawps),
    Adapter(name="svamp", fields=("Body", "Question", "Answer"), convert=_svamp, dataset="ChilleD/SVAMP"),
    Adapter(
        name="asdiv",
        fields=("body", "question", "answer"),
        convert=_asdiv,
        dataset="EleutherAI/asdiv",
        default_split="validation",
        eval_split="validation",
    ),
    Adapter(name="math", fields=("problem", "solution"), convert=_math, dataset="DigitalLearningGmbH/MATH-lighteval"),
    Adapter(name="deepmath", fields=("question", "final_answer"), convert=_deepmath, dataset="zwhe99/DeepMath-103K", eval_split="train"),
    Adapter(
        name="math500",
        fields=("problem", "answer"),
        convert=_competition,
        dataset="HuggingFaceH4/MATH-500",
        default_split="test",
    ),
    Adapter(
        name="amc", fields=("problem|question", "answer"), convert=_competition, dataset="AI-MO/aimo-validation-amc", eval_split="train"
    ),
    Adapter(name="amc23", fields=("problem|question", "answer"), convert=_competition, dataset="math-ai/amc23", default_split="test"),
    Adapter(
        name="aime24", fields=("problem|question", "answer"), convert=_competition, dataset="HuggingFaceH4/aime_2024", eval_split="train"
    ),
    Adapter(
        name="gpqa",
        fields=("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
        convert=_gpqa,
        dataset="Idavidrein/gpqa",
        config="gpqa_diamond",
        eval_split="train",
    ),
    Adapter(
        name="supergpqa",
        fields=("question", "options", "answer_letter"),
        convert=_supergpqa,
        dataset="m-a-p/SuperGPQA",
        eval_split="train",
    ),
    GENERIC,
)


def adapter_names() -> list[str]:
    """Return the names that a source may use, without the synthetic task."""
    return [adapter.name for adapter in _ALL]


def find_adapter(name: str) -> Adapter | None:
    """Return the adapter of a name, compared without case, `-` and `_` (`MATH-500` is `math500`), or of a Hugging Face name."""
    key = _key(name)
    return next((adapter for adapter in _ALL if key == adapter.name or (adapter.dataset and key == _key(adapter.dataset))), None)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
