import json
from pathlib import Path

import pytest

from jetrl_megatron.data.adapters import Row, adapter_names, find_adapter, last_box, number_text
from jetrl_megatron.data.sources import parse_source, read_rows
from jetrl_megatron.grpo.rewards import gold_parses

SHARED = Path(__file__).resolve().parents[3].parent / "shared" / "data"


def _row(name: str, record: dict) -> Row:
    adapter = find_adapter(name)
    assert adapter is not None
    assert adapter.missing(record) == []
    return adapter.row(record)


def test_gsm8k_gold_is_behind_the_marks_and_the_target_is_the_worked_solution() -> None:
    row = _row("gsm8k", {"question": "Q?", "answer": "She has 2*3 = <<2*3=6>>6.\n#### 1,206"})
    assert row == Row(question="Q?", answer="1,206", target="She has 2*3 = 6.\n#### 1,206")


def test_records_of_word_problem_sets() -> None:
    assert _row("mawps", {"input": "How many?", "target": 14.0}) == Row(question="How many?", answer="14", target="14")
    assert _row("mawps", {"input": "How many?", "target": 0.6666666667}).answer == "0.6666666667"
    row = _row("svamp", {"Body": "There are 8 bananas", "Question": "How many?", "Answer": 145.0})
    assert (row.question, row.answer) == ("There are 8 bananas. How many?", "145")
    assert _row("asdiv", {"body": "B.", "question": "Q?", "answer": "9 (apples)"}).answer == "9"
    assert _row("asdiv", {"body": "B.", "question": "Q?", "answer": "14  (seats)"}).answer == "14"
    assert _row("asdiv", {"body": "B.", "question": "Q?", "answer": "-(1/3)"}).answer == "-(1/3)"


def test_records_of_competition_sets() -> None:
    assert _row("amc23", {"problem": "P", "question": "P", "answer": 27.0}).answer == "27"
    assert _row("aime24", {"problem": "P", "solution": "s", "answer": "204"}) == Row(question="P", answer="204", target="s")
    assert _row("MATH-500", {"problem": "P", "answer": r"\frac{1}{2}"}).answer == r"\frac{1}{2}"
    assert _row("DeepMATH", {"question": "Q", "final_answer": "0"}).answer == "0"
    assert _row("MATH", {"problem": "P", "solution": r"so \boxed{\frac{1}{2}}."}).answer == r"\frac{1}{2}"
    assert last_box(r"\boxed{1} then \boxed{x^{2}} end") == "x^{2}"
    assert last_box("none") == "" and last_box(r"\boxed{cut") == ""


def test_gpqa_options_are_shuffled_by_the_question_alone() -> None:
    record = {"Question": "Why?", "Correct Answer": "r", **{f"Incorrect Answer {i}": f"w{i}" for i in (1, 2, 3)}}
    row = _row("gpqa", record)
    options = dict(line.split(") ") for line in row.question.replace("(", "").split("\n")[1:])
    assert sorted(options) == ["A", "B", "C", "D"] and sorted(options.values()) == ["r", "w1", "w2", "w3"]
    assert options[row.answer] == "r"
    assert _row("gpqa", record) == row
    letters = {_row("gpqa", {**record, "Question": f"Why {i}?"}).answer for i in range(40)}
    assert letters == {"A", "B", "C", "D"}


def test_supergpqa_letters_its_options() -> None:
    row = _row("SuperGPQA", {"question": "Q?", "options": ["x", "y", "z"], "answer_letter": "C"})
    assert row == Row(question="Q?\n(A) x\n(B) y\n(C) z", answer="C", target="C")
    with pytest.raises(ValueError, match=r"answer_letter is 'D'.*3 options"):
        _row("supergpqa", {"question": "Q?", "options": ["x", "y", "z"], "answer_letter": "D"})


def test_numbers_as_text() -> None:
    assert [number_text(value) for value in (27.0, 3, "27.0", " 1/2 ", 0.5, -4.0)] == ["27", "3", "27", "1/2", "0.5", "-4"]
    for value in (True, None, [1]):
        with pytest.raises(ValueError, match="must be a number or a string"):
            number_text(value)


def test_names_ignore_case_and_dashes_and_hub_names_work() -> None:
    assert find_adapter("MATH-500") is find_adapter("math500") is find_adapter("HuggingFaceH4/MATH-500")
    assert find_adapter("GSM8K") is find_adapter("openai/gsm8k")
    assert find_adapter("nothing") is None
    assert {"gsm8k", "mawps", "svamp", "asdiv", "amc23", "aime24", "math", "deepmath", "math500", "amc", "gpqa"} < set(adapter_names())


FILES = {
    "gsm8k@gsm8k/train.jsonl": (7473, 0),
    "gsm8k@gsm8k/test.jsonl": (1319, 0),
    "mawps@mawps/singleop.jsonl": (562, 0),
    "mawps@mawps/addsub.jsonl": (395, 0),
    "mawps@mawps/singleeq.jsonl": (508, 0),
    "mawps@mawps/multiarith.jsonl": (600, 0),
    "svamp@svamp/test.jsonl": (1000, 0),
    "amc23@amc23/test.jsonl": (40, 0),
    "aime24@aime24/test.jsonl": (30, 0),
    "asdiv@asdiv/test.jsonl": (2215, 25),
}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not beside this repository")
def test_real_files_are_read_whole_and_nearly_all_gold_answers_can_be_used() -> None:
    answers: list[str] = []
    counts: list[int] = []
    for text, (num_rows, _) in FILES.items():
        adapter, _, path = text.partition("@")
        rows = [row for _, row in read_rows(parse_source(f"{adapter}@{SHARED / path}", evaluating=False))]
        assert len(rows) == num_rows, text
        assert all(row.question and row.answer and row.target for row in rows), text
        answers += [row.answer for row in rows]
        counts.append(len(rows))
    usable = gold_parses(answers)
    start = 0
    for count, (text, (_, unusable)) in zip(counts, FILES.items(), strict=True):
        bad = [answer for answer, fine in zip(answers[start : start + count], usable[start : start + count], strict=True) if not fine]
        assert len(bad) == unusable, (text, bad)
        start += count


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data sets are not beside this repository")
def test_a_real_file_without_its_adapter_says_what_to_write() -> None:
    source = parse_source(str(SHARED / "mawps/singleop.jsonl"), evaluating=False)
    with pytest.raises(ValueError, match=r"singleop.jsonl:1: adapter generic needs .*found input, target.*mawps"):
        next(read_rows(source))


def test_json_numbers_of_either_kind_give_the_same_gold() -> None:
    assert number_text(json.loads("39")) == number_text(json.loads("39.0")) == "39"
