"""The engine processes of one `baton up`: their list and state; draining, ending and introducing them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from baton.board import Board
from baton.local import Event, Program, baton_words
from baton.plan import PlacedEngine, with_ports
from baton.ports import LOOPBACK, HeldPorts, is_free
from cluster.ids import InstanceId
from goodput.actions import pool_of_new
from kvtransfer.asks import doors_of
from kvtransfer.door import introduce_each_other

PORTS_S = 15.0
"""Longest wait for the ports of a killed agent. Its keeper (`engine/vllm/keeper.py`) needs about 3 s."""

PORTS_EVERY_S = 0.1

OVERDUE_S = 15.0
"""An agent that still runs this long after the deadline of its drain is ended."""

LOGS_KEPT = 20
"""Logs are kept of so many engines of a pool that were started later and have ended. Each has a new name
(`goodput.actions.new_name`), so that its logs are never written again."""

LOGS_AGE_S = 3 * 86400.0
"""A start removes logs of earlier runs only if nothing was written to them for this long. Processes of other machines
and containers may have the same folder, and cannot be seen; an engine between two starts has no log open."""

_LOG_ENDINGS = (".agent.log", ".agent.log.1", ".log", ".log.1")


@dataclass(slots=True, kw_only=True)
class LocalMember:
    """One engine of this cluster."""

    planned: PlacedEngine
    program: Program
    pool: str
    """Its pool of the cluster file: the stem of its name."""
    asked_s: float = field(default_factory=time.monotonic)
    """When it was added, monotonic seconds."""
    later: bool = False
    """Whether it was started while the cluster served: if it fails, the cluster goes on without it."""
    model: str = ""
    """Name in the API, known once it is ready."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    leaving: bool = False
    """Whether it was told to drain and end, or to end."""
    failed: str = ""
    """Why it ended for good."""

    @property
    def name(self) -> str:
        """The instance's name."""
        return self.planned.wanted.name

    async def ports_free(self) -> None:
        """Wait, at most `PORTS_S`, until the keeper of a killed agent has ended its engine and so freed its ports."""
        for _ in range(int(PORTS_S / PORTS_EVERY_S)):
            if all(is_free(LOOPBACK, port) for port in self.planned.ports):
                return
            await asyncio.sleep(PORTS_EVERY_S)


