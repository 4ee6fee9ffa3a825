"""One trace leads from the load generator through the router to its legs, another from a controller to an agent."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.mock import mock_settings
from support.mocked_router import mocked_router
from support.scaling import InMemory

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat, MemberState
from cluster.registry.memory import MemoryRegistry
from cluster.telemetry import Tracing, trace_headers
from engine.agent.http import Gate, agent_app, listen
from goodput.actions import Drain
from goodput.actuate.agents import Agents
from goodput.actuate.lease import LeaderClaim
from goodput.actuate.scaler import Scaler
from loadgen.arrival import Arrival
from loadgen.body import Asking
from loadgen.http import LoadConnections
from loadgen.replay import Replay, Sending

BODY = {"model": "fake", "prompt": "A small robot found a lantern. " * 20, "max_tokens": 12, "temperature": 0,
        "stream": True}  # fmt: skip


@pytest.fixture
def spans() -> InMemorySpanExporter:
    """The memory that spans go to."""
    return InMemorySpanExporter()


@pytest.fixture(autouse=True)
def traced(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> Tracing:
    """Make routers, load generators and scalers that start from now on trace into memory."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    for module in ("router.api.server", "loadgen.replay", "goodput.actuate.scaler"):
        monkeypatch.setattr(f"{module}.tracing", lambda _: Tracing(provider))
    return Tracing(provider)


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {each.name: each for each in spans.get_finished_spans()}


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    context = parent.get_span_context()
    assert context is not None
    return span.parent is not None and (span.parent.trace_id, span.parent.span_id) == (
        context.trace_id,
        context.span_id,
    )


async def test_a_request_of_the_load_generator_is_one_trace_down_to_its_legs(spans: InMemorySpanExporter) -> None:
    mocks = [mock_settings("p", Role.PREFILL), mock_settings("d", Role.DECODE)]
    async with mocked_router(mocks) as front:
        arrival = Arrival(at_s=0.0, input_tokens=50, output_tokens=3)
        load = await Replay(LoadConnections(front.endpoint), Sending(asking=Asking("fake"))).run([arrival])
        (record,) = load.records
        assert record.error is None
        async with asyncio.timeout(5):
            while "text_completion fake" not in by_name(spans):
                await asyncio.sleep(0)
    found = by_name(spans)
    ours = found["baton.load.request"]
    assert is_child(found["text_completion fake"], ours)
    assert is_child(found["decode"], found["text_completion fake"])
    attributes = ours.attributes or {}
    assert attributes["http.response.status_code"] == 200
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.time_to_first_chunk"] == record.ttft_s


@pytest.mark.parametrize(
    ("leg", "at", "prefills", "decodes"),
    [
        ("decode", "d0", {None}, {"lost", None}),
        ("prefill", "p0", {"lost", None}, {"closed", None}),
    ],
)
async def test_the_span_of_an_early_leg_that_came_to_nothing_says_so(
    spans: InMemorySpanExporter, leg: str, at: str, prefills: set[str | None], decodes: set[str | None]
) -> None:
    """It does not end as the leg that follows it."""
    other = "d1" if leg == "decode" else "p1"
    mocks = [mock_settings(name, Role.PREFILL if name[0] == "p" else Role.DECODE) for name in ("p0", "d0", other)]
    async with mocked_router(mocks, pins=True, early=True) as router:
        for name in (at, other):
            url = f"{router.mocks.instances[name].url}/mock/faults"
            async with router.client.post(url, json={"fault": "refuse", "leg": leg, "times": 1}) as response:
                assert response.status == 200
        for _ in range(2):
            status, _, _ = await router.ask(BODY)
            assert status == 200
        async with asyncio.timeout(5):
            while sum(each.name == "text_completion fake" for each in spans.get_finished_spans()) < 2:
                await asyncio.sleep(0)
    errors = {
        name: [(each.attributes or {}).get("error.type") for each in spans.get_finished_spans() if each.name == name]
        for name in ("prefill", "decode")
    }
    assert set(errors["prefill"]) == prefills and set(errors["decode"]) == decodes


async def test_a_request_that_fails_is_an_error_in_the_load_generators_trace(spans: InMemorySpanExporter) -> None:
    pool = LoadConnections("http://127.0.0.1:1")
    load = await Replay(pool, Sending(asking=Asking("fake"))).run([Arrival(at_s=0.0, input_tokens=5, output_tokens=3)])
    assert [each.error for each in load.records] == ["connect"]
    (span,) = spans.get_finished_spans()
    assert (span.attributes or {})["error.type"] == "connect"


class Told:
    """An agent that accepts drains and refuses roles."""

    def state(self) -> dict[str, object]:
        return {}

    def is_ready(self) -> bool:
        return True

    def metrics(self) -> str:
        return ""

    def ask_drain(self, deadline_s: float) -> None:
        pass

    def ask_resume(self) -> None:
        pass

    def ask_role(self, role: Role) -> str | None:
        return "Its role is fixed."


async def test_a_controllers_action_and_the_agents_answer_are_one_trace(
    spans: InMemorySpanExporter, traced: Tracing
) -> None:
    registry = MemoryRegistry(time.monotonic)
    runner, url = await listen(agent_app(Told(), Told(), Gate("decode-0"), traced), "127.0.0.1", 0)
    beat = Heartbeat(
        id=InstanceId("decode-0"),
        agent="a",
        seq=1,
        role=Role.DECODE,
        url="http://h:2",
        state=MemberState.READY,
        agent_url=url,
    )
    agents = Agents(None)

    class Reaches(InMemory):
        """An actuator whose drain asks the agent for another role."""

        async def drain(self, action: Drain) -> str:
            return await agents.flip(beat, Role.BOTH)

    lease = LeaderClaim(registry, "http://h:9")
    await lease.turn()
    scaler = Scaler(registry, lease, Reaches(), ())
    refusal = (await scaler._act(Drain(instance=InstanceId("decode-0"), because="too many"))).refusal
    async with aiohttp.ClientSession() as client, client.get(f"{url}/state") as answer:
        assert answer.status == 200, "a request that changes nothing has no span"
    await agents.close()
    await runner.cleanup()
    assert "fixed" in refusal
    assert not trace_headers(), "outside of an action there is no trace"
    found = by_name(spans)
    assert set(found) == {"baton.scaling.drain", "baton.agent.role"}
    assert is_child(found["baton.agent.role"], found["baton.scaling.drain"])
    assert (found["baton.agent.role"].attributes or {})["error.type"] == "409"
    attributes = found["baton.scaling.drain"].attributes or {}
    assert (attributes["baton.because"], attributes["error.type"]) == ("too many", "refused")
