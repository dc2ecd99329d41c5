"""Pickles read as data: every global they name becomes an inert record, so that reading a foreign file cannot run code.

Enters: pickle bytes, as PyTorch writes them beside tensors. Leaves: lists, dicts, numbers, strings, and for each object an `Inert` that
holds the name of its class or function, the arguments it was called with and its state. torch is not needed.
"""

import io
import pickle
import struct
from typing import Any


class Inert:
    """An object or a call that a pickle describes and that was not made."""

    path: str = ""
    """Module and name of the class or function."""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "Inert":
        """Record the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        """Take what `__new__` recorded."""

    def __setstate__(self, state: Any) -> None:
        """Record the state."""
        self.state = state


_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    MemoryError,
    OverflowError,
    RecursionError,
    struct.error,
)


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._known: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path == "collections.OrderedDict":
            return dict
        return self._known.setdefault(path, type("Inert", (Inert,), {"path": path}))

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_pickle(data: bytes, where: str) -> Any:
    """Read one pickle; where: names its place in messages. Raises ValueError where it is truncated or damaged."""
    try:
        return _Reader(data).load()
    except _DAMAGE as error:
        raise ValueError(f"{where} is not a readable pickle ({error!r}); the file is truncated or damaged, copy it again") from error
