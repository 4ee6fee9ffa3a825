"""Background work that fails begins anew, after a longer pause each time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from cluster.background import AGAIN_S, AGAIN_S_MAX, keep_running

LOGGER = logging.getLogger("baton.test")


async def test_pauses_grow_up_to_the_longest(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def work() -> None:
        if len(pauses) < 9:
            raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        await keep_running(work, "i: heartbeats", LOGGER)
    assert pauses == [min(AGAIN_S * 2**number, AGAIN_S_MAX) for number in range(9)]
    assert [(each.levelno, each.exc_info is not None) for each in caplog.records] == [(logging.ERROR, True)] * 9
    assert caplog.messages[0] == "i: heartbeats: a fault of Baton's; this work begins anew in 1 s"


async def test_a_fault_after_a_long_run_counts_as_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = 0.0, list[float]()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def work() -> None:
        nonlocal now
        if len(pauses) < 4:
            now += AGAIN_S_MAX if len(pauses) == 2 else 1.0
            raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        await keep_running(work, "x", LOGGER)
    assert pauses == [AGAIN_S, 2 * AGAIN_S, AGAIN_S, 2 * AGAIN_S]


async def test_work_that_is_cancelled_ends() -> None:
    running = asyncio.ensure_future(keep_running(asyncio.Event().wait, "x", LOGGER))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_work_begins_anew_after_a_group_of_tasks_has_failed() -> None:
    begun = 0

    async def fails() -> None:
        await asyncio.sleep(0)  # so that the group waits for this task already
        raise RuntimeError("a bug")

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())

    await asyncio.wait_for(keep_running(work, "x", LOGGER, pauses_s=(0.0, 1.0)), 5.0)
    assert begun == 3


async def test_work_begins_anew_after_a_cancellation_that_nobody_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise asyncio.CancelledError  # a library's time limit that came out wrong

    await asyncio.wait_for(keep_running(work, "x", LOGGER, pauses_s=(0.0, 1.0)), 5.0)
    assert begun == 3
    assert caplog.messages == ["x: a fault of Baton's; this work begins anew in 0 s"] * 2


async def test_cancelled_work_whose_clean_up_fails_does_not_begin_anew() -> None:
    begun, at_work = 0, asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        at_work.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("the clean-up failed")

    running = asyncio.ensure_future(keep_running(work, "x", LOGGER))
    await asyncio.wait_for(at_work.wait(), 5.0)
    running.cancel()
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(running, 5.0)
    assert begun == 1


async def test_a_failure_that_gives_up_is_the_callers() -> None:
    async def work() -> None:
        raise ValueError("a wrong flag")

    with pytest.raises(ValueError, match="a wrong flag"):
        await keep_running(work, "x", LOGGER, gives_up=lambda error: isinstance(error, ValueError))
