"""Mocks in the test's event loop, under faults of the whole instance: what they report, and when they come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from support.fleet import eventually
from support.mock import mock_settings

from cluster.instance import Role
from engine.mock.fleet import MockFleet
from engine.mock.instance import MockInstance

BODY = {"model": "fake", "prompt": "hello", "max_tokens": 5}
STEPS_MS = 5 * 5.0


@pytest.fixture
async def mock() -> AsyncIterator[MockInstance]:
    async with MockFleet([mock_settings("one", Role.BOTH, step_ms=5.0)]) as fleet:
        yield fleet.instances["one"]


async def ask(mock: MockInstance) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.post(f"{mock.url}/v1/completions", json=BODY) as answer:
        assert answer.status == 200
        told: dict[str, Any] = await answer.json()
        return told


async def test_a_slow_engine_reports_the_times_that_its_clients_see(mock: MockInstance) -> None:
    mock.set_faults(b'{"fault": "slow", "factor": 4}')
    metrics = (await ask(mock))["metrics"]
    mock.clear_faults()
    parts = ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    assert sum(metrics[part] for part in parts) >= 4 * STEPS_MS
    assert mock.metrics.histograms["e2e_request_latency_seconds"].total >= 4 * STEPS_MS / 1000


@pytest.mark.parametrize("kind", ["die", "close"])
async def test_two_faults_that_are_removed_together_are_over_once(
    mock: MockInstance, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    mock.set_faults(f'[{{"fault": "{kind}"}}, {{"fault": "{kind}"}}]'.encode())
    await eventually(lambda: not mock.ready.is_set() or kind == "close", "it is dead", 5)
    mock.clear_faults()
    async with asyncio.timeout(5):
        await mock.ready.wait()
        while mock.listener._server is None:
            await asyncio.sleep(0.005)
    await ask(mock)
    assert mock.epoch == (2 if kind == "die" else 1)
    assert [line for line in caplog.messages if "failed" in line] == []


async def test_a_fault_that_is_removed_before_it_strikes_does_nothing(mock: MockInstance) -> None:
    mock.set_faults(b'{"fault": "die"}')
    mock.clear_faults()  # in the same turn of the loop, as two requests in one packet
    await asyncio.sleep(0)
    await ask(mock)
    assert mock.epoch == 1


async def test_an_engine_stays_dead_while_a_fault_of_any_rank_wants_it_dead() -> None:
    names = ["one@0", "one@1"]
    async with MockFleet([mock_settings(name, Role.BOTH) for name in names]) as fleet:
        first, second = (fleet.instances[name] for name in names)
        for rank in (first, second):
            rank.set_faults(b'{"fault": "die"}')
        await eventually(lambda: not second.ready.is_set(), "both are dead", 5)
        first.clear_faults()
        assert [rank.handoffs.engine_id for rank in (first, second)] == ["", ""]
        second.clear_faults()
        async with asyncio.timeout(5):
            for rank in (first, second):
                await rank.ready.wait()
        assert [rank.epoch for rank in (first, second)] == [2, 2]
