"""The programs of one `baton up`: registry, router and agents as children; started, watched, restarted, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import aiohttp

from baton.board import Board
from baton.demo import demonstrate, how_to_use
from baton.local import Event, Program, baton_words
from baton.members import LocalMember, Members
from baton.output import announce_ready, say
from baton.plan import PlacedEngine, WantedEngine, with_ports
from baton.ports import HeldPorts
from baton.registry_child import RegistryElsewhere
from baton.restarts import Restarts
from baton.router_child import LocalRouter, RouterChild
from baton.signals import stopping_signals
from baton.state import Running, log_folder, record_file, save
from cluster.errors import BatonError
from cluster.ids import InstanceId, engine_of
from cluster.instance import Role
from engine.vllm.placement import MachineShare

DRAIN_S = 45.0
"""Least time after Ctrl-C for programs to end by themselves; then they are killed."""

ENDS_S = 15.0
"""Time that they have after the router's drain (`limits.drain_s`), when engines end."""

CONTROLLER_S = 15.0
"""Time that a controller has to end its engines on Ray, which no other program ends, when the others are killed."""

RECORD_AGAIN_S = 30.0
"""Time until a record that could not be written is tried again."""

USAGE_CODE = 2
"""How a program ends that refuses its flags, or the cluster file."""

REFUSED_S = 10.0
"""Time until a program is started again that refuses what it took before: the file has a mistake now, say."""

UNBORN_S = 1.0
"""The same for one that the system could not start: no process, memory or descriptor was free."""

FINAL_CODES = (0, 1, USAGE_CODE)
"""Exit codes after which a program is not started again: done, failed, wrong usage. Others mean that it was killed."""


async def _run(program: Program) -> tuple[int, str]:
    """Run a program to its end: its exit code, and why it could not be started (empty: it was)."""
    try:
        return await program.run(), ""
    except OSError as error:
        return os.EX_OSERR, f"it cannot be started: {error.strerror or error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A fleet whose engines a controller starts on other machines."""

    words: tuple[str, ...]
    """The words of the `baton controller` command, up to the registry's flags."""
    vllm_args: tuple[str, ...]
    count: int
    """Instances that there are at least, once the fleet serves: an earlier run may have left pools below `start`."""
    model: str
    """A model's name in the API, for the example of use."""
    roles: frozenset[Role] = frozenset()
    """Roles of the pools that always have an instance."""

    def argv(self, registry: list[str]) -> list[str]:
        """The controller's command. `registry`: flags by which it finds the registry."""
        argv = baton_words(*self.words, *registry)
        return [*argv, "--", *self.vllm_args] if self.vllm_args else argv


class Scaling(Protocol):
    """The part that resizes a cluster while it serves."""

    @property
    def running(self) -> bool:
        """Whether resizing has begun."""

    async def run(self, fleet: LocalFleet) -> None:
        """Resize the fleet until cancelled."""


class KeptRecord:
    """The file of a cluster by which `baton status` and others find it."""

    def __init__(self, running: Running, board: Board) -> None:
        self._running: Final = running
        self._board: Final = board
        self._again: asyncio.TimerHandle | None = None
        """Set if the record could not be written: its next try."""

    def write(self) -> None:
        """Write the record. If it cannot be written, say so once, and try again later."""
        tried, self._again = self._again, None
        if tried is not None:
            tried.cancel()
        try:
            save(self._running)
        except OSError as error:
            if tried is None:
                path, why = record_file(self._running.cluster), error.strerror or error
                again = f"Tried again every {RECORD_AGAIN_S:g} s: make space there, or let this user write it."
                self._board.say(f"{path}: {why}: until it is written, `baton scale` uses an old address. {again}")
            self._again = asyncio.get_running_loop().call_later(RECORD_AGAIN_S, self.write)


