"""Backpressure for uploads: which connections may send bytes of a body, and that all uploads finish."""

from __future__ import annotations

import random

from router.core.clients import client_of
from router.http.uploads import LINE_MAX, READ_BYTES, UnparsedBody, Uploads, share_of


class Sender:
    def __init__(self) -> None:
        self.held = False

    def hold(self) -> None:
        assert not self.held
        self.held = True

    def go_on(self) -> None:
        assert self.held
        self.held = False


def test_at_the_limit_all_uploads_wait_except_the_oldest() -> None:
    uploads = Uploads(1000)
    first, second, third = Sender(), Sender(), Sender()
    assert all(uploads.add(each, 300) for each in (first, second, third))
    assert not (first.held or second.held or third.held)
    uploads.add(third, 200)
    assert (first.held, second.held, third.held) == (False, True, True)
    assert uploads.waits(second)
    uploads.add(first, 5000)
    assert not first.held, "the oldest upload must be able to finish"
    uploads.end(first)
    assert (second.held, third.held) == (False, False)
    assert uploads.bytes == 800


def test_the_oldest_remaining_upload_goes_on_without_room() -> None:
    uploads = Uploads(100)
    senders = [Sender() for _ in range(4)]
    for each in senders:
        uploads.add(each, 200)
    assert [each.held for each in senders] == [False, True, True, True]
    uploads.end(senders[0])
    assert [each.held for each in senders] == [False, False, True, True]
    uploads.end(senders[2])  # this upload was given up while it waited
    assert senders[3].held
    uploads.end(senders[1])
    assert not senders[3].held


def test_room_is_given_a_read_at_a_time() -> None:
    """If all uploads went on at once, each would bring one read, and the bytes would exceed the limit again."""
    uploads = Uploads(10 * READ_BYTES)
    first, others = Sender(), [Sender() for _ in range(50)]
    uploads.add(first, 10 * READ_BYTES)
    for each in others:
        assert uploads.add(each, 1)
    assert sum(each.held for each in others) == 50
    uploads.end(first)
    assert sum(not each.held for each in others) == 11


def test_the_number_of_waiting_uploads_is_bounded_and_a_known_upload_is_not_refused() -> None:
    uploads = Uploads(10)
    senders = [Sender() for _ in range(LINE_MAX + 1)]
    assert all(uploads.add(each, 20) for each in senders)
    assert not uploads.add(Sender(), 1)
    assert uploads.add(senders[0], 1)
    uploads.end(senders[5])
    assert uploads.add(Sender(), 1)


def test_a_body_that_is_not_parsed_yet_counts() -> None:
    uploads = Uploads(1000)
    kept = uploads.keep(900)
    first, second = Sender(), Sender()
    uploads.add(first, 60)
    assert not first.held
    uploads.add(second, 60)
    assert (first.held, second.held) == (True, True), "parsing makes room, not the oldest upload's end"
    assert uploads.bytes == 1020
    uploads.drop(kept)
    assert (first.held, second.held) == (False, False)
    uploads.end(first)
    uploads.end(second)
    assert (uploads.bytes, uploads.waiting) == (0, 0)


def test_a_clients_share_leaves_room_for_others() -> None:
    uploads = Uploads(1000)
    one, two, other = Sender(), Sender(), Sender()
    uploads.add(one, 400, "a")
    uploads.add(two, 400, "a")
    assert (one.held, two.held) == (False, True), "the client's oldest upload goes on"
    uploads.add(other, 150, "b")
    assert not other.held
    uploads.add(other, 40, "b")
    assert not other.held
    kept = uploads.keep(300, "b")
    assert (one.held, two.held, other.held) == (True, True, True), "no upload has room"
    uploads.drop(kept)
    assert (one.held, two.held, other.held) == (False, True, False)
    uploads.end(one)
    assert not two.held


def test_a_clients_bodies_that_are_not_parsed_yet_count_in_its_share() -> None:
    uploads = Uploads(1000)
    kept, mine, other = uploads.keep(800, "a"), Sender(), Sender()
    uploads.add(mine, 1, "a")
    uploads.add(other, 1, "b")
    assert (mine.held, other.held) == (True, False)
    uploads.drop(kept)
    assert not mine.held


def test_one_client_cannot_take_all_waiting_places() -> None:
    uploads = Uploads(10)
    senders = [Sender() for _ in range(share_of(LINE_MAX) + 1)]
    assert all(uploads.add(each, 20, "a") for each in senders)
    assert uploads.waiting == share_of(LINE_MAX) < LINE_MAX
    assert not uploads.add(Sender(), 1, "a")
    assert uploads.add(Sender(), 1, "b")


def test_a_client_is_a_tenant_or_an_address() -> None:
    assert client_of("ann", ("10.0.0.1", 1)) == client_of("ann", ("10.0.0.2", 2))
    assert client_of("", ("10.0.0.1", 1)) == client_of("", ("10.0.0.1", 2)) == client_of("", "10.0.0.1")
    assert len({client_of("", ("::1", 1, 0, 0)), client_of("", ("10.0.0.1", 1)), client_of("", None)}) == 3


def test_the_end_of_an_unknown_upload_changes_nothing() -> None:
    uploads = Uploads(10)
    uploads.end(Sender())
    assert (uploads.bytes, uploads.waiting) == (0, 0)


def test_all_uploads_finish_in_random_orders() -> None:
    chance = random.Random(1)
    uploads, open_, ended = Uploads(5000), dict[Sender, int](), 0
    for step in range(20_000):
        if step < 15_000 and len(open_) < 40 and chance.random() < 0.3:
            open_[Sender()] = chance.randrange(1, 4000)
        going = [each for each in open_ if not each.held]
        assert going or not open_, "no upload may send"
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


def test_all_uploads_of_several_clients_finish_in_random_orders() -> None:
    chance = random.Random(2)
    uploads, open_, kept, ended = Uploads(5000), dict[Sender, tuple[str, int]](), list[UnparsedBody](), 0
    for step in range(20_000):
        if step < 15_000 and len(open_) < 40 and chance.random() < 0.3:
            open_[Sender()] = chance.choice("aaab"), chance.randrange(1, 4000)
        if kept and (chance.random() < 0.2 or all(each.held for each in open_)):
            uploads.drop(kept.pop(0))
        going = [each for each in open_ if not each.held]
        assert going or kept or not open_, "no upload may send, and no parsed body makes room"
        if not going:
            continue
        each = chance.choice(going)
        client, left = open_[each]
        part = min(left, chance.randrange(1, 700))
        if not uploads.add(each, part, client):
            del open_[each]
            continue
        open_[each] = client, left - part
        if left == part:
            del open_[each]
            uploads.end(each)
            ended += 1
            if chance.random() < 0.3:
                kept.append(uploads.keep(chance.randrange(1, 4000), client))
        assert uploads.waiting == sum(each.held for each in open_)
    assert not open_
    for each_kept in kept:
        uploads.drop(each_kept)
    assert ended > 1000
    assert (uploads.bytes, uploads.waiting) == (0, 0)
