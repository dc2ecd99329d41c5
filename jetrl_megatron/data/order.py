"""Which prompts each step takes: epoch after epoch, each shuffled by seed and epoch, the same after a resume as without one.

Enters: the number of prompts and their fingerprint. Leaves: indices. A step that reaches the end of an epoch goes on into the next one;
the prompts that it already took are put behind the others of the new epoch's first draw, so no prompt occurs twice in a step unless the
step is larger than the set, and every epoch still takes each prompt exactly once.
The state is a position, not an iterator, and a resume at an epoch's end begins the next one.
"""

import random


class PromptOrder:
    """A resumable order over prompts.

    num_prompts, fingerprint: of the `PromptSet`. seed: `run.seed`. shuffle: `data.shuffle`; without it every epoch is in file order.
    """

    def __init__(self, num_prompts: int, fingerprint: str, seed: int, shuffle: bool) -> None:
        """Begin at epoch 0; raises ValueError without prompts."""
        if num_prompts < 1:
            raise ValueError("there are no prompts to order; check data.train")
        self.num_prompts, self.fingerprint, self.seed, self.shuffle = num_prompts, fingerprint, seed, shuffle
        self._begin(epoch=0, avoided=(), first_draw=0)

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to."""
        return self._epoch + (self._position == self.num_prompts)

    def take(self, count: int) -> list[int]:
        """Return the indices of the next `count` prompts."""
        assert count >= 1, count
        taken: list[int] = []
        while len(taken) < count:
            if self._position == self.num_prompts:
                self._begin(self._epoch + 1, avoided=tuple(taken), first_draw=count - len(taken))
            part = self._order[self._position : self._position + count - len(taken)]
            taken.extend(part)
            self._position += len(part)
        return taken

    def state_dict(self) -> dict[str, object]:
        """Return the position as JSON-able values, small whatever the number of prompts."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "avoided": list(self._avoided),
            "first_draw": self._first_draw,
            "num_prompts": self.num_prompts,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go to a saved position; ValueError when it was saved over other prompts, another seed or another shuffle."""
        if state["fingerprint"] != self.fingerprint or state["num_prompts"] != self.num_prompts:
            raise ValueError(
                f"the training prompts have changed: the checkpoint was written with {state['num_prompts']} prompts, fingerprint "
                f"{state['fingerprint']}, now there are {self.num_prompts}, fingerprint {self.fingerprint}; restore the data, the data "
                "keys and the tokenizer of that run, or start anew with another run.dir"
            )
        for name, value in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[name] != value:
                key = {"seed": "run.seed", "shuffle": "data.shuffle"}[name]
                raise ValueError(f"{key} is {value}, the checkpoint was written with {state[name]}; restore it or start another run.dir")
        self._begin(state["epoch"], tuple(state["avoided"]), state["first_draw"])
        assert 0 <= state["position"] <= self.num_prompts, state
        self._position = state["position"]

    def _begin(self, epoch: int, avoided: tuple[int, ...], first_draw: int) -> None:
        """Set up an epoch. avoided: what the step that crosses into it has already; first_draw: how many it still takes."""
        order = list(range(self.num_prompts))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        fresh = set(order) - set(avoided)
        first = [index for index in order if index in fresh][:first_draw]
        chosen = set(first)
        self._order = first + [index for index in order if index not in chosen]
        self._epoch, self._position, self._avoided, self._first_draw = epoch, 0, avoided, first_draw
