import builtins
import sys
import types
from pathlib import Path

import pytest

from jetrl_megatron.data.arithmetic import ALPHABET, ArithmeticTask, arithmetic_rows, parse_name
from jetrl_megatron.data.sources import parse_source, read_rows


def _file(folder: Path, *lines: str) -> str:
    path = folder / "set.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_generic_jsonl_needs_no_adapter(tmp_path: Path) -> None:
    text = _file(tmp_path, '{"question": "1+1?", "answer": 2}', "", '{"question": "2+2?", "answer": "4", "target": "It is 4"}')
    rows = list(read_rows(parse_source(text, evaluating=False)))
    assert [(number, row.question, row.answer, row.target) for number, row in rows] == [(0, "1+1?", "2", "2"), (1, "2+2?", "4", "It is 4")]


def test_a_missing_field_names_file_line_fields_and_adapters(tmp_path: Path) -> None:
    text = _file(tmp_path, '{"question": "1+1?", "answer": "2"}', '{"question": "x", "solution": "4"}')
    with pytest.raises(ValueError, match=r"set.jsonl:2: .*missing answer, found question, solution; .*gsm8k.*arithmetic"):
        list(read_rows(parse_source(text, evaluating=False)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "set.jsonl:1: not JSON"),
        ("[1]", "set.jsonl:1: a list"),
        ('{"question": 5, "answer": "1"}', "set.jsonl:1: field question is 5"),
        ('{"question": "q", "answer": true}', "set.jsonl:1: the answer is True"),
        ('{"question": "q", "answer": null}', "set.jsonl:1: .*missing answer"),
        ('{"question": "q", "answer": NaN}', "set.jsonl:1: the answer is nan; it must be a finite number"),
        ('{"question": "q", "answer": Infinity}', "set.jsonl:1: the answer is inf; it must be a finite number"),
        ('{"question": "q", "answer": ' + "9" * 5000 + "}", "set.jsonl:1: not JSON that can be read: .*digits"),
        ("[" * 100_000 + "]" * 100_000, "set.jsonl:1: not JSON that can be read: it is nested too deeply"),
        ('{"question": "", "answer": "1"}', "set.jsonl:1: the question is empty; mend or remove the row"),
        ('{"question": "q", "answer": " "}', "set.jsonl:1: the answer is empty; mend or remove the row"),
        ('{"question": "q", "answer": "1", "answer": "2"}', "set.jsonl:1: not JSON that can be read: the key 'answer' stands there twice"),
        ('{"question": "a\\ud83d", "answer": "1"}', "set.jsonl:1: the question holds half of a surrogate pair"),
        ('{"question": "q", "answer": "\\udc00"}', "set.jsonl:1: the answer holds half of a surrogate pair"),
        ('{"question": "q", "answer": "1", "target": "\\udc00"}', "set.jsonl:1: the target holds half of a surrogate pair"),
    ],
)
def test_wrong_records_name_their_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read_rows(parse_source(_file(tmp_path, line), evaluating=False)))


