"""A user's own reward function: a number from every text, so that groups have a spread from the first step on."""


def reward(text: str, answer: str) -> float:
    """The sum of the text's code points modulo 7, as a share."""
    return sum(map(ord, text)) % 7 / 6
