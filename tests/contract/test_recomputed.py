"""A decode engine that computes again what was handed over to it: the tokens are counted at `/metrics` and `/ui`."""

from __future__ import annotations

import asyncio

import pytest
from support.mock import mock_settings
from support.mocked_router import MockedRouter, mocked_router

from cluster.instance import Role
from router.admin import operators
from router.fleet import probes

NAME = 'baton_handoff_recomputed_tokens_total{instance="decode-0"}'
PULLED = 'baton_handoff_pulled_tokens_total{instance="decode-0"}'


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe engines, and refresh the page's figures, every 10 ms."""
    monkeypatch.setattr(operators, "LOOK_S", 0.01)
    monkeypatch.setattr(probes, "INTERVAL_S", 0.01)


async def shown(router: MockedRouter) -> tuple[int | None, int]:
    """Recomputed tokens on the page: in all, and lately."""
    async with router.client.get(f"{router.admin}/ui/data") as answer:
        told = {each["id"]: each for each in (await answer.json())["instances"]}["decode-0"]
    return told["recomputed_tokens"], told["recomputed_lately"]


async def becomes(router: MockedRouter, name: str, value: float) -> None:
    async with asyncio.timeout(10):
        while (await router.metrics()).get(name) != value:
            await asyncio.sleep(0.01)


async def test_tokens_that_were_handed_over_and_computed_again_are_shown() -> None:
    fleet = [mock_settings("prefill-0", Role.PREFILL), mock_settings("decode-0", Role.DECODE)]
    async with mocked_router(fleet, policy="least_load") as router:
        body = {"model": "fake", "prompt": [1000 + at for at in range(281)], "max_tokens": 4}
        assert (await router.ask(body))[0] == 200
        await becomes(router, PULLED, 281)
        assert (await router.metrics())[NAME] == 0 and await shown(router) == (0, 0)
        router.mocks.instances["decode-0"].set_faults(b'{"fault": "fail_pull"}')
        body["prompt"] = [5000 + at for at in range(281)]
        assert (await router.ask(body))[0] == 200, "the client does not notice"
        await becomes(router, NAME, 281)
        assert (await router.metrics())[PULLED] == 281
        assert (await shown(router))[0] == 281
        metrics = (await router.metrics()).items()
        handed = {name: value for name, value in metrics if name.startswith("baton_handoffs_total")}
        assert handed == {'baton_handoffs_total{result="ok"}': 2.0}, "no other count shows the failed pull"
