"""Faults at each stage of a hand-over, under load: no wrong token, no client that waits for ever, no hold that stays.

The rows are `support.chaos_scenarios`. A seed chooses the load, the victim, the moment and how the router knows its
fleet. The answer of every client is checked.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.chaos_fleet import ChaosFleet
from support.chaos_load import Kind, wordy
from support.chaos_router import announced, as_process, in_process
from support.chaos_run import CLIENTS, Outcome, Router, Run
from support.chaos_scenarios import (
    BY_NAME,
    EARLY_LEGS,
    LIMITS,
    RANKED,
    SCENARIOS,
    UNSEEN,
    WITH_SOURCES,
    Hurts,
    Scenario,
)
from support.chaos_sources import aggregated_with_sources, patient_sources, with_sources
from support.redis_server import RedisServer

from cluster import wire
from cluster.registry.redis import RedisRegistry
from engine.mock.instance import MockInstance as Mock
from router.core import journey
from router.fleet import probes
from router.http import upstream
from router.scheduler.scoring.policies import POLICIES

SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5, 6, 7, 8)
TRIES = 3
STARVED_S = 0.2

ON_MOCKS = [each for each in (*SCENARIOS, *RANKED, *EARLY_LEGS) if each.drive in {"", "partition"}]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the router's timers: it notices a partition within a request's deadline, and gives up lost legs and holds
    within the test.
    """
    monkeypatch.setattr(journey, "CANCEL_WAIT_S", 0.5)
    monkeypatch.setattr(journey, "PATIENCE_S", 0.5)
    monkeypatch.setattr(journey, "HOLD_USE_S", 0.6 * LIMITS.lease_s)
    monkeypatch.setattr(probes, "INTERVAL_S", 0.2)
    monkeypatch.setattr(probes, "PROBE_S", 0.5)
    monkeypatch.setattr(upstream, "WORD_S", 0.5)


def holds_true(outcome: Outcome) -> None:
    """Check what the suite promises, for one run."""
    scenario, kinds = outcome.scenario, outcome.kinds
    never = [Kind.WRONG, Kind.HUNG] + ([Kind.ERROR] if scenario.hurts is Hurts.NOBODY else [])
    assert not any(kinds[kind] for kind in never), f"seed {outcome.seed}\n{wordy(outcome.verdicts, never)}"
    assert scenario.leave or not kinds[Kind.LEFT]
    if scenario.drive != "router":
        assert kinds[Kind.RIGHT] >= len(outcome.verdicts) // 4, f"hardly any client was served: {kinds}"
    assert outcome.free, f"seed {outcome.seed}: held without a reader, or still running: {outcome.leaked}"
    if not scenario.lease:
        assert not outcome.leaked


async def fairly(once: Callable[[], Awaitable[list[Outcome]]]) -> list[Outcome]:
    """The outcomes of runs that got enough processor time. Runs that did not say nothing about time limits: they are
    repeated, whatever their outcome.
    """
    for _ in range(TRIES):
        outcomes = await once()
        if max(each.starved_s for each in outcomes) < STARVED_S:
            return outcomes
    pytest.skip(f"chaos: no processor time for {STARVED_S} s, {TRIES} times; run it on a machine with a free core")


async def runs(scenario: Scenario, seeds: Iterable[int], router: Router = in_process) -> list[Outcome]:
    """All seeds at once, each with a fleet and a router of its own: most of a run is waiting."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(Run(scenario=scenario, router=router, seed=seed).outcome()) for seed in seeds]
    return [task.result() for task in tasks]


LONG = {
    *("kill D mid-stream, P has two ranks", "kill P during leg 1, D has two ranks", "slow P while an early leg waits"),
    "kill P during leg 1, P has two ranks",
}
"""Rows that others stand for are run by `make test-long`; and the last one, which fails once in some forty runs: P dies
after an answer that has told no engine, and D waits for P's word (docs/handoff.md, "A gap")."""
SCENARIO = pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, id=each.name, marks=[pytest.mark.long] * (each.name in LONG)) for each in ON_MOCKS],
)


