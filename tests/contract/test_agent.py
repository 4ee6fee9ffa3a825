"""An agent with a registry in memory and a scripted engine: what heartbeats announce, from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import msgspec
import pytest
import zmq.asyncio
from support.fake_engine import FakeEngine
from support.fleet import eventually

from cluster import background
from cluster.errors import EngineFailed, UsageError
from cluster.ids import InstanceId
from cluster.instance import Load, Role
from cluster.registry.membership import Heartbeat, MemberKind, MemberState
from cluster.registry.memory import MemoryRegistry
from cluster.registry.registry import RegistryDown
from decode.rules import DecodeRules
from engine.agent import machine, readings
from engine.agent.agent import Agent
from engine.agent.announcer import Announcer
from engine.agent.config import AgentConfig
from engine.agent.machine import AgentState
from engine.agent.meetings import Acquainted
from engine.vllm.child import EngineChange, EngineProcess
from engine.vllm.spec import EngineSpec
from engine.vllm.supervise import EngineState as Process
from engine.vllm.tiers import GIB, Tiers
from prefill.rules import PrefillRules


class Puppet:
    """Replaces an `EngineProcess`: changes its state when a test calls `becomes`."""

    log_path = Path("engine.log")
    model = "fake"

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.agent: Agent | None = None
        self.stopped = asyncio.Event()
        self.failure: EngineFailed | None = None

    def becomes(self, state: Process, epoch: int = 1, detail: str = "") -> None:
        assert self.agent is not None
        self.agent.engine_changed(EngineChange(instance=self.spec.instance, state=state, detail=detail, epoch=epoch))

    async def run(self) -> None:
        await self.stopped.wait()
        if self.failure is not None:
            self.becomes(Process.FAILED, detail="died")
            raise self.failure
        self.becomes(Process.STOPPED)

    def stop(self, *, at_once: bool = False) -> None:
        assert at_once, "the agent drains itself"
        self.stopped.set()


@dataclass
class Stage:
    """One agent, its engine, the registry and the lines that the agent reported."""

    agent: Agent
    puppet: Puppet
    engine: FakeEngine
    registry: MemoryRegistry
    running: asyncio.Task[int]
    said: list[str] = field(default_factory=list)

    async def seen(self) -> Heartbeat | None:
        """The last heartbeat readers see."""
        return next((beat for beat in await self.registry.read() if beat.id == self.agent.spec.instance), None)

    async def sees(self, state: MemberState) -> Heartbeat:
        """Wait until readers see this state."""
        async with asyncio.timeout(5):
            while True:
                beat = await self.seen()
                if beat is not None and beat.state is state:
                    return beat
                await asyncio.sleep(0.01)


class Starter:
    """Starts agents in front of fake engines; all share one registry."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.registry = MemoryRegistry(clock=time.monotonic, ttl_s=0.4)

    async def start(
        self,
        name: str = "i",
        role: Role = Role.DECODE,
        *,
        drain_s: float = 5.0,
        flips: bool = False,
        weights: Callable[[], str] = str,
        kv_events: str = "",
        tenants: tuple[str, ...] = (),
        ranks: int = 1,
        tiers: Tiers | None = None,
        **more: Any,
    ) -> Stage:
        engine = await self.stack.enter_async_context(FakeEngine(name))
        port = int(engine.url.rpartition(":")[2])
        spec = EngineSpec(
            instance=InstanceId(name), role=role, model="m", python=sys.executable, device="cpu", port=port,
            side_channel_port=1, kv_events=kv_events, ranks=ranks, tiers=tiers,
        )  # fmt: skip
        puppet = Puppet(spec)
        said: list[str] = []
        rules = PrefillRules() if role is Role.PREFILL else DecodeRules()
        agent = Agent(
            cast("EngineProcess", puppet),
            rules,
            AgentConfig(drain_s=drain_s, weights=weights, node="here", tenants=tenants, **more),
            self.registry,
            lambda _: None,
            said.append,
            {Role.PREFILL: PrefillRules(), Role.DECODE: DecodeRules()} if flips else None,
        )
        puppet.agent = agent
        running = asyncio.ensure_future(agent.run())

        async def end() -> None:
            puppet.stopped.set()
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()

        self.stack.push_async_callback(end)
        return Stage(agent, puppet, engine, self.registry, running, said)


