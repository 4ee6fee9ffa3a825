"""A controller starts and ends engines on one machine: GPUs and cores are counted, and every action is idempotent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from threading import Event

import pytest

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import Heartbeat
from engine.vllm.placement import CudaGpu, MachineShare
from goodput.actions import Drain, Flip, Start, Stop
from goodput.actuate.agents import Agents
from goodput.actuate.existing import Existing, InstanceLife
from goodput.actuate.local import OLD_S, Child, LocalActuator, LocalPool
from goodput.actuate.places import IDLE_MIB, Places

GPUS = tuple(CudaGpu(id=str(number), name="L4", memory_mib=24_000) for number in range(3))


class Processes:
    def __init__(self) -> None:
        self.there: dict[InstanceId, Child] = {}
        self.begun: list[str] = []
        self.drained: list[str] = []

    def listed(self) -> Iterable[Child]:
        return tuple(self.there.values())

    def begin(self, name: InstanceId, pool: str, share: MachineShare) -> None:
        self.begun.append(name)
        self.there[name] = Child(name=name, pool=pool, asked_s=0.0, share=share)

    def drain(self, name: InstanceId, deadline_s: float) -> None:
        if name in self.there and not self.there[name].leaving:
            self.drained.append(name)
            self.there[name] = replace(self.there[name], leaving=True)

    def end(self, name: InstanceId) -> None:
        self.there.pop(name, None)


class Rig:
    def __init__(
        self,
        gpus: tuple[CudaGpu, ...] = GPUS,
        *,
        takes: bool = True,
        gpus_each: int = 1,
        pools: Mapping[str, str] | None = None,
    ) -> None:
        """`pools`: the type of GPU of each pool."""
        self.processes = Processes()
        self.beats: dict[str, Heartbeat] = {}
        self.used: dict[str, int] = {}
        self.readings = 0
        """How often the memory in use was read."""
        self.answers = Event()
        """Whether such a reading comes to an end."""
        self.answers.set()
        self.now = 100.0
        kinds = {name: LocalPool(gpu, gpus_each, takes) for name, gpu in (pools or {"decode": "L4"}).items()}
        places = Places(gpus, (0, 1), most=4)
        self.agents = Agents(None)
        self.actuator = LocalActuator(
            self.processes,
            kinds,
            places,
            lambda: self.beats,
            self.agents,
            used_mib=self._used_mib,
            clock=lambda: self.now,
        )

    def _used_mib(self) -> Mapping[str, int]:
        self.readings += 1
        assert self.answers.wait(60)
        return self.used

    async def start(self, name: str, pool: str = "decode") -> str:
        return await self.actuator.start(Start(instance=InstanceId(name), pool=pool))

    async def seen(self) -> dict[str, Existing]:
        return {str(each.instance): each for each in (await self.actuator.observe()).instances}


async def test_a_start_given_twice_starts_once() -> None:
    rig = Rig()
    assert await rig.start("decode-0") == ""
    assert await rig.start("decode-0") == ""
    assert rig.processes.begun == ["decode-0"]
    assert "exists" not in await rig.start("decode-1")
    assert "no pool" in await rig.start("x-0", "x")


async def test_each_engine_has_its_gpus_for_itself_and_the_next_one_waits() -> None:
    rig = Rig()
    for number in range(4):
        assert await rig.start(f"decode-{number}") == ""
    gpus = [share for child in rig.processes.listed() for share in child.share.gpus]
    assert sorted(gpus) == ["0", "1", "2"]
    seen = await rig.seen()
    assert seen["decode-3"].life is InstanceLife.PENDING
    assert "3 of 3 in use" in seen["decode-3"].because
    rig.processes.end(InstanceId("decode-1"))
    assert (await rig.seen())["decode-3"].life is InstanceLife.RUNNING
    assert rig.processes.there[InstanceId("decode-3")].share.gpus == ("1",)


async def test_a_gpu_that_another_program_uses_is_not_free() -> None:
    rig = Rig()
    rig.used = {"0": IDLE_MIB + 1, "1": IDLE_MIB + 1, "2": 100}
    await rig.start("decode-0")
    await rig.start("decode-1")
    assert rig.processes.there[InstanceId("decode-0")].share.gpus == ("2",)
    waiting = (await rig.seen())["decode-1"]
    assert "2 used by other programs" in waiting.because


async def test_a_look_reads_the_memory_in_use_once_for_all_that_wait() -> None:
    """A reading takes seconds where nvidia-smi is slow."""
    rig = Rig()
    rig.used = dict.fromkeys("012", IDLE_MIB + 1)
    for number in range(6):
        await rig.start(f"decode-{number}")
    rig.readings, rig.used = 0, {"0": IDLE_MIB + 1}
    seen = await rig.seen()
    assert rig.readings == 1
    assert [each.life for each in seen.values()].count(InstanceLife.PENDING) == 4
    rig = Rig(GPUS[:1], takes=False)
    await rig.start("decode-0")
    await rig.seen()
    assert rig.readings == 0, "mocks take no GPU"


async def test_a_slow_reading_of_memory_refuses_no_start_and_hides_no_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instance exists as soon as it was asked for; a look after the reading has ended starts its process."""
    monkeypatch.setattr("goodput.actuate.local.READING_S", 0.02)
    rig = Rig()
    rig.answers.clear()
    try:
        assert await rig.start("decode-0") == ""
        assert await rig.start("decode-1") == ""
        seen = await rig.seen()
        assert {each.life for each in seen.values()} == {InstanceLife.PENDING}
        assert "memory" in seen["decode-0"].because
        assert rig.readings == 1, "readings do not pile up"
    finally:
        rig.answers.set()
    monkeypatch.setattr("goodput.actuate.local.READING_S", 30.0)
    seen = await rig.seen()
    assert {each.life for each in seen.values()} == {InstanceLife.RUNNING}
    assert rig.readings == 1


