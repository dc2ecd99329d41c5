"""One message after another to several takers in step, also where one of them fails or never comes."""

import threading
import time

import pytest

from jetrl_megatron.sync.relay import Relay


def start(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joined(*threads):
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()


def test_everybody_takes_every_message_and_the_next_waits_for_the_slowest():
    relay, reading, taken = Relay(3), [], {n: [] for n in range(3)}

    def taker(number):
        def take(message):
            reading.append(message)
            time.sleep(0.01 * number)
            taken[number].append(message)
            reading.remove(message)

        relay.follow(take)

    threads = [start(lambda n=n: taker(n)) for n in range(3)]
    for message in range(5):
        relay.give(message)
        assert reading == [] and all(messages[-1] == message for messages in taken.values())
    relay.end()
    joined(*threads)
    assert taken == {n: [0, 1, 2, 3, 4] for n in range(3)}


def test_the_first_message_waits_until_all_have_come():
    relay, taken = Relay(2), []
    threads = [start(lambda: relay.follow(lambda m: taken.append(m)))]
    giver = start(lambda: relay.give("first"))
    time.sleep(0.05)
    assert giver.is_alive() and taken == []
    threads.append(start(lambda: relay.follow(lambda m: taken.append(m))))
    joined(giver)
    assert taken == ["first"] * 2
    relay.end()
    joined(*threads)


def test_one_that_fails_leaves_and_the_rest_goes_on():
    relay, taken, failed = Relay(2), [], []

    def fail():
        with pytest.raises(OSError, match="gone"):
            relay.follow(refuse)
        failed.append(True)

    def refuse(message):
        if message == 1:
            raise OSError("gone")

    threads = [start(fail), start(lambda: relay.follow(taken.append))]
    for message in range(4):
        relay.give(message)
    relay.end()
    joined(*threads)
    assert taken == [0, 1, 2, 3] and failed == [True]


def test_those_who_never_come_are_given_up():
    relay = Relay(2)
    giver = start(lambda: [relay.give(message) for message in range(3)])
    time.sleep(0.05)
    assert giver.is_alive()
    relay.leave()
    time.sleep(0.05)
    assert giver.is_alive(), "one of the two may still come"
    relay.leave()
    joined(giver)
    relay = Relay(2)
    giver = start(lambda: relay.give("message"))
    relay.close()
    joined(giver)


def test_an_end_before_the_first_message_lets_everybody_go():
    """The giver has failed."""
    relay = Relay(2)
    thread = start(lambda: relay.follow(lambda m: None))
    relay.end()
    joined(thread)
