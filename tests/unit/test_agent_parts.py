"""Parts of an engine's agent: what becomes of effects, and the heartbeats of many ranks."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.ids import InstanceId
from cluster.registry.membership import is_name
from cluster.registry.registry import RegistryDown
from decode.rules import DecodeRules
from engine.agent import announcer as announcer_module
from engine.agent.announcer import Announcer
from engine.agent.machine import AgentMachine, DrainAsked, EngineIs, Say, StopEngine
from engine.agent.rank import Rank, RankMachines


async def test_a_full_disk_under_the_log_keeps_no_engine_from_being_stopped() -> None:
    machine = AgentMachine(name="d", rules=DecodeRules())
    done: list[object] = []

    def act(effect: object) -> None:
        if isinstance(effect, Say):
            raise OSError(errno.ENOSPC, "No space left on device")
        done.append(effect)

    machines = RankMachines((Rank(machine, tiered=False),), act)
    machines.feed(EngineIs("ready", "", 1))
    for _ in range(2):
        machines.feed(DrainAsked(30.0, leave=True))
    machines.stop()
    assert any(isinstance(each, StopEngine) for each in done)


def announcer(names: list[str], beat: Callable[[str], Any]) -> Announcer:
    ranks = [SimpleNamespace(id=InstanceId(name)) for name in names]
    registry = SimpleNamespace(beat=beat, ttl_s=6.0)
    ignore: Any = lambda *_: None  # noqa: E731
    return Announcer(registry, "a", ranks, beat=lambda rank: rank.id, heard=ignore, lost=ignore, say=ignore)  # type: ignore[arg-type, return-value]


async def test_heartbeats_of_many_ranks_do_not_wait_for_each_other() -> None:
    under_way = most = 0

    async def beat(_: str) -> str:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return "there"

    answers, failures = await announcer([f"d@{rank}" for rank in range(8)], beat)._beat_all()
    assert (len(answers), failures) == (8, [])
    assert most > 1


async def test_a_heartbeat_that_fails_keeps_no_other_back() -> None:
    sent: list[str] = []

    async def beat(name: str) -> str:
        sent.append(name)
        if name == "d@0":
            raise RegistryDown("no answer")
        return "there"

    answers, failures = await announcer(["d@0", "d@1", "d@2"], beat)._beat_all()
    assert sorted(sent) == ["d@0", "d@1", "d@2"]
    assert (answers, [str(each) for each in failures]) == (["there", "there"], ["no answer"])


async def test_a_heartbeat_that_is_always_too_long_does_not_slow_the_others_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, each ended the work, which began anew after pauses of up to a minute: healthy ranks fell out."""
    monkeypatch.setattr(announcer_module, "BEAT_EVERY_S", 0.001)
    sent: list[str] = []
    enough = asyncio.Event()

    async def beat(name: str) -> str:
        sent.append(name)
        if sent.count("d@1") >= 5:
            enough.set()
        if name == "d@0":
            raise ValueError("its heartbeat is too long")
        return "there"

    async def nobody() -> None:
        return None

    said = announcer(["d@0", "d@1"], beat)
    monkeypatch.setattr(said, "_hear_routers", nobody)
    running = asyncio.ensure_future(said.run())
    async with asyncio.timeout(10):
        await enough.wait()
    said.stop()
    await running
    assert sent.count("d@0") >= 4, "it is tried again each time"


@pytest.mark.parametrize(
    ("name", "can"), [("prefill-0", True), ("my engine", False), ("../x", False), ("x" * 129, False), ("x:y", False)]
)
def test_names_that_heartbeats_can_carry(name: str, can: bool) -> None:
    assert is_name(name) is can
