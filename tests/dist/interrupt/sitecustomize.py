"""Loaded at the start of every Python process of a run under test: signals the run at one exact call.

Enters: JETRL_TEST_INTERRUPT, `SIGNAL MODULE:FUNCTION:N`. Before call number N of that function SIGKILL ends the launcher and this process
(the other workers die with the launcher); SIGTERM goes to the launcher and the call goes on.
"""

import functools
import importlib.abc
import importlib.util
import os
import signal
import sys

_WORD = os.environ.get("JETRL_TEST_INTERRUPT", "")


def _interrupting(function, number, call):
    calls = [0]

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getppid(), number)
            if number == signal.SIGKILL:
                os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return wrapper


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the function as soon as its module has been executed."""

    def __init__(self, number, module, path, call):
        self.number, self.module, self.path, self.call = number, module, path, call

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module):
            execute(module)
            *owners, last = self.path.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, last, _interrupting(getattr(owner, last), self.number, self.call))

        spec.loader.exec_module = execute_and_wrap
        return spec


if _WORD:
    _name, _where = _WORD.split(" ")
    _module, _path, _call = _where.split(":")
    sys.meta_path.insert(0, _Finder(signal.Signals[_name], _module, _path, int(_call)))
