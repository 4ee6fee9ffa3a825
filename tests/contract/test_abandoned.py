"""If any step of a request raises, the router gives back the request's places and ends the client's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from support.fleet import Fleet, Starter

from cluster.keys import digest
from cluster.spec import Tenant
from router.request.driver import RequestDriver
from router.request.reply import Reply
from router.request.scheduled import ScheduledRequest
from router.request.trace import RequestTrace
from router.request.waiting import Waiting
from router.scheduler.dispatch import Dispatch
from router.scheduler.scheduler import Scheduler
from router.telemetry.explain_store import ExplainStore
from router.telemetry.metrics import RouterMetrics
from router.telemetry.timing import RequestTimeline

pytestmark = pytest.mark.interpreted

ASK = {"model": "fake", "prompt": "hello", "max_tokens": 5}
ONE_AT_A_TIME: dict[str, Any] = {
    "tenants": {"acme": Tenant(open_max=1)},
    "tenant_keys": {"acme": lambda: (digest("sk-acme"),)},
}
HEADERS = {"Authorization": "Bearer sk-acme"}

STEPS: list[tuple[Any, str]] = [
    (RequestTrace, "chose"),
    (RequestTrace, "opened"),
    (RequestTrace, "_end_span"),
    (RequestTimeline, "end"),
    (RequestTrace, "sends"),
    (ExplainStore, "begin"),
    (ExplainStore, "finish"),
    (RouterMetrics, "ended"),
    (RouterMetrics, "leg"),
    (RouterMetrics, "over"),
    (Scheduler, "choose"),
    (Scheduler, "finish"),
    (Scheduler, "occupy"),
    (Waiting, "__init__"),
    (ScheduledRequest, "count_tokens"),
    (RequestDriver, "_part"),
    (Reply, "relay"),
    (Reply, "respond"),
    (Reply, "ended"),
    (Dispatch, "call"),
]


class Broken(Exception):
    """Stands for a bug in the router."""


def broken_once(real: Callable[..., Any], times: int) -> Callable[..., Any]:
    left = [times]

    def call(*given: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise Broken
        return real(*given, **named)

    return call


async def asked(fleet: Fleet, *, stream: bool) -> int | str:
    """The answer's status, or "broke off"."""
    timeout = aiohttp.ClientTimeout(total=3)
    try:
        url = fleet.endpoint + "/v1/completions"
        async with fleet.client.post(url, json={**ASK, "stream": stream}, headers=HEADERS, timeout=timeout) as answer:
            await answer.read()
            return answer.status
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        return "broke off"


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("owner", "name"), STEPS, ids=[f"{owner.__name__}.{name}" for owner, name in STEPS])
async def test_a_bug_ends_one_request_and_leaves_nothing_open(
    start: Starter, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, times: int
) -> None:
    fleet = await start(**ONE_AT_A_TIME)
    real = getattr(owner, name)
    for stream in (False, True):
        monkeypatch.setattr(owner, name, broken_once(real, times))
        said = await asked(fleet, stream=stream)
        monkeypatch.setattr(owner, name, real)
        assert said in {200, 500, "broke off"}, said
        assert await asked(fleet, stream=stream) == 200, "the tenant's one place is free again"
        await all_given_back(fleet)
    uncounted = (owner, name, times) == (
        RouterMetrics,
        "ended",
        2,
    ) or owner is Waiting  # what counts is broken, or nothing has begun
    assert await ended(fleet) == (2 if uncounted else 4), "each request counts once, whatever became of it"


async def ended(fleet: Fleet) -> float:
    async with fleet.client.get(f"{fleet.admin}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("baton_requests_total{"))


async def all_given_back(fleet: Fleet) -> None:
    async with fleet.client.get(f"{fleet.admin}/metrics") as response:
        lines = (await response.text()).splitlines()
    open_now = [line for line in lines if line.startswith(("baton_open_requests ", "baton_instance_inflight{"))]
    assert len(open_now) == 3
    assert all(line.endswith(" 0.0") for line in open_now), open_now
    async with fleet.client.get(f"{fleet.admin}/explain") as response:
        assert all(each["state"] != "open" for each in (await response.json())["requests"])
