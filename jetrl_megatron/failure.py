"""The error of a run that cannot go on although its recipe is right: the command ends with its text and exit code 1, no traceback."""


class RunFailure(RuntimeError):
    """What stopped the run, where, and the way out; raised by this project alone, so that a library's RuntimeError keeps its traceback."""
