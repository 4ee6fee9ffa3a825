"""A router's tasks: those that run until they are cancelled begin anew after a fault."""

from __future__ import annotations

import asyncio

import pytest

from cluster import background
from router.http.tasks import Tasks


async def test_work_that_runs_for_ever_begins_anew_and_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without this a router would go on with the fleet as it was at the fault."""
    tasks, begun, well = Tasks(), list[int](), asyncio.Event()

    async def sleep(_: float) -> None:
        return

    async def reads_the_registry() -> None:
        begun.append(1)
        if len(begun) < 3:
            raise KeyError("a bug")
        well.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(background.asyncio, "sleep", sleep)
    kept = tasks.keep(reads_the_registry, "registry")
    async with asyncio.timeout(5):
        await well.wait()
    assert len(begun) == 3
    assert caplog.messages == [
        f"router: registry: a fault of Baton's; this work begins anew in {seconds} s" for seconds in (1, 2)
    ]
    assert tasks.ending() == set(), "a router that drains does not wait for it"
    tasks.cancel()
    await tasks.end(5.0)
    assert kept.cancelled()
    assert len(begun) == 3


async def test_what_a_task_begins_as_it_ends_may_end_by_itself() -> None:
    """A leg that is cut off at the router's end has its hold given up."""
    tasks, begun, given_up = Tasks(), asyncio.Event(), list[str]()

    async def gives_up() -> None:
        await asyncio.sleep(0)
        given_up.append("hold")

    async def leg() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            tasks.spawn(gives_up(), "give-up")

    tasks.spawn(leg(), "leg")
    await begun.wait()
    tasks.cancel()
    await tasks.end(5.0)
    assert given_up == ["hold"]
