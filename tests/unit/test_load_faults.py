"""When an action on the fleet was done, as `baton load` reports it."""

from __future__ import annotations

import asyncio

import pytest

from baton import load_faults
from baton.load_faults import LoadFaults, Target
from loadgen.faults import Action


async def test_the_time_that_an_action_took_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load goes on while a target is slow to answer, so its time moves on, too."""
    now_s, answered = [100.0], asyncio.Event()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s[0])

    async def done(action: Action, target: Target) -> None:
        await answered.wait()

    monkeypatch.setattr(load_faults, "_done", done)
    faults = LoadFaults([Action(at_s=15.0, do="slow", target="decode")])
    faults._targets = {"decode": Target("decode", "http://mock", "http://mock")}
    faults.tick(15.05)
    await asyncio.sleep(0)
    now_s[0] += 1.2
    faults.tick(16.24)
    answered.set()
    await faults.ended()
    (applied,) = faults.applied
    assert (applied.at_s, applied.done_s, applied.error) == (15.0, 16.25, None)


async def test_an_action_that_was_never_due_is_reported() -> None:
    """A run that ended before its kill survived no kill."""
    faults = LoadFaults([Action(at_s=300.0, do="kill", target="prefill-0")])
    faults.tick(3.0)
    await faults.ended()
    (applied,) = faults.applied
    assert (applied.at_s, applied.what, applied.error) == (300.0, "kill prefill-0", load_faults.NOT_DUE)


async def test_an_instance_that_cannot_be_killed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(load_faults.os, "kill", refuses)
    monkeypatch.setattr(load_faults, "born", lambda _: "10")
    faults = LoadFaults([Action(at_s=1.0, do="kill", target="decode-0")])
    faults._targets = {"decode-0": Target("decode-0", "http://e", "http://a", 4711, "10")}
    faults.tick(1.0)
    await faults.ended()
    (applied,) = faults.applied
    assert applied.error == "Operation not permitted"