class LocalFleet:
    """One cluster on this machine, from start to stop: which program is started, restarted and ended when.

    `Members` knows its engines, `RouterChild` its router, `Restarts` how often a program is started again, `Board` what
    people see. It has many attributes, as it holds each program of the cluster and the state of starting and stopping.
    It is long for the same reason: what one program's end means for the others stands in one place.
    """

    def __init__(
        self,
        front: LocalRouter,
        planned: list[PlacedEngine],
        running: Running,
        registry: RegistryElsewhere,
        ports: HeldPorts,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`planned`: the engines of this machine, with their ports held in `ports`; empty if they run `elsewhere`."""
        self._grace_s = max(DRAIN_S, front.limits.get("drain_s", 0.0) + ENDS_S)
        self.running = running
        running.stop_s = self._grace_s + CONTROLLER_S + ENDS_S
        self.board = Board(front.title, quiet=front.as_json)
        self.registry = registry
        logs, words = log_folder(running.cluster), registry.words()
        self._record: Final = KeptRecord(running, self.board)
        self.router = RouterChild(front, words, self.board, running, self._record.write)
        self.members = Members(words, self.board, ports, logs)
        for each in planned:
            self.members.add(each)
        self.registry_program: Program | None = None
        if registry.argv is not None:
            self.registry_program = Program("registry", registry.argv, lambda *_: None, logs / "registry.log")
        self.elsewhere = elsewhere
        self.controller: Program | None = None
        if elsewhere is not None:
            argv = elsewhere.argv(words)
            self.controller = Program("controller", argv, self._controller_event, logs / "controller.log")
        self.stopping = asyncio.Event()
        self.failure: str | None = None
        self.codes: dict[str, int] = {}
        """The last exit code of each program, by its name."""
        self.scaling: Scaling | None = None
        """Resizes the fleet once it serves; None: it keeps its size."""
        self._group: asyncio.TaskGroup | None = None
        self._keepers: set[asyncio.Task[None]] = set()

    # -- running --

    async def run(self) -> int:
        """Start everything and serve until stopped; return the exit code of `baton up`."""
        with stopping_signals(self._interrupted), self.board:
            _fill_board(self)
            async with asyncio.TaskGroup() as group:
                if self.registry_program:
                    group.create_task(self._keep(self.registry_program), name="registry")
                await self._wait_for_registry()
                self._group = group
                for program in self._programs():
                    self._begin(program)
                serving = group.create_task(self._serve(), name="serve")
                introducing = group.create_task(self.members.introduce(), name="introduce")
                while self._keepers:  # other programs may begin meanwhile
                    await asyncio.wait(self._keepers, return_when=asyncio.FIRST_COMPLETED)
                    self._keepers = {keeper for keeper in self._keepers if not keeper.done()}
                self._group = None
                serving.cancel()
                introducing.cancel()
                if self.registry_program:
                    self.stopping.set()
                    self.registry_program.stop()  # no program is left that needs it
        return self._verdict()

    def _begin(self, program: Program) -> None:
        assert self._group is not None
        self._keepers.add(self._group.create_task(self._keep(program), name=program.name))

    async def _wait_for_registry(self) -> None:
        """Wait for the registry before anything else is started; stop the cluster if it does not answer. If the
        registry's process ended, its `_keep` has already noted why.
        """
        try:
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(self.registry.wait_ready(), name="registry-ready")
                stopped = group.create_task(self.stopping.wait(), name="stopped")
                await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                stopped.cancel()
        except* BatonError as errors:
            self.failure = self.failure or str(errors.exceptions[0])
            self._stop()
        if not self.stopping.is_set():
            self.board.update("registry", "ready")

    async def _keep(self, program: Program) -> None:
        """Run one program, and run it again if it was killed. If it fails for good, `_failed` decides what ends."""
        restarts, ran = Restarts(), False
        while not self.stopping.is_set():
            member = self.members.of(program)
            code, unborn = await _run(program)
            self.codes[program.name] = code
            if self.stopping.is_set():
                break
            if member is not None and (code == 0 or member.leaving):
                self.board.update(program.name, "stopped", "it was told to leave")  # an operator's doing, no failure
                self._forget(member)
                return
            if member is None and ran and code == USAGE_CODE:
                # It has served, was killed, and refuses its flags or its file now: no reason to end all engines.
                self.board.update(program.name, "restarting", f"it refuses its start, see its log; in {REFUSED_S:g} s")
                await self._pause(REFUSED_S)
                continue
            because = unborn or ("" if code in FINAL_CODES else f"its process ended with {code}")
            if unborn:
                await self._pause(UNBORN_S)
            ran = ran or not unborn
            if member is not None and not because:
                because = self.members.move(member)
            if not because or not restarts.may(time.monotonic()):
                self.board.update(program.name, "failed", f"exit code {code}")
                self._failed(program, member, code)
                return
            self.board.update(program.name, "restarting", because)
            if member is not None:
                await member.ports_free()
                if member.leaving:
                    self._forget(member)
                    return
        self.board.update(program.name, "stopped")
        if program is self.router.program:
            self._stop_engines()

    async def _pause(self, seconds: float) -> None:
        """Wait, at most until the cluster stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()

    def _forget(self, member: LocalMember) -> None:
        """Forget an engine that has left, so that no controller lists it, and `baton up` does not wait for it."""
        self.members.remove(member)
        member.ready.set()  # if it left before it was ready

    def _failed(self, program: Program, member: LocalMember | None, code: int) -> None:
        """Handle a program that failed for good: end the cluster. If it is an engine that the controller can replace,
        only note the failure.
        """
        if member is not None and self.scaling is not None and (member.later or self.scaling.running):
            member.failed = _why(program, code)
            return
        self.failure = self.failure or _why(program, code)
        self._stop()

    # -- while it serves: more engines --

    def scaled_at(self, url: str) -> None:
        """Record the URL of the cluster's controller, for `baton scale`."""
        self.running.scaling = url
        self._record.write()

    def begin_engine(self, wanted: WantedEngine, share: MachineShare, pool: str) -> None:
        """Start one more engine of `pool` on this part of the machine; nothing while the cluster stops."""
        if self.stopping.is_set() or self._group is None:
            return
        member = self.members.add(with_ports(wanted, share, self.members.ports), pool, later=True)
        self.board.add(member.name, member.planned.where)
        self.board.update(member.name, "starting", str(share))
        self._begin(member.program)

    async def _serve(self) -> None:
        await self.router.ready.wait()
        for member in self.members:
            await member.ready.wait()
        await self.router.routable(partial(all_up, self))
        self.board.settle()
        model = next((each.model for each in self.members), "") if self.elsewhere is None else self.elsewhere.model
        self._announce(model)
        if self.router.settings.demo:
            await self._demo(model)
        self.board.say("\nServing. Ctrl-C stops everything.")
        if self.scaling is not None:
            await self.scaling.run(self)

    def _announce(self, model: str) -> None:
        router = self.router
        if router.settings.as_json:
            told = [_shown(each.planned) for each in self.members]
            announce_ready("baton", router.endpoint, as_json=True, admin=router.admin, model=model, instances=told)
            return
        self.board.say("")
        announce_ready("baton", router.endpoint, as_json=False)
        self.board.say("")
        self.board.say(how_to_use(router.endpoint, model))

    async def _demo(self, model: str) -> None:
        pullers = [each.planned.url for each in self.members if each.planned.wanted.role.decodes]
        try:
            urls = self.router.endpoint, self.router.admin
            await demonstrate(urls, model, pullers, self.board, as_json=self.router.settings.as_json)
        except (aiohttp.ClientError, ValueError) as error:
            self.failure = f"the first completion failed: {error}"
            self._stop()

    def _controller_event(self, _: str, event: Event) -> None:
        if event.get("event") == "ready":
            self.board.update("controller", "ready")
            self.scaled_at(str(event["endpoint"]))
        elif event.get("event") == "scaling":
            self.board.say(str(event.get("said", "")))

    # -- stopping --

    def _interrupted(self) -> None:
        if self.stopping.is_set():
            self._kill()
        else:
            self.board.say("\nStopping; Ctrl-C again stops at once.")
            self._stop()

    def _stop(self) -> None:
        """Stop the router first: it finishes open requests. After its end no program sends requests, so the engines end
        at once, and their holds with them.
        """
        if self.stopping.is_set():
            return
        self.stopping.set()
        for program in self._programs():
            if program.running:
                self.board.update(program.name, "stopping")
        self.router.program.stop()
        if not self.router.program.running:
            self._stop_engines()
        asyncio.get_running_loop().call_later(self._grace_s, self._kill)

    def _stop_engines(self) -> None:
        if self.controller is not None:
            self.controller.stop()  # the controller owns the engines, and ends them
        self.members.close()

    def _kill(self) -> None:
        """End all programs now, but a controller in order, as it ends its engines; kill it `CONTROLLER_S` later."""
        for program in self._programs():
            if program is not self.controller:
                program.kill()
        if self.controller is not None and self.controller.running:
            self.controller.stop()
            asyncio.get_running_loop().call_later(CONTROLLER_S, self._kill_rest, self.controller)
        elif self.registry_program:
            self.registry_program.kill()

    def _kill_rest(self, controller: Program) -> None:
        controller.kill()
        if self.registry_program:
            self.registry_program.kill()

    def _programs(self) -> list[Program]:
        controller = [] if self.controller is None else [self.controller]
        return [self.router.program, *controller, *(member.program for member in self.members)]

    def _verdict(self) -> int:
        if self.failure is None:
            return 0
        say(self.failure)
        return 2 if 2 in self.codes.values() else 1


def _fill_board(fleet: LocalFleet) -> None:
    fleet.board.add("registry", fleet.registry.say)
    fleet.board.add("router", f"{fleet.router.settings.host}:{fleet.router.settings.port}")
    if fleet.controller is not None:
        fleet.board.add("controller", "starts engines on Ray")
    for member in fleet.members:
        placed = member.planned.placed
        fleet.board.add(member.name, member.planned.where)
        if placed.gpus:
            fleet.board.update(member.name, "starting", str(placed))  # lines of a log have no column for it


def all_up(fleet: LocalFleet, seen: list[dict[str, Any]]) -> bool:
    """Whether the router has every engine of this cluster up, with all its ranks. A registry that runs elsewhere may
    list others, too.
    """
    if fleet.elsewhere is not None:
        return _all_elsewhere_up(seen, fleet.elsewhere)
    up = [engine_of(InstanceId(each["id"])) for each in seen if each["state"] == "up"]
    own = {each.name for each in fleet.members}  # an engine may leave meanwhile
    return sum(name in own for name in up) >= fleet.members.ranks


def _all_elsewhere_up(seen: list[dict[str, Any]], elsewhere: Elsewhere) -> bool:
    """Whether the router has as many engines up, with all their ranks, as begin elsewhere, and each role among them."""
    up = {engine_of(InstanceId(each["id"])) for each in seen if each["state"] == "up"}
    coming = {engine_of(InstanceId(each["id"])) for each in seen if each["state"] != "up"}
    roles = {Role(each["role"]) for each in seen if each["state"] == "up"}
    legs = all(
        any(role.prefills and wanted.prefills for role in roles)
        or any(role.decodes and wanted.decodes for role in roles)
        for wanted in elsewhere.roles
    )
    return legs and len(up - coming) >= elsewhere.count


def _shown(planned: PlacedEngine) -> dict[str, str]:
    return {"id": planned.wanted.name, "role": planned.wanted.role.value, "url": planned.url}


def _why(program: Program, code: int) -> str:
    said = [line for line in program.last_words if line.strip()]
    return "\n".join([f"{program.name} ended with exit code {code}:", *(f"  {line}" for line in said)])
