"""Answers in one piece from one engine carry the engine's times, and predictors learn from them as from streams."""

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
"""About 450 tokens. Their prefill takes 85 ms here; before it learns, the router predicts 22 ms."""
COSTS = SimpleCosts(step_ms=20.0, prefill_ms_per_1k=150.0)
CLASSES = {"easy": SloClass(ttft_ms=60_000), "soon": SloClass(ttft_ms=60, when_missed=WhenMissed.SHED)}
LEARNT = 22
"""Number of prompts. The router uses its predictions for refusals after 20."""


async def ask(router: MockedRouter, number: int, slo_class: str) -> tuple[int, dict[str, Any]]:
    """Status of the answer, and `slo` of the request's `/explain`: predicted and measured times."""
    body = {"model": "fake", "prompt": f"[{number}] {STORY}", "max_tokens": 3}
    status, _, _ = await router.ask(body, x_slo_class=slo_class, x_request_id=f"r{number}")
    return status, (await router.explain(f"r{number}"))["slo"]


async def test_predictions_become_right_and_then_shed_requests() -> None:
    async with mocked_router([mock_settings("both-0", Role.BOTH, costs=COSTS)], classes=CLASSES) as router:
        assert (await ask(router, 0, "soon"))[0] == 200, "no prediction counts yet"
        told = [(await ask(router, number, "easy"))[1] for number in range(1, LEARNT)]
        for name in ("ttft_ms", "tpot_ms"):
            ratio = median(slo["seen"][name] / slo["foretold"][name] for slo in told[-5:])
            assert 0.5 < ratio < 2.0, (name, ratio, told[-1])
        assert (await ask(router, LEARNT, "soon"))[0] == 429
