"""An instance pulls a prompt's cached prefix from a peer, the source, through a router on mocks; failures of that."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from support.fleet import eventually
from support.mock import mock_settings
from support.served import served

from cluster import wire
from cluster.ids import InstanceId, RequestId, TransferId
from cluster.instance import Instance, Role
from cluster.registry.membership import Heartbeat, MemberState
from cluster.registry.memory import MemoryRegistry
from costs.step import StepCost
from engine.mock.fleet import MockFleet
from engine.mock.settings import SimpleCosts
from router.api.config import RouterConfig
from router.core.events import Chosen, PrefixSource
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.step_model import Make
from router.request.outgoing import Outgoing
from router.scheduler.scoring import policies
from router.scheduler.scoring.figures import SOURCE_S_MAX, SOURCE_S_MIN

pytestmark = pytest.mark.timed

SENTENCE = "In the {}th year the old harbour master wrote down which ships had come and which of them had gone. "
TOKEN_MS = 0.2
"""Prefill time for each prompt token, in ms, of the mocks and in the step model: 800 tokens take 0.16 s."""


MARGIN_S = 1.0
"""For messages, a decode leg of 20 tokens and a busy machine."""

COSTS = SimpleCosts(step_ms=1.0, prefill_ms_per_1k=1000 * TOKEN_MS)


def make(instance: Instance) -> Make:
    """Decode instances prefill ten times as slowly, so a handover is cheaper than a prefill there."""
    token_ms = TOKEN_MS * (10 if instance.role is Role.DECODE else 1)
    cost = StepCost(
        floor_ms=1.0, start_ms=1.0, token_ms=token_ms, area_ms=0.0, decode_ms=1.0, context_ms=0.0, request_ms=0.0
    )
    return Make(prefill=cost, decode=cost)


def said_in(told: Any) -> tuple[str, int]:
    """An answer in one piece: its text, and the tokens of its prompt."""
    return str(told["choices"][0]["message"]["content"]), told["usage"]["prompt_tokens"]


def whole_of(stream: str) -> tuple[str, int]:
    """The same of a stream with usage, which ends well."""
    *events, end = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert end == "[DONE]"
    told = [json.loads(each) for each in events]
    texts = [each["choices"][0]["delta"].get("content") or "" for each in told if each["choices"]]
    return "".join(texts), told[-1]["usage"]["prompt_tokens"]


@dataclass
class Peers:
    """A router, its mocks, and what their agents announce."""

    endpoint: str
    admin: str
    mocks: MockFleet
    registry: MemoryRegistry
    client: aiohttp.ClientSession
    seq: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    took_s = cold_s = 0.0
    """Of the last turn: the time until its answer, and the time of its prompt without any cache, in seconds."""

    async def beat(self, name: str, **more: Any) -> None:
        self.seq += 1
        mock = self.mocks.instances[name]
        told = {"state": MemberState.READY, "peers": True, "pins": True, "credits": 8, **more}
        beat = Heartbeat(
            id=InstanceId(name), agent=f"agent-{name}", seq=self.seq, role=mock.settings.role, url=mock.url,
            models=({"id": "fake", "max_model_len": 8192},), **told,
        )  # fmt: skip
        await self.registry.beat(beat)

    async def states(self, **states: str) -> None:
        """Wait until the router sees these states."""
        async with asyncio.timeout(5):
            while {each["id"]: each["state"] for each in (await self.told("/ready"))["instances"]} != states:
                await asyncio.sleep(0.01)

    async def told(self, path: str) -> Any:
        async with self.client.get(self.admin + path) as answer:
            return await answer.json()

    async def counted(self, outcome: str) -> float:
        async with self.client.get(f"{self.admin}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(
            f'baton_prefix_sources_total{{outcome="{outcome}"}}'))  # fmt: skip

    async def sources(self) -> dict[str, float]:
        """The number of source legs, by outcome."""
        async with self.client.get(f"{self.admin}/metrics") as answer:
            found = re.findall(
                r'^baton_prefix_sources_total{outcome="(\w+)"} (\S+)$', await answer.text(), re.MULTILINE
            )
        return {outcome: float(count) for outcome, count in found}

    async def inflight(self) -> float:
        """The number of legs in flight, by the router's metrics."""
        async with self.client.get(f"{self.admin}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("baton_instance_inflight{"))

    async def turn(self, name: str, **more: Any) -> tuple[str, Any]:
        """Send the conversation's next turn. Returns the answer, and the scheduler's first choice."""
        number = len(self.messages)
        lines = "".join(SENTENCE.format(100 * number + line) for line in range(30 if not number else 3))
        self.messages.append({"role": "user", "content": lines})
        body = {"model": "fake", "messages": self.messages, "max_tokens": 20, "temperature": 0, **more}
        began = asyncio.get_running_loop().time()
        async with self.client.post(
            f"{self.endpoint}/v1/chat/completions", json=body, headers={"X-Request-Id": name}
        ) as answer:
            assert answer.status == 200, await answer.text()
            text, tokens = whole_of(await answer.text()) if more.get("stream") else said_in(await answer.json())
        self.took_s = asyncio.get_running_loop().time() - began
        self.cold_s = tokens * TOKEN_MS / 1000
        assert text == await self.alone(body["max_tokens"]), "as one engine says it"
        self.messages.append({"role": "assistant", "content": text})
        turns = (await self.told(f"/explain/{name}"))["turns"]
        return text, next(each for each in turns if each["turn"] == "choice")

    async def begun(self) -> str:
        """Send a first turn, then drain its prefill instance. Returns the other one, which has nothing in its cache."""
        _, first = await self.turn("one")
        assert first["decode"] == "d0"
        gone = str(first["prefill"])
        other = {"p0": "p1", "p1": "p0"}[gone]
        await self.beat(gone, state=MemberState.DRAINING)
        await self.states(**{gone: "draining", other: "up", "d0": "up"})
        return other

    async def fail(self, name: str, fault: str, leg: str = "prefill") -> None:
        """Let the next leg of this kind at this instance fail by this fault."""
        url = f"{self.mocks.instances[name].url}/mock/faults"
        async with self.client.post(url, json={"fault": fault, "leg": leg, "times": 1}) as answer:
            assert answer.status == 200, await answer.text()

    async def mend(self, name: str) -> None:
        """Remove the faults of this instance."""
        async with self.client.delete(f"{self.mocks.instances[name].url}/mock/faults") as answer:
            assert answer.status == 200, await answer.text()

    async def nothing_runs(self) -> None:
        """Wait until the router has no leg, and no instance a hold."""
        async with asyncio.timeout(5):
            while await self.inflight():
                await asyncio.sleep(0.01)
        await self.nothing_is_held()

    async def alone(self, max_tokens: int) -> str:
        """The answer of an engine without a prefix cache."""
        body = {"model": "fake", "messages": self.messages, "max_tokens": max_tokens, "temperature": 0}
        async with self.client.post(f"{self.mocks.instances['alone'].url}/v1/chat/completions", json=body) as answer:
            return str((await answer.json())["choices"][0]["message"]["content"])

    def struck(self, name: str) -> int:
        """How often the faults of this instance have struck."""
        return sum(each.struck for each in self.mocks.instances[name].faults.active)

    def pulled(self, name: str) -> int:
        return self.mocks.instances[name].load().external_kv_tokens

    async def nothing_is_held(self) -> None:
        await eventually(
            lambda: all(each.load().kv_usage == 0 for each in self.mocks.instances.values()), "nothing is held"
        )


@asynccontextmanager
async def peers(*names: str, uncached: str = "", **router: Any) -> AsyncIterator[Peers]:
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    mocks = [mock_settings(name, roles[name[0]], costs=COSTS, prefix_caching=name != uncached) for name in names]
    mocks.append(mock_settings("alone", Role.BOTH, prefix_caching=False))
    config = RouterConfig(
        port=0, admin_port=0, drain_s=1.0, has_registry=True, **{"policy": "workload", "makes": make, **router}
    )
    registry = MemoryRegistry(clock=time.monotonic)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(MockFleet(mocks))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        endpoint, admin = await stack.enter_async_context(served(config, registry))
        found = Peers(endpoint, admin, fleet, registry, client)
        for name in names:
            await found.beat(name)
        await found.states(**dict.fromkeys(names, "up"))
        yield found


async def test_the_next_turns_p_pulls_the_prefix_that_d_has() -> None:
    """The first turn's prefill instance drains, so another one pulls the prefix from the decode instance."""
    async with peers("p0", "p1", "d0") as fleet:
        other = await fleet.begun()
        assert await fleet.counted("held") == 0
        before = fleet.pulled(other)
        _, second = await fleet.turn("two")
        assert (second["prefill"], second["decode"]) == (other, "d0")
        assert "more from d0" in second["because"]
        assert await fleet.counted("held") == 1
        assert fleet.pulled(other) - before > 700, "tokens"
        await fleet.nothing_is_held()


@pytest.mark.parametrize("fault", ["refuse", "break", "hang"])
async def test_a_source_that_does_not_answer_costs_its_wait(fault: str) -> None:
    async with peers("p0", "p1", "d0") as fleet:
        other = await fleet.begun()
        await fleet.fail("d0", fault)
        _, second = await fleet.turn("two")
        assert "more from d0" in second["because"] and second["prefill"] == other
        outcome = {"refuse": "refused", "break": "lost", "hang": "late"}[fault]
        assert await fleet.counted(outcome) == 1
        expected_s = fleet.cold_s + (max(SOURCE_S_MIN, fleet.cold_s) if fault == "hang" else 0.0)
        assert 0.8 * expected_s < fleet.took_s < expected_s + MARGIN_S < SOURCE_S_MAX
        parts = (await fleet.told("/explain/two"))["timing"]["answer_ms"]
        waited = 1e3 * max(SOURCE_S_MIN, fleet.cold_s)
        assert 0.8 * waited < parts["source"] < waited + 1e3 * MARGIN_S if fault == "hang" else parts["source"] > 0
        assert parts["residual"] < 0.5 * waited
        await fleet.nothing_is_held()


@pytest.mark.parametrize("others", [0, 1], ids=["the same P", "another P"])
async def test_a_source_that_stands_still_during_the_pull_costs_the_cold_time_and_its_wait(others: int) -> None:
    """Then a P computes the prompt without a source. The holds of the source and of the first leg are given up."""
    async with peers("p0", "p1", "d0") as fleet:
        if others:
            await fleet.turn("one")
            for name in ("p0", "p1"):  # both without what they had
                await fleet.beat(name, epoch=2)
        else:
            await fleet.begun()
        for name in ("p0", "p1"):
            await fleet.fail(name, "hang_pull", leg="decode")
        async with asyncio.timeout(60):  # by the loop's clock; half of the deadline is 150 s
            _, chosen = await fleet.turn("two")
        assert "more from d0" in chosen["because"] and await fleet.counted("held") == 1
        last = [each for each in (await fleet.told("/explain/two"))["turns"] if each["turn"] == "choice"][-1]
        first = next(name for name in ("p0", "p1") if fleet.struck(name))
        assert (last["prefill"] == first) == (not others) and "more from" not in last["because"]
        turn_s = fleet.cold_s + max(SOURCE_S_MIN, fleet.cold_s)
        assert 0.8 * turn_s < fleet.took_s < turn_s + fleet.cold_s + MARGIN_S
        source, puller = fleet.mocks.instances["d0"], fleet.mocks.instances[first]
        await eventually(lambda: source.load().kv_usage == 0, "the source's hold is given up while the pull hangs")
        assert puller.load().kv_usage > 0, "a read under way may still write"
        await fleet.mend(first)
        await fleet.nothing_runs()


async def test_a_puller_that_is_lost_does_not_keep_its_sources_hold() -> None:
    """The leg may go on where nobody sees it, for as long as its end is waited for (30 s): the source is well."""
    async with peers("p0", "p1", "d0") as fleet:
        other = await fleet.begun()
        await fleet.fail(other, "hang_pull", leg="decode")
        turn = asyncio.create_task(fleet.turn("two"))
        await eventually(lambda: fleet.struck(other) == 1, "the prefill leg pulls")
        source = fleet.mocks.instances["d0"]
        assert source.load().kv_usage > 0
        await fleet.beat(other, epoch=2)  # its engine is another one now
        await turn
        await eventually(lambda: source.load().kv_usage == 0, "the source's hold is given up")
        await fleet.mend(other)
        await fleet.nothing_runs()


async def test_a_source_without_the_prefix_gives_nothing() -> None:
    async with peers("p0", "p1", "d0", uncached="d0") as fleet:
        other = await fleet.begun()
        before = fleet.pulled(other)
        await fleet.turn("two")
        assert await fleet.counted("nothing") == 1 and fleet.pulled(other) == before
        await fleet.nothing_is_held()


@pytest.mark.parametrize("more", [{"peers": False}, {"weights": "others"}, {"shuns": ("p0", "p1", "d0")}])
async def test_no_source_that_the_puller_could_not_use(more: dict[str, Any]) -> None:
    async with peers("p0", "p1", "d0") as fleet:
        await fleet.beat("p0", state=MemberState.DRAINING)
        await fleet.states(p0="draining", p1="up", d0="up")
        _, first = await fleet.turn("one")
        assert first["prefill"] == "p1"
        told = {"weights": "some", **more} if "weights" in more else more
        for name in ("p1", "d0"):
            await fleet.beat(name, **({"weights": "some"} if name == "d0" and "weights" in more else {}))
        await fleet.beat("p1", state=MemberState.DRAINING)
        await fleet.beat("p0", **told)
        await fleet.states(p0="up", p1="draining", d0="up")
        _, second = await fleet.turn("two")
        assert "more from" not in second["because"]


async def test_an_aggregated_request_pulls_its_prefix_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test makes the choices; the router has to carry them out."""
    choices = [Chosen(None, InstanceId("b0"), "first")]
    choices.append(Chosen(None, InstanceId("b1"), "then", source=PrefixSource(InstanceId("b0"), 800, 1.0)))

    def choose(_fleet: FleetSnapshot, _wanted: Wanted) -> Chosen:
        return choices.pop(0)

    monkeypatch.setitem(policies.POLICIES, "least_load", choose)
    async with peers("b0", "b1", policy="least_load") as fleet:
        await fleet.turn("one", stream=False)
        await fleet.turn("two", stream=False)
        assert fleet.pulled("b1") > 700 and await fleet.counted("held") == 1
        await fleet.nothing_is_held()


STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("others", "more"),
    [(0, STREAMED), (1, STREAMED), (0, {"max_tokens": 1})],
    ids=["the same instance", "another one", "in one piece"],
)
async def test_a_source_that_stands_still_costs_an_aggregated_request_the_cold_time_and_its_wait(
    others: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then an instance serves it without a source, never the source itself. The hold of the source is given up."""
    cold_s, wait_s, asked = 0.2, 0.5, list[frozenset[InstanceId]]()
    source = PrefixSource(InstanceId("b0"), 800, wait_s, cold_s=cold_s)

    def choose(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
        asked.append(wanted.excluded)
        named = ("b0",) if len(asked) == 1 else ("b1", "b2", "b0")
        left = [each for each in map(InstanceId, named) if each in fleet.by_id and each not in wanted.excluded]
        return Chosen(None, left[0], "", source=source) if left else Chosen(None, None, "full")

    monkeypatch.setitem(policies.POLICIES, "least_load", choose)
    async with peers("b0", "b1", *["b2"][:others], policy="least_load") as fleet:
        await fleet.turn("one", **STREAMED)
        await fleet.fail("b1", "hang_pull", leg="decode")
        async with asyncio.timeout(60):  # by the loop's clock; the deadline is 300 s
            await fleet.turn("two", **more)
        assert fleet.struck("b1") == 1 and await fleet.counted("held") == 1
        last = [each for each in (await fleet.told("/explain/two"))["turns"] if each["turn"] == "choice"][-1]
        assert last["decode"] == ("b2" if others else "b1"), last
        assert not asked[0] and all("b0" in each for each in asked[2:])
        assert cold_s + wait_s < fleet.took_s < cold_s + wait_s + fleet.cold_s + MARGIN_S
        held, puller = fleet.mocks.instances["b0"], fleet.mocks.instances["b1"]
        await eventually(lambda: held.load().kv_usage == 0, "the source's hold is given up while the pull hangs")
        assert puller.load().kv_usage > 0, "a read under way may still write"
        await fleet.mend("b1")
        await fleet.nothing_runs()


@pytest.mark.parametrize("more", [STREAMED, {}], ids=["stream", "in one piece"])
async def test_a_hold_whose_instance_is_lost_costs_the_time_of_its_prompt_twice(more: dict[str, Any]) -> None:
    """The read from there hangs, as when a host loses its power: other instances serve the request."""
    async with peers("p0", "p1", "d0") as fleet:
        await fleet.fail("d0", "hang_pull", leg="decode")
        turn = asyncio.create_task(fleet.turn("one", **more))
        await eventually(lambda: fleet.struck("d0") == 1, "D pulls")
        lost = next(name for name in ("p0", "p1") if fleet.mocks.instances[name].load().kv_usage > 0)
        began = asyncio.get_running_loop().time()
        await fleet.beat(lost, epoch=2)  # its engine is another one now
        async with asyncio.timeout(60):  # by the loop's clock; half of the stall timeout is 60 s, a whole answer 1,800
            await turn
        took_s = asyncio.get_running_loop().time() - began
        choices = [each for each in (await fleet.told("/explain/one"))["turns"] if each["turn"] == "choice"]
        assert len(choices) == 2 and choices[0]["prefill"] == lost
        assert lost not in {choices[1]["prefill"], choices[1]["decode"]}, choices
        assert 2 * fleet.cold_s * 0.8 < took_s < 3 * fleet.cold_s + MARGIN_S
        await fleet.mend("d0")
        await fleet.nothing_runs()


@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "leaves"])
async def test_an_aggregated_request_that_finds_no_other_place_waits_for_its_pull(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, asked = PrefixSource(InstanceId("b0"), 800, 0.5, cold_s=0.05), list[frozenset[InstanceId]]()

    def choose(_: FleetSnapshot, wanted: Wanted) -> Chosen:
        asked.append(wanted.excluded)
        if wanted.excluded:
            return Chosen(None, None, "full", wait=True)
        return (
            Chosen(None, InstanceId("b0"), "") if len(asked) == 1 else Chosen(None, InstanceId("b1"), "", source=source)
        )

    monkeypatch.setitem(policies.POLICIES, "least_load", choose)
    async with peers("b0", "b1", policy="least_load") as fleet:
        await fleet.turn("one", **STREAMED)
        await fleet.fail("b1", "hang_pull", leg="decode")
        turn = asyncio.create_task(fleet.turn("two", **STREAMED))
        await eventually(lambda: len(asked) >= 6, "asked again and again")
        assert await fleet.inflight() == 1
        if leaves:
            turn.cancel()
        held = fleet.mocks.instances["b0"]
        await eventually(lambda: (held.load().kv_usage == 0) == leaves, "the hold is given up only if it is not wanted")
        await fleet.mend("b1")  # the pull fails: its instance computes the prompt
        if not leaves:
            await turn
        await fleet.nothing_runs()


TEXT = "".join(SENTENCE.format(line) for line in range(30))
OTHER_TEXT = "".join(SENTENCE.format(line) for line in range(60, 90))


@pytest.mark.parametrize(
    ("more", "sources"),
    [
        ({}, {"held": 1}),
        ({"prompt": [TEXT, OTHER_TEXT]}, {}),
        ({"truncate_prompt_tokens": 300}, {}),
        ({"n": 2}, {}),
    ],
    ids=["one prompt", "batch", "truncated", "n"],
)
async def test_where_legs_may_read_other_prompts_there_is_no_source(
    more: dict[str, Any], sources: dict[str, float]
) -> None:
    """All prompts of a batch would pull the first one's prefix. The hold for a truncated prompt is of other tokens."""
    async with peers("p0", "p1", "d0") as fleet:

        async def ask(**body: Any) -> int:
            """Returns the number of answers."""
            asked = {"model": "fake", "prompt": TEXT, "max_tokens": 20, "temperature": 0, **body}
            async with fleet.client.post(f"{fleet.endpoint}/v1/completions", json=asked) as answer:
                told = await answer.json()
                assert answer.status == 200, told
            return len(told["choices"])

        await ask()
        for name in ("p0", "p1"):  # both without what they had
            await fleet.beat(name, epoch=2)
        assert await ask(**more) == (2 if more.keys() & {"prompt", "n"} else 1)
        assert await fleet.sources() == sources
        await fleet.nothing_is_held()


@pytest.mark.parametrize("deaf", [False, True], ids=["by its name", "through another instance"])
async def test_a_hold_of_a_source_ends_where_its_puller_refuses(deaf: bool) -> None:
    async with peers("p0", "p1", "d0") as fleet:
        other = await fleet.begun()
        await fleet.fail(other, "refuse")
        if deaf:
            await fleet.fail("d0", "refuse", leg="release")
        await fleet.turn("two")
        assert await fleet.counted("held") == 1
        await fleet.nothing_is_held()


@pytest.mark.parametrize("tokens", [1, 20], ids=["aggregated", "handed over"])
@pytest.mark.parametrize("inside", ["", "vllm_xargs"])
async def test_clients_name_no_source(monkeypatch: pytest.MonkeyPatch, inside: str, tokens: int) -> None:
    """Transfer fields in a client's body never reach an engine."""
    fields = wire.source_fields({}, transfer=TransferId(RequestId("mine"), 1, 1))["kv_transfer_params"]
    assert fields[wire.CACHED_ONLY] is True
    named = {"kv_transfer_params": fields}
    body = {"model": "fake", "prompt": TEXT, "max_tokens": tokens, **({inside: named} if inside else named)}
    async with peers("p0", "d0") as fleet:
        legs: list[bytes] = []
        for name in ("p0", "d0"):
            front = fleet.mocks.instances[name].frontend
            monkeypatch.setattr(front, "generate", noted(front.generate, legs))
        async with fleet.client.post(f"{fleet.endpoint}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
        assert len(legs) == (1 if tokens == 1 else 2)
        assert not any(wire.CACHED_ONLY.encode() in leg or b'"mine' in leg for leg in legs)
        await fleet.nothing_is_held()


def noted(generate: Callable[..., None], legs: list[bytes]) -> Callable[..., None]:
    """`generate` of a mock's front end, with the bodies of its requests kept in `legs`."""

    def noting(request: Any, *given: Any, **named: Any) -> None:
        legs.append(bytes(request.body))
        generate(request, *given, **named)

    return noting


def patient(instance: Instance) -> Make:
    """A step model with ten times the prefill time, so that the router waits ten times as long for a source."""
    usual = make(instance)
    return replace(usual, prefill=replace(usual.prefill, token_ms=10 * usual.prefill.token_ms))


async def _waits_for_its_source(fleet: Peers) -> asyncio.Task[Any]:
    """Start a second turn whose source hangs. Returns once the router waits for the source."""
    await fleet.begun()
    await fleet.fail("d0", "hang")
    turn = asyncio.create_task(fleet.turn("two"))
    async with asyncio.timeout(5):
        while await fleet.inflight() < 3:  # the source's place, the prefill leg's, and the answer's
            await asyncio.sleep(0.01)
    return turn


async def test_a_client_that_leaves_while_a_source_is_waited_for() -> None:
    async with peers("p0", "p1", "d0", makes=patient) as fleet:
        turn = await _waits_for_its_source(fleet)
        turn.cancel()
        async with asyncio.timeout(5):
            while not await fleet.counted("unwanted"):
                await asyncio.sleep(0.01)
        await fleet.nothing_runs()
        assert await fleet.counted("unwanted") == 1


@pytest.mark.parametrize("deaf", [False, True], ids=["takes its name", "takes no names"])
async def test_a_source_that_answers_after_its_client_has_left_starts_no_prefill(
    deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hold is given up all the same, through another instance if the source takes no names."""
    async with peers("p0", "p1", "d0", makes=patient) as fleet:
        other = await fleet.begun()
        if deaf:
            await fleet.fail("d0", "refuse", leg="release")
        loop = asyncio.get_running_loop()
        source, puller = (fleet.mocks.instances[name].frontend for name in ("d0", other))
        answers: list[asyncio.TimerHandle] = []
        sent: list[Any] = []
        answer, prefill = source.generate, puller.generate

        def later(*given: Any, **named: Any) -> None:
            answers.append(loop.call_later(0.3, lambda: answer(*given, **named)))

        def noted(request: Any, *given: Any, **named: Any) -> None:
            if request.path == "/v1/chat/completions":  # not the leg that is to be rejected
                sent.append(request)
            prefill(request, *given, **named)

        monkeypatch.setattr(source, "generate", later)
        monkeypatch.setattr(puller, "generate", noted)
        turn = asyncio.create_task(fleet.turn("two"))
        await eventually(lambda: bool(answers), "the source is asked")
        turn.cancel()
        await eventually(lambda: all(each.when() < loop.time() for each in answers), "it answers")
        await fleet.nothing_runs()
        assert not sent, "no client waits for this prompt"
        assert await fleet.counted("unwanted") == 1


async def test_an_instance_that_is_lost_while_its_source_is_waited_for() -> None:
    """The prefill leg was not sent yet, so another instance computes the prompt, as soon as one is there."""
    async with peers("p0", "p1", "d0", makes=patient) as fleet:
        turn = await _waits_for_its_source(fleet)
        for name in ("p0", "p1"):
            await fleet.beat(name, epoch=2)
        _, second = await turn
        assert second["decode"] == "d0"
        await fleet.nothing_runs()


@pytest.mark.interpreted
@pytest.mark.parametrize("fault", ["", "break", "hang"])
async def test_a_bug_at_the_end_of_a_source_leg_ends_that_request_alone(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the source leg ends, the request's places are free at once, and the client gets a 500."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    async with peers("p0", "p1", "d0") as fleet:
        other = await fleet.begun()
        if fault:
            await fleet.fail("d0", fault)
        with monkeypatch.context() as patch:
            patch.setattr(Outgoing, "prefill_body", broken)  # called once the source is over
            body = {"model": "fake", "messages": fleet.messages, "max_tokens": 20}
            async with (
                asyncio.timeout(5),
                fleet.client.post(f"{fleet.endpoint}/v1/chat/completions", json=body) as answer,
            ):
                assert answer.status == 500, await answer.text()
        assert await fleet.counted({"": "held", "break": "lost", "hang": "late"}[fault]) == 1
        await fleet.nothing_runs()
        _, next_one = await fleet.turn("two")
        assert next_one["prefill"] == other
