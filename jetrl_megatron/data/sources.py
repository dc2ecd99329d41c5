"""The grammar of `data.train` and `data.eval`, and reading what it names.

A source is one of

    NAME                a data set with an adapter (`gsm8k`, `MATH-500`, also by its Hugging Face name), or a task of `arithmetic`
    NAME:SPLIT          the same, another split
    PATH.jsonl          a file with the fields `question` and `answer`
    ADAPTER@PATH.jsonl  a file with the fields of that adapter

Enters: a source. Leaves: (row number, `Row`) pairs in file order. A wrong record is an error that names file and line, the fields
found, and the adapters there are; nothing is skipped. `datasets` is imported only for data sets by name.
"""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jetrl_megatron.data.adapters import GENERIC, Adapter, Row, adapter_names, find_adapter
from jetrl_megatron.data.arithmetic import ArithmeticTask, arithmetic_rows, parse_name


@dataclass(frozen=True, kw_only=True)
class Source:
    """One parsed source: exactly one of `path`, `adapter.dataset` and `task` says where the rows come from."""

    name: str
    """As written, with the split where there is one; what prompt ids begin with."""
    adapter: Adapter | None = None
    path: Path | None = None
    split: str = ""
    task: ArithmeticTask | None = None
    """The synthetic problems."""


def parse_source(text: str, evaluating: bool) -> Source:
    """Parse one source. evaluating: which split a bare name means. Raises ValueError that lists the adapters."""
    if text.endswith(".jsonl"):
        prefix, found, rest = text.partition("@")
        known = find_adapter(prefix) if found else GENERIC
        if known is None:
            raise ValueError(f"source {text!r}: there is no adapter {prefix!r}; {_choices()}")
        path = Path(rest if found else text)
        if path.is_dir():
            raise ValueError(f"source {text!r}: {path} is a directory; name a file in it")
        if not path.is_file():
            raise ValueError(f"source {text!r}: there is no file {path} (looked from {Path.cwd()})")
        return Source(name=text, adapter=known, path=path)
    name, _, split = text.partition(":")
    task = parse_name(name)
    if task is not None:
        split = split or ("test" if evaluating else "train")
        return Source(name=f"{name}:{split}", task=task, split=split)
    adapter = find_adapter(name)
    if adapter is None:
        raise ValueError(f"source {text!r} is no PATH.jsonl and no known data set; {_choices()}")
    if not adapter.dataset:
        raise ValueError(f"source {text!r}: {adapter.name} is read from files only; write {adapter.name}@PATH.jsonl")
    split = split or (adapter.eval_split if evaluating else adapter.default_split)
    return Source(name=f"{name}:{split}", adapter=adapter, split=split)


def read_rows(source: Source) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a source with their numbers, from 0."""
    if source.task is not None:
        yield from enumerate(arithmetic_rows(source.task, source.split))
    elif source.path is not None:
        yield from _read_jsonl(source)
    else:
        yield from _read_dataset(source)


def _read_jsonl(source: Source) -> Iterator[tuple[int, Row]]:
    assert source.path is not None
    number = 0
    with source.path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if line_number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            where = f"{source.path}:{line_number}"
            try:
                record = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 text (byte {error.start} of the line: {error.reason}); save it as UTF-8") from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
            except RecursionError as error:
                raise ValueError(f"{where}: not JSON that can be read: it is nested too deeply; remove the line") from error
            except ValueError as error:  # a whole number of thousands of digits, or a key that is there twice
                raise ValueError(f"{where}: not JSON that can be read: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: a {type(record).__name__}; each line must be a JSON object")
            yield number, _convert(source, record, where)
            number += 1


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object; raises ValueError for a key that stands there twice, of which a reader would keep the last."""
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(key for key in record if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} stands there twice; remove one")
    return record


def _read_dataset(source: Source) -> Iterator[tuple[int, Row]]:
    assert source.adapter is not None
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"source {source.name!r} is a Hugging Face data set and needs the package `datasets`: pip install jetrl-megatron[data], "
            f"or download it and write {source.adapter.name}@PATH.jsonl"
        ) from error
    try:
        table = datasets.load_dataset(source.adapter.dataset, source.adapter.config, split=source.split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"source {source.name!r}: cannot load {source.adapter.dataset} split {source.split!r}: {error}; without network write "
            f"{source.adapter.name}@PATH.jsonl"
        ) from error
    for number, record in enumerate(table):
        yield number, _convert(source, record, f"{source.adapter.dataset}[{number}]")


def _convert(source: Source, record: dict, where: str) -> Row:
    assert source.adapter is not None
    missing = source.adapter.missing(record)
    if missing:
        raise ValueError(
            f"{where}: adapter {source.adapter.name} needs the fields {', '.join(source.adapter.fields)}; missing {', '.join(missing)}, "
            f"found {', '.join(sorted(record)) or 'none'}; {_choices()}"
        )
    try:
        row = source.adapter.row(record)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not row.question.strip():
        raise ValueError(f"{where}: the question is empty; mend or remove the row")
    for name, text in (("question", row.question), ("answer", row.answer), ("target", row.target)):
        lone = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
        if lone is not None:
            raise ValueError(
                f"{where}: the {name} holds half of a surrogate pair ({lone!r}), which is no character; mend or remove the row"
            )
    return row


def _choices() -> str:
    return f"write NAME, NAME:SPLIT, PATH.jsonl or ADAPTER@PATH.jsonl; the adapters are {', '.join(adapter_names())}, arithmetic"
