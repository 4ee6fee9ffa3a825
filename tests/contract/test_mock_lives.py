"""One mock in the test's own loop, under faults of the whole instance: what it reports, and when it comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
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
