"""A user's own reward function: a number from most texts, so that groups have a spread from the first step on, and a failure on some."""


def reward(text: str, answer: str) -> float:
    """The sum of the text's code points modulo 7, as a share; ValueError where that is 3."""
    number = sum(map(ord, text)) % 7
    if number == 3:
        raise ValueError("no number for this one")
    return number / 6