async def test_an_old_reading_of_memory_places_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("goodput.actuate.local.READING_S", 0.02)
    rig = Rig()
    rig.answers.clear()
    await rig.start("decode-0")
    await rig.actuator.stop(Stop(instance=InstanceId("decode-0")))
    rig.used = dict.fromkeys("012", IDLE_MIB + 1)
    rig.answers.set()
    assert rig.actuator._reading is not None
    await rig.actuator._reading
    monkeypatch.setattr("goodput.actuate.local.READING_S", 30.0)
    rig.now += OLD_S + 1
    await rig.start("decode-1")
    assert rig.readings == 2
    assert "3 used by other programs" in (await rig.seen())["decode-1"].because


async def test_an_instance_that_waits_for_a_gpu_can_be_stopped_or_drained() -> None:
    rig = Rig(GPUS[:1])
    for number in range(3):
        await rig.start(f"decode-{number}")
    assert await rig.actuator.stop(Stop(instance=InstanceId("decode-1"))) == ""
    assert await rig.actuator.drain(Drain(instance=InstanceId("decode-2"))) == ""
    rig.processes.end(InstanceId("decode-0"))
    assert await rig.seen() == {}


async def test_an_engine_that_cannot_be_started_waits_and_says_why() -> None:
    """Its ticket keys are written to a file, and the disk may be full."""
    rig = Rig()
    begin = rig.processes.begin

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    rig.processes.begin = full  # type: ignore[method-assign, assignment]
    for number in range(2):
        assert await rig.start(f"decode-{number}") == ""
    waiting = (await rig.seen())["decode-0"]
    assert (waiting.life, waiting.because) == (InstanceLife.PENDING, "[Errno 28] No space left on device")
    rig.processes.begin = begin  # type: ignore[method-assign]
    assert {each.life for each in (await rig.seen()).values()} == {InstanceLife.RUNNING}
    gpus = [gpu for child in rig.processes.listed() for gpu in child.share.gpus]
    assert len(gpus) == len(set(gpus)) == 2


async def test_an_engine_of_two_gpus_waits_for_two() -> None:
    rig = Rig(gpus_each=2)
    await rig.start("decode-0")
    await rig.start("decode-1")
    seen = await rig.seen()
    assert rig.processes.there[InstanceId("decode-0")].share.gpus == ("0", "1")
    assert seen["decode-1"].life is InstanceLife.PENDING


def typed(*names: str) -> tuple[CudaGpu, ...]:
    return tuple(CudaGpu(id=str(at), name=name) for at, name in enumerate(names))


