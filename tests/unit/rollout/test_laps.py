"""Parts of a push add up to the whole, and stand in their order."""

import pytest

from jetrl_megatron.rollout.laps import PARTS, Laps, slowest


def laps_of(*seconds: float) -> Laps:
    """Return laps on a clock that shows these seconds, one after another."""
    return Laps(clock=iter(seconds).__next__)


def test_each_part_gets_the_time_since_the_last_and_rest_what_is_left():
    laps = laps_of(10.0, 11.5, 12.0, 12.25, 20.0)
    laps.lap("write")
    laps.lap("boot")
    laps.lap("write")
    laps.add({"load": 4.0, "boot": 1.0})
    parts = laps.with_rest()
    assert parts == {"write": 1.75, "boot": 1.5, "load": 4.0, "rest": 2.75}
    assert list(parts) == [part for part in PARTS if part in parts]


def test_the_slowest_is_the_one_that_was_waited_for():
    quick, slow = laps_of(0.0, 3.0, 4.0), laps_of(0.0, 1.0, 6.0)
    for laps in (quick, slow):
        laps.lap("load")
        laps.lap("verify")
    assert slowest([quick, slow]) == slowest([slow, quick]) == {"load": 1.0, "verify": 5.0} and slowest([]) == {}


def test_an_unknown_part_is_refused():
    with pytest.raises(AssertionError, match="luad"):
        Laps().lap("luad")
