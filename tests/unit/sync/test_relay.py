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


def test_everybody_takes_every_message_and_the_one_after_the_next_waits_for_the_slowest():
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
        assert set(reading) <= {message} and all(messages[:message] == list(range(message)) for messages in taken.values())
    relay.settle()
    assert reading == [] and {len(messages) for messages in taken.values()} == {5}
    relay.end()
    joined(*threads)
    assert taken == {n: [0, 1, 2, 3, 4] for n in range(3)}


def test_the_first_message_waits_until_all_have_come():
    relay, taken = Relay(2), []
    threads = [start(lambda: relay.follow(lambda m: taken.append(m)))]
    relay.give("first")
    giver = start(lambda: relay.give("second"))
    time.sleep(0.05)
    assert giver.is_alive() and taken == []
    threads.append(start(lambda: relay.follow(lambda m: taken.append(m))))
    joined(giver)
    relay.settle()
    assert taken == ["first"] * 2 + ["second"] * 2
    relay.end()
    joined(*threads)


def test_the_next_message_is_made_while_one_is_read_and_an_end_waits_for_the_readers():
    relay, may_go, taken = Relay(1), threading.Event(), []

    def take(message):
        assert may_go.wait(5.0)
        taken.append(message)

    reader = start(lambda: relay.follow(take))
    relay.give("first")  # returns while it is read
    giver, ender = start(lambda: relay.give("second")), None
    time.sleep(0.05)
    assert taken == [] and giver.is_alive()
    may_go.set()
    joined(giver)
    relay.settle()
    may_go.clear()
    relay.give("third")
    time.sleep(0.05)
    ender = start(relay.end)
    time.sleep(0.05)
    assert ender.is_alive(), "somebody reads the buffer"
    may_go.set()
    joined(ender, reader)
    assert taken == ["first", "second", "third"]


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
    giver = start(lambda: [relay.give(message) for message in range(2)])
    relay.close()
    joined(giver, start(relay.settle))


def test_an_end_before_the_first_message_lets_everybody_go():
    """The giver has failed."""
    relay = Relay(2)
    thread = start(lambda: relay.follow(lambda m: None))
    relay.end()
    joined(thread)


def test_a_message_that_nobody_could_begin_to_read_is_withdrawn_by_the_end():
    """The giver has failed while a server was still on its way: it need not be waited for, and does not read what is freed then."""
    relay, taken = Relay(2), []
    first = start(lambda: relay.follow(taken.append))
    relay.give("first")
    joined(start(relay.end), first)
    joined(start(lambda: relay.follow(taken.append)))
    assert taken == []
