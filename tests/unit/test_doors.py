"""Which connections of clients are closed or refused when there are too many."""

from __future__ import annotations

import pytest

from router.http.doors import CLIENTS_MAX, IDLE_S, REFUSALS_MAX, SPARE, ConnectionPlace, Doors, guests_of


class Guest:
    def __init__(self, *, idle: bool = True) -> None:
        self.idle = idle
        self.left = False

    def make_room(self) -> bool:
        self.left = self.left or self.idle
        return self.idle


def test_the_connection_that_is_idle_for_longest_makes_room() -> None:
    doors = Doors(3)
    guests = [Guest() for _ in range(3)]
    for at, each in enumerate(guests):
        assert doors.enter(each, at) is ConnectionPlace.TAKEN
    doors.busy(guests[0])
    new = Guest()
    assert doors.enter(new, 10.0) is ConnectionPlace.TAKEN
    assert [each.left for each in guests] == [False, True, False]
    doors.idles(guests[0], 10.5)
    assert doors.enter(Guest(), 11.0) is ConnectionPlace.TAKEN
    assert [each.left for each in guests] == [False, True, True]
    assert not new.left
    assert (doors.closed, doors.refused, len(doors.guests)) == (2, 0, 3)


def test_a_new_connection_is_not_taken_for_idle() -> None:
    doors = Doors(1)
    first, late = Guest(), Guest()
    doors.enter(first, 0.0)
    assert doors.enter(late, IDLE_S / 2) is ConnectionPlace.REFUSAL
    assert not first.left
    doors.leave(late)
    assert doors.enter(Guest(), IDLE_S) is ConnectionPlace.TAKEN
    assert first.left


def test_a_connection_with_a_request_under_way_stays() -> None:
    doors = Doors(1)
    at_work = Guest(idle=False)
    doors.enter(at_work, 0.0)
    assert doors.enter(Guest(), 5.0) is ConnectionPlace.REFUSAL
    assert not at_work.left


def test_refusals_are_bounded_too() -> None:
    doors = Doors(1)
    doors.enter(Guest(idle=False), 0.0)
    places = [doors.enter(Guest(), 0.0) for _ in range(REFUSALS_MAX + 2)]
    assert places == [ConnectionPlace.REFUSAL] * REFUSALS_MAX + [ConnectionPlace.NONE] * 2
    assert doors.refused == len(places)


def test_a_connection_that_has_left_is_forgotten() -> None:
    doors = Doors(1)
    gone = Guest()
    doors.enter(gone, 0.0)
    doors.leave(gone)
    doors.idles(gone, 1.0)
    assert doors.enter(Guest(), 9.0) is ConnectionPlace.TAKEN
    assert not gone.left
    assert not doors.closed


@pytest.mark.parametrize(
    ("descriptors", "used", "most"),
    [(64, 16, (64 - 16 - SPARE) // 2), (1024, 24, 488), (1 << 20, 20, CLIENTS_MAX), (10, 9, 1)],
)
def test_half_of_the_free_descriptors_are_for_clients(descriptors: int, used: int, most: int) -> None:
    assert guests_of(descriptors, used) == most
