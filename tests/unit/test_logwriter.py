"""The decision log on a disk that is sometimes full: what the file holds, and what is reported."""

from __future__ import annotations

import errno
import logging
import random
from typing import Any

import pytest

from router.fleet.events import Looked, Missing, entry_of, line_of
from router.scheduler.log_writer import BATCH_BYTES, FLUSH_S, LogWriter


class Disk:
    """A file on a disk with `room` bytes left."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.taken = b""
        self.writes = 0

    def write(self, data: bytes) -> int:
        self.writes += 1
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: self.room]
        self.room -= len(taken)
        self.taken += taken
        return len(taken)


class At:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def made() -> tuple[Disk, At, list[int], LogWriter]:
    disk, at, dropped = Disk(), At(), []
    return disk, at, dropped, LogWriter(disk.write, dropped.append, at)


def entries(disk: Disk) -> list[Any]:
    return [entry_of(line) for line in disk.taken.splitlines(keepends=True)]


def test_entries_are_written_together_and_all_by_a_flush() -> None:
    disk, _, dropped, log = made()
    line = line_of(Looked(1.5))
    for _ in range(BATCH_BYTES // len(line)):
        log.add(line)
    assert disk.writes == 0
    log.add(line)
    assert (disk.writes, len(entries(disk))) == (1, BATCH_BYTES // len(line) + 1)
    log.flush()
    assert disk.writes == 1, "there is nothing more to write"
    log.add(line)
    log.flush()
    assert (disk.writes, dropped) == (2, [])


@pytest.mark.parametrize("room", range(90))
def test_wherever_a_write_is_cut_each_line_is_an_entry_and_all_are_accounted_for(
    room: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk, at, dropped, log = made()
    caplog.set_level(logging.INFO, "baton.router")
    for number in range(2):
        log.add(line_of(Looked(float(number))))
    disk.room = room
    log.flush()
    log.add(line_of(Looked(2.0)))
    log.flush()
    at.now += FLUSH_S
    disk.room = 1 << 30
    log.flush()
    log.add(line_of(Looked(3.0)))
    log.flush()
    found = entries(disk)
    gaps = [entry.entries for entry in found if isinstance(entry, Missing)]
    assert gaps == ([sum(dropped)] if dropped else [])
    assert len(found) - len(gaps) + sum(dropped) == 4
    assert found[-1] == Looked(3.0)
    assert len(caplog.records) == (2 if room < 3 * len(line_of(Looked(0.0))) else 0)


def test_nothing_is_lost_from_the_count_however_often_the_disk_is_full() -> None:
    chance = random.Random(7)
    disk, at, dropped, log = made()
    count = 3000
    for number in range(count):
        log.add(line_of(Looked(float(number))))
        if chance.random() < 0.02:
            disk.room = chance.choice((0, 5, 40, 200, 1 << 30))
        if chance.random() < 0.1:
            at.now += FLUSH_S
            log.flush()
    disk.room = 1 << 30
    at.now += FLUSH_S
    log.flush()
    log.flush()
    found = entries(disk)
    gaps = [entry.entries for entry in found if isinstance(entry, Missing)]
    assert len(gaps) > 3
    assert sum(gaps) == sum(dropped)
    assert len(found) - len(gaps) + sum(gaps) == count
    times = [entry.now for entry in found if isinstance(entry, Looked)]
    assert times == sorted(times)


def test_while_it_fails_a_write_is_tried_once_a_second_and_the_failure_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, at, dropped, log = made()
    disk.room = 0
    for number in range(10_000):
        at.now = number / 1000
        log.add(line_of(Looked(0.0)))
    assert disk.writes <= 11
    assert len(caplog.records) == 1
    assert sum(dropped) + BATCH_BYTES // len(line_of(Looked(0.0))) >= 9_000


def test_a_file_that_is_closed_is_a_failure_as_any_other() -> None:
    dropped: list[int] = []

    def closed(_: bytes) -> int:
        raise ValueError("write to closed file")

    log = LogWriter(closed, dropped.append, At())
    log.add(line_of(Looked(0.0)))
    log.flush()
    assert dropped == [1]
