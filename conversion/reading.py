"""The boundary to small files that others wrote: headers, indices, manifests, pickled metadata.

Enters: parsing, as the body of a `with`. Leaves: what it returns, or a ValueError that names the file. Only parsing belongs into the body:
an error of these types anywhere else is a fault of this package and stays visible as one.
"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_DAMAGE = (
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    struct.error,
    RecursionError,
    json.JSONDecodeError,
    UnicodeDecodeError,
)


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn the errors of parsing a damaged file into ValueError; what: the part of the file that is parsed."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"{path}: {what} cannot be read ({error!r}); it is damaged or of another format, copy the file again") from error


def whole_numbers(value: Any) -> tuple[int, ...]:
    """Return a list of sizes or offsets; raises TypeError where one is not a whole number of at least 0."""
    if not isinstance(value, list | tuple) or any(type(n) is not int or n < 0 for n in value):
        raise TypeError(f"{value!r} is not a list of whole numbers")
    return tuple(value)


def of_type(value: Any, *types: type) -> Any:
    """Return the value; raises TypeError where it has none of the types (a bool is no int)."""
    if type(value) not in types:
        raise TypeError(f"{value!r} is not of type {' or '.join(t.__name__ for t in types)}")
    return value