@pytest.fixture
async def starter() -> AsyncIterator[Starter]:
    async with AsyncExitStack() as stack:
        yield Starter(stack)


async def until_ready(stage: Stage, epoch: int = 1) -> Heartbeat:
    stage.puppet.becomes(Process.STARTING, epoch)
    stage.puppet.becomes(Process.READY, epoch)
    return await stage.sees(MemberState.READY)


async def test_the_fleet_hears_of_another_role(starter: Starter) -> None:
    stage = await starter.start(role=Role.DECODE, flips=True)
    await until_ready(stage)
    assert stage.agent.ask_role(Role.PREFILL) is None
    async with asyncio.timeout(5.0):
        while (await stage.sees(MemberState.READY)).role is not Role.PREFILL:
            await asyncio.sleep(0.01)
    assert stage.agent.report.state()["role"] == "prefill"
    assert stage.agent.report.state()["epoch"] == 1, "the same life"
    assert 'role="prefill"' in stage.agent.report.metrics()


async def test_from_start_to_goodbye(starter: Starter) -> None:
    stage = await starter.start()
    beat = await stage.sees(MemberState.STARTING)
    assert beat.credits == 0
    beat = await until_ready(stage)
    assert beat.url == stage.engine.url
    assert beat.model_names == ("fake",)
    assert beat.credits > 0
    assert beat.agent_url == stage.agent.url
    stage.agent.ask_leave()
    await stage.sees(MemberState.DRAINING)
    assert await stage.running == 0
    gone = await stage.seen()
    assert gone is None or gone.state is MemberState.GONE


