"""A decision log that cannot be written costs no request. Lost entries are counted; the log itself says how many."""

from __future__ import annotations

import errno
import logging
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.fleet import Fleet, Starter, eventually

from baton.decisions_again import opened_log
from router.fleet.events import Missing, entry_of
from sim.replay import replay

ASK = {"model": "fake", "prompt": "hello", "max_tokens": 5}
COMPLETIONS = "/v1/completions"


class Disk:
    """Takes bytes while it has room. The write that fills it takes only its first bytes; later writes raise ENOSPC."""

    def __init__(self) -> None:
        self.room: int | None = None
        self.taken = bytearray()

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data if self.room is None else data[: self.room]
        self.room = None if self.room is None else self.room - len(taken)
        self.taken += taken
        return len(taken)


async def sample(fleet: Fleet, name: str) -> float:
    async with fleet.client.get(f"{fleet.admin}/metrics") as response:
        text = await response.text()
    return float(text.split(f"\n{name} ")[1].split("\n")[0])


async def ask_all(fleet: Fleet) -> None:
    for stream in (False, True):
        assert (await fleet.post(COMPLETIONS, json={**ASK, "stream": stream}))[0] == 200


async def test_a_full_disk_costs_no_request_and_the_log_tells_its_gap(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    caplog.set_level(logging.INFO, "baton.router")
    fleet = await start(decision_log=disk.write)
    await eventually(lambda: len(disk.taken) > 0, "an entry is written within a second")
    disk.room = 100
    for _ in range(8):
        await ask_all(fleet)
    await eventually(lambda: "cannot be written" in caplog.text, "the outage is told")
    await ask_all(fleet)
    assert await sample(fleet, "baton_open_requests") == 0
    assert await sample(fleet, "baton_decision_log_dropped_total") > 0
    disk.room = None
    await eventually(lambda: "is written again" in caplog.text, "the log goes on by itself")
    missing = await sample(fleet, "baton_decision_log_dropped_total")
    fleet.stop.set()
    told = [record.levelname for record in caplog.records if "the decision log" in record.message]
    assert told == ["ERROR", "WARNING"], "one line at each end of the outage"
    entries = [entry_of(line) for line in bytes(disk.taken).splitlines()]
    assert [entry.entries for entry in entries if isinstance(entry, Missing)] == [missing]
    again = replay(entries)
    assert (again.missing, again.differences) == (missing, ())


async def test_dev_full_and_a_closed_file_cost_no_request(start: Starter) -> None:
    with ExitStack() as closing:
        write = opened_log(Path("/dev/full"), "--decision-log", closing, buffered=False)
        fleet = await start(decision_log=write)
        for _ in range(8):
            await ask_all(fleet)
        assert await sample(fleet, "baton_open_requests") == 0
    await ask_all(fleet)
    assert await sample(fleet, "baton_open_requests") == 0