@SCENARIO
async def test_nothing_is_wrong_late_or_left_behind(scenario: Scenario) -> None:
    outcomes = await fairly(lambda: runs(scenario, SEEDS))
    assert any(each.strikes for each in outcomes) or not scenario.fault, "the fault never struck"
    for outcome in outcomes:
        holds_true(outcome)


def _of_sources() -> list[Any]:
    """Rows in which a fault strikes a source as it strikes a prefill leg, and no more, are run by `make test-long`; and
    of pulls that stand still, the row with prefill legs, as tests/contract/test_peers.py has them.
    """
    long = {"kill D between the legs", "kill D during the pull", "break P before its work", "error P", "refuse P",
            "stale blocks, digests", "P shuts its port during leg 1", "partition of P from the router",
            "prefill legs' pulls stand still", "kill a rank of D during the pull", "kill a rank of P during leg 1",
            "kill P during leg 1, D has two ranks"}  # fmt: skip
    assert long <= {each.name.removesuffix(", sources") for each in WITH_SOURCES}
    return [
        pytest.param(each, id=each.name, marks=[pytest.mark.long] * (each.name.removesuffix(", sources") in long))
        for each in WITH_SOURCES
    ]


@pytest.mark.interpreted
@pytest.mark.parametrize("scenario", _of_sources())
async def test_the_same_holds_with_prefixes_from_peers(monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    """Most prompts begin alike, and a source is asked for each. Some sources answer with a hold, in every scenario."""
    patient = patient_sources if scenario.stands_still else with_sources
    monkeypatch.setitem(POLICIES, "least_load", aggregated_with_sources if scenario.aggregated else patient)
    held: list[str] = []
    router = noting(held, 'baton_prefix_sources_total{outcome="held"')
    outcomes = await fairly(lambda: runs(scenario, SEEDS, router))
    if scenario.fault and not any(each.strikes for each in outcomes):  # few releases come where cores are busy
        outcomes += await fairly(lambda: runs(scenario, MORE_SEEDS, router))
    assert any(each.strikes for each in outcomes) or not scenario.fault, "the fault never struck"
    assert held, "no source had a beginning"
    for outcome in outcomes:
        holds_true(outcome)


@pytest.mark.parametrize("scenario", UNSEEN, ids=[each.name for each in UNSEEN])
async def test_wrong_blocks_without_digests_are_wrong_words(scenario: Scenario) -> None:
    """The rows with digests pass because of the digests: without them the same faults give wrong words, and the check
    of the clients' answers sees that.
    """
    for outcome in await fairly(lambda: runs(scenario, SEEDS)):
        assert outcome.kinds[Kind.WRONG] > 0
        assert not outcome.kinds[Kind.HUNG] and not outcome.kinds[Kind.ERROR] and outcome.free


@pytest.mark.long
@SCENARIO
async def test_the_same_holds_with_many_seeds(scenario: Scenario) -> None:
    """Each run keeps the suite's promise. Only the shorter test above checks that every fault strikes."""
    for first in range(100, 124, 4):
        seeds = range(first, first + 4)
        for outcome in await fairly(lambda seeds=seeds: runs(scenario, seeds)):
            holds_true(outcome)


def noting(lines: list[str], needle: str) -> Callable[[ChaosFleet, int], AbstractAsyncContextManager[str]]:
    """A router in this process. `lines` get those of its metrics at its end that have `needle` and are not 0."""

    @asynccontextmanager
    async def router(fleet: ChaosFleet, seed: int) -> AsyncIterator[str]:
        async with in_process(fleet, seed) as endpoint, aiohttp.ClientSession() as client:
            yield endpoint
            async with client.get(endpoint + "/metrics") as response:
                text = await response.text()
        lines.extend(line for line in text.splitlines() if needle in line and not line.endswith(" 0.0"))

    return router


async def test_a_stream_goes_on_elsewhere_word_for_word() -> None:
    """Streams that broke were resumed: the router counted them, and every client got the text of a faultless run."""
    resumed: list[str] = []
    run = Run(scenario=BY_NAME["break D mid-stream"], router=noting(resumed, 'kind="resumed"'), seed=1)
    assert (await run.outcome()).kinds == {Kind.RIGHT: CLIENTS}
    assert resumed


EARLY = (*("break D mid-stream", "kill P during leg 1", "kill D before D's first byte"), "kill a rank of D mid-stream")


@pytest.mark.parametrize("scenario", [each for each in (*SCENARIOS, *RANKED) if each.name in EARLY], ids=str)
async def test_early_legs_are_among_what_is_struck(scenario: Scenario) -> None:
    sent: list[str] = []
    for seed in SEEDS:
        run = Run(scenario=scenario, router=noting(sent, "baton_early_legs_total{"), seed=seed)
        holds_true(await run.outcome())
    assert sent


# -- what is not an engine's fault --


@pytest.mark.interpreted
@pytest.mark.parametrize("more", [{}, {"dp": 2, "sources": True}], ids=["", "ranks, sources"])
@pytest.mark.parametrize("engine_dies", [False, True], ids=["", "and a P starts anew meanwhile"])
async def test_redis_gone_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_dies: bool, more: dict[str, Any]
) -> None:
    """The stand-in for Redis is killed under load, and comes back empty. The router serves on with what it knows."""
    if more.get("sources"):
        monkeypatch.setitem(POLICIES, "least_load", with_sources)
    (outcome,) = await fairly(lambda: _without_redis(tmp_path, engine_dies=engine_dies, more=more))
    assert outcome.strikes == 1
    holds_true(outcome)


