"""Answers in one piece, made by one engine: their times come with them, and are learned from as a stream's are."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.instance import Role
from cluster.spec import SloClass, WhenMissed
from engine.mock.settings import SimpleCosts

pytestmark = pytest.mark.timed

STORY = "Once upon a time a small robot found a bright red lantern near the river. " * 25
"""About 450 tokens: 85 ms here, where the router takes an engine that it does not know to need 22."""
COSTS = SimpleCosts(step_ms=20.0, prefill_ms_per_1k=150.0)
CLASSES = {"easy": SloClass(ttft_ms=60_000), "soon": SloClass(ttft_ms=60, when_missed=WhenMissed.SHED)}
LEARNT = 22
"""Prompts: what is foretold is believed after twenty."""


async def ask(router: MockedRouter, number: int, slo_class: str) -> tuple[int, dict[str, Any]]:
    """Status; what was foretold and came."""
    body = {"model": "fake", "prompt": f"[{number}] {STORY}", "max_tokens": 3}
    status, _, _ = await router.ask(body, x_slo_class=slo_class, x_request_id=f"r{number}")
    return status, (await router.explain(f"r{number}"))["slo"]


async def test_what_is_foretold_becomes_right_and_is_then_believed() -> None:
    async with mocked_router([mock_settings("both-0", Role.BOTH, costs=COSTS)], classes=CLASSES) as router:
        assert (await ask(router, 0, "soon"))[0] == 200, "nobody knows yet"
        told = [(await ask(router, number, "easy"))[1] for number in range(1, LEARNT)]
        for name in ("ttft_ms", "tpot_ms"):
            ratio = median(slo["seen"][name] / slo["foretold"][name] for slo in told[-5:])
            assert 0.5 < ratio < 2.0, (name, ratio, told[-1])
        assert (await ask(router, LEARNT, "soon"))[0] == 429
