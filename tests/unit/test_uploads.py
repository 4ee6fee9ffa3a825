"""Whose turn it is to send bytes of a body, and that somebody's always is."""

from __future__ import annotations

import random

from router.http.uploads import LINE_MAX, READ_BYTES, Uploads


class Sender:
    def __init__(self) -> None:
        self.held = False

    def hold(self) -> None:
        assert not self.held
        self.held = True

    def go_on(self) -> None:
        assert self.held
        self.held = False


def test_at_the_bound_all_wait_but_the_oldest() -> None:
    uploads = Uploads(1000)
    first, second, third = Sender(), Sender(), Sender()
    assert all(uploads.add(each, 300) for each in (first, second, third))
    assert not (first.held or second.held or third.held)
    uploads.add(third, 200)
    assert (first.held, second.held, third.held) == (False, True, True)
    assert uploads.waits(second)
    uploads.add(first, 5000)
    assert not first.held, "one of them must come to its end"
    uploads.end(first)
    assert (second.held, third.held) == (False, False)
    assert uploads.bytes == 800


def test_the_oldest_of_those_that_are_left_goes_on_without_room() -> None:
    uploads = Uploads(100)
    senders = [Sender() for _ in range(4)]
    for each in senders:
        uploads.add(each, 200)
    assert [each.held for each in senders] == [False, True, True, True]
    uploads.end(senders[0])
    assert [each.held for each in senders] == [False, False, True, True]
    uploads.end(senders[2])  # given up while it waited
    assert senders[3].held
    uploads.end(senders[1])
    assert not senders[3].held


def test_room_is_given_a_read_at_a_time() -> None:
    """All at once would bring a read each: too much again."""
    uploads = Uploads(10 * READ_BYTES)
    first, others = Sender(), [Sender() for _ in range(50)]
    uploads.add(first, 10 * READ_BYTES)
    for each in others:
        assert uploads.add(each, 1)
    assert sum(each.held for each in others) == 50
    uploads.end(first)
    assert sum(not each.held for each in others) == 11


def test_the_line_is_bounded_and_who_is_known_is_not_refused() -> None:
    uploads = Uploads(10)
    senders = [Sender() for _ in range(LINE_MAX + 1)]
    assert all(uploads.add(each, 20) for each in senders)
    assert not uploads.add(Sender(), 1)
    assert uploads.add(senders[0], 1)
    uploads.end(senders[5])
    assert uploads.add(Sender(), 1)


def test_one_that_is_not_known_ends_nothing() -> None:
    uploads = Uploads(10)
    uploads.end(Sender())
    assert (uploads.bytes, uploads.waiting) == (0, 0)


def test_whatever_happens_all_come_to_their_end() -> None:
    chance = random.Random(1)
    uploads, open_, ended = Uploads(5000), dict[Sender, int](), 0
    for step in range(20_000):
        if step < 15_000 and len(open_) < 40 and chance.random() < 0.3:
            open_[Sender()] = chance.randrange(1, 4000)
        going = [each for each in open_ if not each.held]
        assert going or not open_, "nobody may send"
        if not going:
            continue
        each = chance.choice(going)
        part = min(open_[each], chance.randrange(1, 700))
        assert uploads.add(each, part)
        open_[each] -= part
        if not open_[each] or chance.random() < 0.02:
            del open_[each]
            uploads.end(each)
            ended += 1
        assert uploads.bytes <= 5000 + 4000 + 40 * 700
    assert not open_
    assert ended > 1000
    assert (uploads.bytes, uploads.waiting) == (0, 0)