async def _without_redis(directory: Path, *, engine_dies: bool, more: dict[str, Any]) -> list[Outcome]:
    server = RedisServer(directory, standin=True)
    await asyncio.to_thread(server.start)
    back: list[asyncio.Future[None]] = []

    def strike(mock: Mock) -> None:
        server.kill()
        if engine_dies:
            mock.set_faults(b'{"fault": "die", "seconds": 0.2}')
        back.append(asyncio.ensure_future(asyncio.to_thread(server.start)))

    @asynccontextmanager
    async def router(fleet: ChaosFleet, seed: int) -> AsyncIterator[str]:
        agents, own = (RedisRegistry.open(server.url, password_file=server.command.password_file) for _ in range(2))
        async with announced(fleet, agents, own, seed) as endpoint:
            yield endpoint
        await agents.close()

    try:
        scenario = replace(BY_NAME["Redis gone and back"], **more)
        return [await Run(scenario=scenario, router=router, strike=strike).outcome()]
    finally:
        for each in back:
            await each
        server.kill()


@pytest.mark.interpreted
async def test_a_bug_in_the_router_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose handling fails inside the router is answered with an error, and keeps no place and no hold."""

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    for name in ("decode_body", "early_fields"):
        monkeypatch.setattr(wire, name, broken)
    scenario = Scenario(name="a bug of ours", fault={}, hurts=Hurts.SOME, lease="nobody is left who knows the hold")
    outcome = await Run(scenario=scenario, router=in_process).outcome()
    assert outcome.kinds == {Kind.ERROR: CLIENTS}
    assert outcome.free


async def test_router_killed() -> None:
    """SIGKILL, mid-stream. Every client without a whole answer sees an error. Engines drop requests that no client
    reads, and holds end.
    """
    processes: list[subprocess.Popen[bytes]] = []
    run = Run(
        scenario=BY_NAME["router killed"],
        router=lambda fleet, _: as_process(fleet, processes),
        strike=lambda _: processes[0].kill(),
    )
    outcome = await run.outcome()
    assert outcome.strikes == 1
    assert outcome.kinds[Kind.ERROR] > 0, "no client noticed"
    holds_true(outcome)