def test_a_file_of_another_encoding_names_the_line_and_a_whole_pair_is_a_character(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    good = b'{"question": "\\ud83d\\ude00", "answer": "1"}\n'
    path.write_bytes(good)
    assert next(read_rows(parse_source(str(path), evaluating=False)))[1].question == "\U0001f600"
    path.write_bytes(good + '{"question": "caf\u00e9", "answer": "1"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"set.jsonl:2: not UTF-8 text \(byte 17 of the line: .*save it as UTF-8"):
        list(read_rows(parse_source(str(path), evaluating=False)))


@pytest.mark.parametrize("rest", [b'{"question": "q", "answer": "1"}\n', b'\n{"question": "q", "answer": "1"}\n'])
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + rest)
    assert [row.question for _, row in read_rows(parse_source(str(path), evaluating=False))] == ["q"]


def test_a_directory_is_no_file_of_rows(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").mkdir()
    with pytest.raises(ValueError, match=r"set.jsonl is a directory; name a file in it"):
        parse_source(str(tmp_path / "set.jsonl"), evaluating=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no/such/file.jsonl", "no file"),
        ("nothing@file.jsonl", "no adapter 'nothing'.*gsm8k"),
        ("unknownset", "no known data set.*gsm8k"),
        ("mawps", "mawps@PATH.jsonl"),
        ("arithmetic-9digit", "d from 1 to 6"),
        ("arithmetic-big", "d from 1 to 6"),
    ],
)
def test_wrong_sources_say_the_way_out(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_source(text, evaluating=False)


def test_bare_names_mean_the_split_of_the_occasion() -> None:
    assert parse_source("gsm8k", evaluating=False).name == "gsm8k:train"
    assert parse_source("gsm8k", evaluating=True).name == "gsm8k:test"
    assert parse_source("gsm8k:test", evaluating=False).split == "test"
    assert parse_source("arithmetic", evaluating=True).name == "arithmetic:test"


def test_data_sets_by_name_go_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict]:
        calls.append((name, config, split))
        return [{"question": "Q", "answer": "so\n#### 5"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    rows = list(read_rows(parse_source("gsm8k:test", evaluating=False)))
    assert calls == [("openai/gsm8k", "main", "test")]
    assert rows[0][1].answer == "5"


def test_without_the_library_the_error_names_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: object) -> object:
        if name == "datasets":
            raise ImportError("not here")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ValueError, match=r"jetrl-megatron\[data\].*gsm8k@PATH.jsonl"):
        list(read_rows(parse_source("gsm8k", evaluating=False)))


@pytest.mark.parametrize("digits", [1, 2, 3, 6])
def test_arithmetic_is_right_disjoint_and_the_same_every_time(digits: int) -> None:
    task = ArithmeticTask(digits=digits)
    train, test = arithmetic_rows(task, "train"), arithmetic_rows(task, "test")
    for row in train + test:
        left, right = row.question.removesuffix("=").split("+")
        assert int(left) + int(right) == int(row.answer) and len(left) <= digits
        assert set(row.question + row.answer) <= set(ALPHABET)
    assert len(test) >= 20
    questions = [row.question for row in train + test]
    assert len(set(questions)) == len(questions)
    assert arithmetic_rows(task, "train") == train
    if digits <= 2:
        assert len(questions) == 10 ** (2 * digits)


def test_the_larger_of_two_is_right() -> None:
    rows = arithmetic_rows(ArithmeticTask(larger=True), "train")
    assert len(rows) > 8500
    for row in rows[:500]:
        left, right = row.question.removeprefix("max(").removesuffix(")=").split(",")
        assert int(row.answer) == max(int(left), int(right))
        assert set(row.question + row.answer) <= set(ALPHABET)


def test_hedged_targets_abstain_half_of_the_time_and_answers_stay() -> None:
    plain, hedged = (arithmetic_rows(ArithmeticTask(larger=True, hedged=h), "train") for h in (False, True))
    assert [(r.question, r.answer) for r in plain] == [(r.question, r.answer) for r in hedged]
    assert 0.45 < sum(r.target == "?" for r in hedged) / len(hedged) < 0.55
    assert all(r.target in ("?", r.answer) for r in hedged)


def test_the_demos_held_out_problems_are_many_and_half_of_them_hedged() -> None:
    """A reward over few problems is mostly noise, and one over problems that were all taught to abstain on starts at 0."""
    rows = arithmetic_rows(ArithmeticTask(digits=1, larger=True, hedged=True), "test")
    assert len(rows) == 28 and sum(r.target == "?" for r in rows) == 14


def test_arithmetic_names() -> None:
    names = ("arithmetic", "arithmetic-3digit", "arithmetic-max", "arithmetic-max-1digit", "arithmetic-hedged", "gsm8k")
    tasks = [
        ArithmeticTask(digits=2),
        ArithmeticTask(digits=3),
        *(ArithmeticTask(digits=d, larger=True) for d in (2, 1)),
        ArithmeticTask(hedged=True),
        None,
    ]
    assert [parse_name(name) for name in names] == tasks
    with pytest.raises(ValueError, match="no split 'dev'"):
        arithmetic_rows(ArithmeticTask(), "dev")