class Members:
    """All engines by name, in the order in which they were added: each drained, ended, and introduced to the others."""

    def __init__(self, registry: list[str], board: Board, ports: HeldPorts, logs: Path) -> None:
        """`registry`: flags by which engines' agents find the registry; `logs`: the folder of the cluster's logs."""
        self._found: dict[str, LocalMember] = {}
        self.ports = ports
        """The engines' ports, held until each has ended."""
        self._registry = registry
        self._logs = logs
        self._board = board
        self._ended: dict[str, deque[str]] = {}
        """By pool, engines that were started later and have ended, the oldest first: those whose logs are kept."""
        self._started = asyncio.Event()
        """Set when an engine has become ready since the last introduction."""

    def __iter__(self) -> Iterator[LocalMember]:
        return iter([*self._found.values()])

    def of(self, program: Program) -> LocalMember | None:
        """The engine whose agent is `program`; None: it is another program, such as the router."""
        return next((each for each in self if each.program is program), None)

    def add(self, planned: PlacedEngine, pool: str = "", *, later: bool = False) -> LocalMember:
        """Add an engine, not started yet."""
        wanted = planned.wanted
        log = self._logs / f"{wanted.name}.agent.log"
        program = Program(wanted.name, self._argv(planned), self._heard, log)
        member = LocalMember(planned=planned, program=program, pool=pool or pool_of(wanted.name), later=later)
        self._found[member.name] = member
        return member

    def _argv(self, planned: PlacedEngine) -> list[str]:
        log = self._logs / f"{planned.wanted.name}.log"
        argv = baton_words(*planned.words(self._registry), "--log-file", str(log))
        return [*argv, "--", *planned.wanted.vllm_args] if planned.wanted.vllm_args else argv

    def move(self, member: LocalMember) -> str:
        """Give an engine that has ended other ports if another program has one of its own, as its next start would fail
        for that, too. Returns why, for people; empty: its ports are free, and it keeps them.
        """
        old = member.planned
        taken = next((port for port in old.ports if not is_free(LOOPBACK, port)), None)
        if taken is None:
            return ""
        self.ports.give_back(*old.ports)
        member.planned = with_ports(old.wanted, old.placed, self.ports)
        member.program.argv = self._argv(member.planned)
        self._board.add(member.name, member.planned.where)
        return f"another program has taken port {taken}: it begins anew at {member.planned.url}"

    def remove(self, member: LocalMember) -> None:
        """Remove an engine that has ended. Of engines that were started later, only the last ones' logs are kept."""
        if self._found.get(member.name) is member:
            del self._found[member.name]
            self.ports.give_back(*member.planned.ports)
            if member.later and pool_of_new(member.name) == member.pool:
                self._forget(member)

    def _forget(self, member: LocalMember) -> None:
        """Note an engine with a new name (`goodput.actions.new_name`) as ended, and remove the logs of earlier ones.
        Logs of other commands stay: their engines may run.
        """
        ended = self._ended.setdefault(member.pool, deque())
        ended.append(member.name)
        while len(ended) > LOGS_KEPT:
            _remove_logs(self._logs, ended.popleft())

    @property
    def ranks(self) -> int:
        """Instances that routers will list: one for each data-parallel rank of an engine."""
        return sum(each.planned.wanted.ranks for each in self)

    def _heard(self, name: str, event: Event) -> None:
        member = self._found.get(name)
        if member is None:
            return
        if event.get("event") == "ready":
            member.model = str(event.get("model", ""))
            self._board.update(name, "ready")
            member.ready.set()
            self._started.set()
        elif event.get("event") == "state" and event["state"] != "ready":
            self._board.update(name, str(event["state"]), str(event.get("detail", "")))

    def drain(self, name: str, deadline_s: float) -> None:
        """Let an engine finish its requests within `deadline_s`, and end; routers learn of it first. A second call does
        nothing: a second SIGTERM would end the agent at once.
        """
        member = self._found.get(name)
        if member is None or member.leaving or member.failed:
            return
        member.leaving = True
        self._board.update(name, "stopping", "it drains")
        member.program.stop()
        asyncio.get_running_loop().call_later(deadline_s + OVERDUE_S, _cut_off, member)

    def end(self, name: str) -> None:
        """End an engine now, in order; forget one that has failed."""
        member = self._found.get(name)
        if member is None:
            return
        if member.failed:
            self.remove(member)
            return
        member.leaving = True
        _cut_off(member)

    def close(self) -> None:
        """End all of them in order, without a drain."""
        for member in self:
            member.program.close()

    async def introduce(self) -> None:
        """Introduce engines with Baton's connector to each other each time one has started: each may then read KV cache
        from the others. Runs until cancelled.
        """
        while True:
            await self._started.wait()
            self._started.clear()
            doors = [each for each in self if each.planned.wanted.door and each.ready.is_set()]
            known = [
                (str(name), Path(path))
                for each in (member.planned.wanted for member in doors)
                for name, path in doors_of(InstanceId(each.name), each.door, each.ranks)
            ]
            try:
                await asyncio.to_thread(introduce_each_other, *known)
            except (OSError, ValueError) as error:  # one engine ends just now: its next start comes by here again
                self._board.say(
                    f"Engines with Baton's connector do not know each other yet; tried again at the next start: {error}"
                )


def _cut_off(member: LocalMember) -> None:
    if member.program.running:
        member.program.close()


def remove_earlier_logs(folder: Path) -> None:
    """Remove logs of engines with new names (`goodput.actions.new_name`) that earlier runs have left in this folder,
    but for the last `LOGS_KEPT` of each pool, those younger than `LOGS_AGE_S`, and those that a visible process has
    open: engines of another command may run. An engine of another machine or container that writes nothing for longer
    loses its logs. Logs of engines with other names, and of the router, stay: the next run goes on with them, within
    their bounds.
    """
    written: dict[str, dict[str, float]] = {}
    for path in folder.glob("*.log*"):
        ending = next((each for each in _LOG_ENDINGS if path.name.endswith(each)), "")
        name = path.name.removesuffix(ending)
        pool = pool_of_new(name)
        if ending and pool:
            with contextlib.suppress(OSError):
                times = written.setdefault(pool, {})
                times[name] = max(times.get(name, 0.0), path.stat().st_mtime)
    since = time.time() - LOGS_AGE_S  # noqa: TID251 - files have Unix time
    beyond = (each for times in written.values() for each in sorted(times.items(), key=itemgetter(1))[:-LOGS_KEPT])
    old = [name for name, written_s in beyond if written_s < since]
    if not old:
        return
    opened = _open_files()
    for name in old:
        if not any(str(path) in opened for path in _logs_of(folder, name)):
            _remove_logs(folder, name)


def _open_files() -> set[str]:
    """Paths of all files that processes of this user have open, as far as /proc shows them: not those of other machines
    and containers.
    """
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    found.add(str(descriptor.readlink()))
    return found


def _logs_of(folder: Path, name: str) -> list[Path]:
    return [folder.resolve() / f"{name}{ending}" for ending in _LOG_ENDINGS]


def _remove_logs(folder: Path, name: str) -> None:
    for path in _logs_of(folder, name):
        with contextlib.suppress(OSError):
            path.unlink()


def pool_of(name: str) -> str:
    """``decode-3`` is the fourth of ``decode`` (`cluster.spec.plan.stems`)."""
    return name.rpartition("-")[0] or name