async def test_each_rank_is_announced_with_its_own_load_and_all_end_together(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine and one agent, but two instances: credits and drains follow the requests of each rank."""
    monkeypatch.setattr(readings, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(machine, "QUIET_S", 0.2)
    stage = await starter.start(ranks=2)

    async def seen(state: MemberState) -> list[Heartbeat]:
        async with asyncio.timeout(5):
            while True:
                beats = sorted(await stage.registry.read(), key=lambda beat: beat.id)
                if [beat.state for beat in beats] == [state] * 2:
                    return beats
                await asyncio.sleep(0.01)

    stage.puppet.becomes(Process.STARTING)
    stage.puppet.becomes(Process.READY)
    one, two = await seen(MemberState.READY)
    assert [one.id, two.id] == ["i@0", "i@1"] and one.url == two.url == stage.engine.url
    assert one.agent_url == two.agent_url and one.credits == two.credits == DecodeRules().credits(Load())
    assert {each["instance"] for each in stage.agent.report.state()["ranks"]} == {"i@0", "i@1"}
    stage.engine.more_metrics = 'vllm:num_requests_running{engine="1",model_name="m"} 3.0\n'

    await eventually(lambda: stage.agent.ranks[1].machine.load.running == 3, "rank 1 is busy", 5)
    assert stage.agent.ranks[0].machine.load.running == 0
    assert 'running{instance="i@1",role="decode"} 3' in stage.agent.report.metrics()
    stage.agent.ask_leave()
    await seen(MemberState.DRAINING)
    await eventually(lambda: stage.agent.ranks[0].machine.state is AgentState.STOPPING, "rank 0 has no work", 5)
    assert not stage.puppet.stopped.is_set(), "rank 1 has work: the engine runs"
    stage.engine.more_metrics = ""
    assert await stage.running == 0
    assert stage.said[-1] == "i@1 stops: drained"
    assert all(beat.state is MemberState.GONE for beat in await stage.registry.read())


async def test_ranks_come_back_under_new_epochs(starter: Starter) -> None:
    stage = await starter.start(ranks=2)
    stage.puppet.becomes(Process.STARTING)
    stage.puppet.becomes(Process.READY)
    await eventually(stage.agent.is_ready, "both take work", 5)
    before = [rank.epoch for rank in stage.agent.ranks]
    stage.puppet.becomes(Process.RESTARTING)
    stage.puppet.becomes(Process.STARTING, 2)
    stage.puppet.becomes(Process.READY, 2)

    def new() -> bool:
        return stage.agent.is_ready() and min(rank.machine.epoch for rank in stage.agent.ranks) > max(before)

    await eventually(new, "both are new", 5)
    for beat, old in zip([stage.agent.report.heartbeat(rank) for rank in stage.agent.ranks], before, strict=True):
        assert beat.epoch > old and beat.state is MemberState.READY


async def test_the_fleet_hears_of_adapters_that_come_and_go(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(readings, "MODELS_EVERY_LOOKS", 1)
    stage = await starter.start()
    await until_ready(stage)
    for adapters in (["poet"], []):
        stage.engine.adapters = adapters
        async with asyncio.timeout(5.0):
            while (beat := await stage.sees(MemberState.READY)).model_names != ("fake", *adapters):
                await asyncio.sleep(0.01)
        assert beat.models[0]["id"] == "fake"


async def test_adapters_are_announced_with_a_digest_until_their_files_change(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(readings, "MODELS_EVERY_LOOKS", 1)
    marks = ["as it was"]
    stage = await starter.start(adapter=lambda root: f"digest of {root}", adapter_marks=lambda _: (*marks,))
    assert (await until_ready(stage)).adapters == {}
    stage.engine.adapters = ["poet"]

    async def says(wanted: dict[str, str]) -> None:
        async with asyncio.timeout(5.0):
            while (await stage.sees(MemberState.READY)).adapters != wanted:
                await asyncio.sleep(0.01)

    await says({"poet": "digest of /adapters/poet"})
    marks[0] = "touched"
    await says({"poet": ""})
    stage.engine.adapters = []
    await says({})


async def test_an_instance_with_very_many_adapters_stays_in_the_fleet(
    starter: Starter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(readings, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(readings, "MODELS_EVERY_LOOKS", 1)
    stage = await starter.start(adapter=lambda root: f"digest of {root}", adapter_marks=lambda _: ("as it was",))
    await until_ready(stage)
    names = [f"poet-{number}" for number in range(100)]
    stage.engine.adapters = names
    async with asyncio.timeout(5.0):
        while len((await stage.sees(MemberState.READY)).models) == 1:
            await asyncio.sleep(0.01)
    await asyncio.sleep(2 * stage.registry.ttl_s)
    beat = await stage.sees(MemberState.READY)
    assert beat.model_names == ("fake", *names[:63]) and len(beat.adapters) == 63
    stage.engine.adapters = names[1:]
    async with asyncio.timeout(5.0):
        while (beat := await stage.sees(MemberState.READY)).model_names != ("fake", *names[1:64]):
            await asyncio.sleep(0.01)
    assert caplog.text.count("i serves 101 models and adapters, and its heartbeats have room for 64;") == 1
    assert caplog.text.count("room for") == 1


async def test_the_fleet_hears_of_a_reason_with_colours_and_tabs(starter: Starter) -> None:
    stage = await starter.start()
    await until_ready(stage)
    stage.puppet.becomes(Process.RESTARTING, 1, "x\ty\x1b[0m\u00a0z")
    assert (await stage.sees(MemberState.RESTARTING)).detail == "x y [0m z"


async def test_the_weights_are_named_anew_at_every_start_of_the_engine(starter: Starter) -> None:
    names = iter(["old", "", "new"])
    stage = await starter.start(weights=lambda: next(names))
    assert (await until_ready(stage)).weights == "old"
    stage.puppet.becomes(Process.STARTING, 2)
    await stage.sees(MemberState.STARTING)
    stage.puppet.becomes(Process.READY, 2)
    beat = await stage.sees(MemberState.READY)
    assert (beat.weights, beat.node, beat.instance.weights) == ("new", "here", "new"), "asked again once it was there"


async def test_heartbeats_name_the_tenants_that_an_instance_is_reserved_for(starter: Starter) -> None:
    stage = await starter.start(tenants=("acme", "b-2"))
    beat = await until_ready(stage)
    assert (beat.tenants, beat.instance.tenants) == (("acme", "b-2"), {"acme", "b-2"})


async def test_heartbeats_have_the_number_format_that_the_engine_told(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = await starter.start()
    assert (await until_ready(stage)).dtype == "", "without an agent socket it is unknown"
    (rank,) = stage.agent.ranks
    transfers = SimpleNamespace(shares=False, early=False, dtype="float32", acquainted=Acquainted())
    with monkeypatch.context() as patched:
        patched.setattr(rank, "transfers", transfers)
        assert stage.agent.report.heartbeat(rank).instance.dtype == "float32"


async def test_every_start_has_an_epoch_of_its_own(starter: Starter) -> None:
    stage = await starter.start()
    first = (await until_ready(stage)).epoch
    stage.puppet.becomes(Process.RESTARTING, 1, "exit code 137")
    await stage.sees(MemberState.RESTARTING)
    assert (await until_ready(stage, epoch=2)).epoch > first


async def test_prefill_drains_only_once_its_holds_are_gone(starter: Starter) -> None:
    stage = await starter.start(role=Role.PREFILL)
    await until_ready(stage)
    stage.engine.holds["x"] = {}
    await eventually(lambda: stage.agent.machine.load.kv_usage > 0, "the hold is seen")
    stage.agent.ask_leave()
    await asyncio.wait({stage.running}, timeout=2.5)  # longer than the quiet time
    assert not stage.running.done(), "it waits for the hold"
    stage.engine.holds.clear()
    assert await stage.running == 0
    assert any("stops: drained" in line for line in stage.said)


async def test_a_drain_past_its_deadline_reports_what_was_cut_off(starter: Starter) -> None:
    stage = await starter.start(role=Role.PREFILL, drain_s=0.3)
    await until_ready(stage)
    stage.engine.holds["x"] = {}
    await eventually(lambda: stage.agent.machine.load.kv_usage > 0, "the hold is seen")
    stage.agent.ask_leave()
    assert await stage.running == 0
    assert any("not drained within 0.3 s; cut off: holds of 10.0%" in line for line in stage.said)


async def test_a_taken_name_is_refused_with_both_names(starter: Starter) -> None:
    first = await starter.start("same")
    await until_ready(first)
    second = await starter.start("same")
    with pytest.raises(
        UsageError, match=r"--name same: .*; choose another name, or another --cluster if it is of another fleet$"
    ) as caught:
        await second.running
    assert "agent" in str(caught.value)
    assert any("waiting for it to be free" in line for line in second.said)
    assert (await first.sees(MemberState.READY)).agent_url == first.agent.url


async def test_the_name_of_an_agent_that_died_is_free_after_a_while(starter: Starter) -> None:
    first = await starter.start("same")
    await until_ready(first)
    first.running.cancel()
    starter.registry.down = True  # it dies without a goodbye
    await asyncio.wait({first.running})
    starter.registry.down = False
    second = await starter.start("same")
    await eventually(lambda: bool(second.agent.url), "it is up")
    second.puppet.becomes(Process.STARTING)
    second.puppet.becomes(Process.READY)
    async with asyncio.timeout(5):
        while (await second.sees(MemberState.READY)).agent_url != second.agent.url:
            await asyncio.sleep(0.01)
    assert not second.running.done()


async def test_it_serves_on_without_the_registry(starter: Starter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.agent")
    stage = await starter.start()
    await until_ready(stage)
    starter.registry.down = True
    await eventually(lambda: any("serving on" in each for each in caplog.messages), "a heartbeat has failed")
    async with aiohttp.ClientSession() as session, session.get(f"{stage.agent.url}/ready") as answer:
        assert answer.status == 200
    starter.registry.down = False
    await eventually(lambda: "the registry is back" in caplog.messages, "a heartbeat is written again")
    await stage.sees(MemberState.READY)


async def test_routers_stay_known_while_the_registry_takes_no_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis answers readers while it is a replica, or its disk is full: every heartbeat in it expires."""
    now, known = 1000.0, list[list[str]]()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    registry = MemoryRegistry(lambda: now)
    announcer = Announcer(
        registry, "a", (), beat=lambda _: pytest.fail("it has no ranks"), lost=pytest.fail, say=pytest.fail,
        heard=lambda routers: known.append([each.id for each in routers]),
    )  # fmt: skip
    router = Heartbeat(id=InstanceId("r"), agent="r", kind=MemberKind.ROUTER, url="http://r")
    await registry.beat(router)
    for full, passed_s in ((False, 0.0), (True, 60.0), (False, registry.ttl_s - 0.1), (False, 0.1)):
        registry.full, now = full, now + passed_s
        with contextlib.suppress(RegistryDown):
            await registry.beat(replace(router, id=InstanceId("another"), agent="another", seq=round(10 * now)))
        await announcer._hear_routers()
    assert known == [["another", "r"], ["another", "r"], ["another", "r"], ["another"]]


async def test_an_engine_that_fails_for_good_ends_its_agent(starter: Starter) -> None:
    stage = await starter.start()
    stage.puppet.failure = EngineFailed("died 5 times", ("last line",))
    stage.puppet.stopped.set()
    with pytest.raises(EngineFailed):
        await stage.running


async def test_told_to_leave_before_it_has_its_name(starter: Starter) -> None:
    starter.registry.down = True
    stage = await starter.start()
    await eventually(lambda: bool(stage.agent.url), "it is up")
    stage.agent.ask_leave()
    assert await stage.running == 0


async def test_state_over_http(starter: Starter) -> None:
    stage = await starter.start()
    await until_ready(stage)
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{stage.agent.url}/drain", json={"deadline_s": 9}) as answer:
            told: dict[str, Any] = await answer.json()
            assert (answer.status, told["state"]) == (202, "draining")
        await eventually(lambda: stage.agent.machine.drained, "drained after the quiet time")
        async with session.post(f"{stage.agent.url}/resume") as answer:
            assert (await answer.json())["state"] == "ready"
    await stage.sees(MemberState.READY)


# --- what its engine evicts -------------------------------------------------------------------------------------------


class Publisher:
    """Publishes KV cache events as vLLM does."""

    def __init__(self, path: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.socket.bind(f"ipc://{path}")

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()

    async def publish(self, *events: dict[str, object]) -> None:
        await self.socket.send_multipart([b"", bytes(8), msgspec.msgpack.encode([0.0, list(events), 0])])


async def says(stage: Stage, done: Callable[[Heartbeat], bool], publisher: Publisher | None = None) -> Heartbeat:
    """Wait until a heartbeat fulfils `done`. Publish again and again: a late subscriber misses earlier events."""
    async with asyncio.timeout(10):
        while True:
            if publisher is not None:
                await publisher.publish(STORED, REMOVED)
            beat = await stage.seen()
            if beat is not None and done(beat):
                return beat
            await asyncio.sleep(0.02)


STORED: dict[str, object] = {"type": "BlockStored", "block_hashes": [b"1"], "block_size": 16, "token_ids": [1] * 16}
REMOVED: dict[str, object] = {"type": "BlockRemoved", "block_hashes": [b"1", b"2"], "medium": "GPU"}


async def test_heartbeats_count_the_tokens_that_the_engine_has_evicted(starter: Starter, tmp_path: Path) -> None:
    path = tmp_path / "own" / "events"
    stage = await starter.start(kv_events=str(path))
    await until_ready(stage)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, "events hold prompts"
    publisher = Publisher(path)
    try:
        await publisher.socket.send_multipart([b"", bytes(8), b"no batch"])
        await says(stage, lambda beat: beat.evicted[0] >= 64, publisher)
        await publisher.publish({"type": "AllBlocksCleared"})  # the last one: all others have come before it
        beat = await says(stage, lambda beat: beat.evicted[1] == 1)
        assert beat.evicted[0] % 32 == 0
        assert "baton_agent_kv_evicted_tokens_total" in stage.agent.report.metrics()
    finally:
        publisher.close()
    stage.puppet.becomes(Process.STARTING, 2)
    beat = await says(stage, lambda beat: beat.epoch == 2)
    assert beat.evicted == (0, 0), "a new engine has a new cache"


# --- faults of its own ------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.01)
    monkeypatch.setattr(readings, "LOOK_EVERY_S", 0.02)


def faults(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log messages about the agent's own faults. Each has a traceback."""
    found = [each for each in caplog.records if "a fault of Baton's" in each.message]
    assert all(each.exc_info is not None and each.levelno == logging.ERROR for each in found)
    return [each.message for each in found]


class Fails:
    """Replaces a method: its next `times` calls raise, later calls work."""

    def __init__(self, plain: Any, times: int = 1) -> None:
        self.plain, self.times = plain, times

    def __call__(self, *given: Any) -> Any:
        if self.times:
            self.times -= 1
            raise RuntimeError("a bug")
        return self.plain(*given)


@pytest.mark.usefixtures("quick")
async def test_heartbeats_go_on_after_a_fault(
    starter: Starter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = await starter.start()
    await until_ready(stage)
    monkeypatch.setattr(starter.registry, "read", Fails(starter.registry.read, 2))
    await eventually(lambda: len(faults(caplog)) == 2, "it is told")
    seq = stage.agent.ranks[0].seq
    stage.agent._nudge()
    await eventually(lambda: stage.agent.ranks[0].seq > seq, "heartbeats are sent again")
    assert all(line.startswith("i: heartbeats: ") for line in faults(caplog))
    await stage.sees(MemberState.READY)


@pytest.mark.usefixtures("quick")
async def test_readings_go_on_after_a_fault(
    starter: Starter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = await starter.start()
    await until_ready(stage)
    monkeypatch.setattr(stage.agent._readings, "_loaded", Fails(stage.agent._readings._loaded))
    await eventually(lambda: bool(faults(caplog)), "a reading fails")
    stage.engine.holds["x"] = {}
    await eventually(lambda: stage.agent.machine.load.kv_usage > 0, "the load is read")
    assert [line.rpartition(":")[0] for line in faults(caplog)] == ["i: engine's load"]


@pytest.mark.usefixtures("quick")
async def test_a_change_of_the_engine_is_taken_again(starter: Starter, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise an instance whose weights could not be read once would never become ready, without a reason."""
    weights = Fails(str)
    stage = await starter.start(weights=weights)
    epoch = (await until_ready(stage)).epoch
    assert len(faults(caplog)) == 1
    weights.times = 1
    stage.puppet.becomes(Process.RESTARTING, 1, "exit code 137")
    await stage.sees(MemberState.RESTARTING)
    assert (await until_ready(stage, epoch=2)).epoch > epoch, "it is numbered, although that failed at first"
    assert len(faults(caplog)) == 2


@pytest.mark.parametrize("tiers", [None, Tiers(host_bytes=GIB)])
async def test_the_fleet_hears_how_fast_tiers_are(
    starter: Starter, monkeypatch: pytest.MonkeyPatch, tiers: Tiers | None
) -> None:
    """Each rank says what its engine has measured; an engine without tiers says nothing."""
    monkeypatch.setattr(readings, "LOOK_EVERY_S", 0.02)
    stage = await starter.start(ranks=2, tiers=tiers)
    stage.puppet.becomes(Process.STARTING)
    stage.puppet.becomes(Process.READY)
    label = 'engine="1",model_name="m"'
    stage.engine.more_metrics = (
        f"vllm:kv_offload_load_bytes_total{{{label}}} 3e9\nvllm:kv_offload_load_time_total{{{label}}} 0.5\n"
        f'baton:kv_token_bytes{{{label},of="all"}} 2048.0\nvllm:num_requests_running{{{label}}} 3.0\n'
    )
    found: dict[str, Heartbeat] = {}
    async with asyncio.timeout(10):
        while "i@1" not in found or found["i@1"].load.running != 3:
            found = {beat.id: beat for beat in await stage.registry.read()}
            await asyncio.sleep(0.01)
    told = [(found[name].kept_gb_s, found[name].kv_token_bytes) for name in ("i@0", "i@1")]
    assert told == [({}, 0), ({"host": 6.0}, 2048) if tiers else ({}, 0)]
    line = 'baton_agent_kv_load_gb_s{instance="i@1",role="decode",tier="host"} 6\n'
    assert (line in stage.agent.report.metrics()) == (tiers is not None)


@pytest.mark.usefixtures("quick")
async def test_evictions_are_counted_again_after_a_fault(
    starter: Starter, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own" / "events"
    stage = await starter.start(kv_events=str(path))
    await until_ready(stage)
    publisher = Publisher(path)
    evictions = stage.agent.ranks[0].evictions
    fails = Fails(type(evictions).hear)

    def hear(self: object, raw: bytes) -> None:
        fails(self, raw)

    monkeypatch.setattr(type(evictions), "hear", hear)
    try:
        await says(stage, lambda beat: beat.evicted[0] >= 64, publisher)
        assert len(faults(caplog)) == 1
        assert path.exists(), "the engine's socket"
    finally:
        publisher.close()
    stage.agent.ask_stop()
    assert await stage.running == 0
    await eventually(lambda: not path.parent.exists(), "nothing is left")