async def test_on_a_machine_with_two_types_an_engine_waits_for_its_own() -> None:
    rig = Rig(typed("NVIDIA L40S", "NVIDIA H100 80GB HBM3", "NVIDIA L40S"), pools={"decode": "H100-SXM"})
    await rig.start("decode-0")
    await rig.start("decode-1")
    assert rig.processes.there[InstanceId("decode-0")].share.gpus == ("1",)
    waiting = (await rig.seen())["decode-1"]
    assert waiting.because == "no GPU of type H100-SXM is free: 1 of 1 in use, 1 wanted"


async def test_the_gpus_of_a_new_engine_are_of_one_type_where_there_are_enough() -> None:
    rig = Rig(typed("NVIDIA L40S", "NVIDIA H100 80GB HBM3", "NVIDIA L40S"), gpus_each=2, pools={"decode": ""})
    await rig.start("decode-0")
    assert rig.processes.there[InstanceId("decode-0")].share.gpus == ("0", "2")


async def test_a_drain_given_twice_reaches_the_agent_once_since_a_second_one_would_cut_off() -> None:
    rig = Rig()
    await rig.start("decode-0")
    for _ in range(3):
        assert await rig.actuator.drain(Drain(instance=InstanceId("decode-0"))) == ""
    assert rig.processes.drained == ["decode-0"]
    assert (await rig.seen())["decode-0"].life is InstanceLife.LEAVING
    assert await rig.actuator.drain(Drain(instance=InstanceId("gone-0"))) == ""


async def test_a_failed_engine_holds_no_gpu_and_its_name_may_be_used_again() -> None:
    rig = Rig(GPUS[:1])
    await rig.start("decode-0")
    name = InstanceId("decode-0")
    rig.processes.there[name] = replace(rig.processes.there[name], failed="exit code 1")
    await rig.start("decode-1")
    seen = await rig.seen()
    assert (seen["decode-0"].life, seen["decode-0"].because) == (InstanceLife.FAILED, "exit code 1")
    assert seen["decode-1"].life is InstanceLife.RUNNING
    await rig.actuator.stop(Stop(instance=name))
    assert set(await rig.seen()) == {"decode-1"}


async def test_a_gpu_on_which_engines_fail_is_taken_last() -> None:
    """It may be broken; the next engine would fail there, too, while others are free."""
    rig = Rig()

    async def fails(name: str) -> str:
        await rig.start(name)
        child = rig.processes.there[InstanceId(name)]
        rig.processes.there[InstanceId(name)] = replace(child, failed="exit code 1")
        await rig.seen()
        await rig.seen()
        await rig.actuator.stop(Stop(instance=InstanceId(name)))
        return child.share.gpus[0]

    assert [await fails(f"decode-{number}") for number in range(4)] == ["0", "1", "2", "0"]
    await rig.start("decode-1")
    assert rig.processes.there[InstanceId("decode-1")].share.gpus == ("1",)


async def test_mocks_take_neither_gpus_nor_cores() -> None:
    rig = Rig(GPUS[:1], takes=False)
    for number in range(6):
        await rig.start(f"decode-{number}")
    assert len(rig.processes.begun) == 6


@pytest.mark.parametrize(("cores", "most", "fits"), [((0, 1, 2, 3), 2, 2), ((0, 1), 4, 4)])
def test_without_gpus_cores_are_counted(cores: tuple[int, ...], most: int, fits: int) -> None:
    places = Places((), cores, most)
    taken: dict[str, MachineShare] = {}
    for number in range(fits):
        share = places.part(1)
        assert isinstance(share, MachineShare)
        taken[str(number)] = share
        places.taken(taken)
    assert "no core is free" in str(places.part(1))
    bound = [core for share in taken.values() for core in share.cores]
    assert len(bound) == len(set(bound))


async def test_a_flip_to_the_present_role_asks_no_agent() -> None:
    rig = Rig()
    name = InstanceId("decode-0")
    assert "not in the registry" in await rig.actuator.flip(Flip(instance=name, role=Role.DECODE))
    rig.beats["decode-0"] = Heartbeat(
        id=name, agent="a", role=Role.DECODE, url="http://h:1", agent_url="http://[::1]:1"
    )
    assert await rig.actuator.flip(Flip(instance=name, role=Role.DECODE)) == ""
    assert "does not answer" in await rig.actuator.flip(Flip(instance=name, role=Role.PREFILL))
    await rig.agents.close()
