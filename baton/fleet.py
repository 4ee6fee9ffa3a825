"""The programs of one `baton up`: registry, router and agents as children; started, watched, restarted, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from baton.board import Board
from baton.demo import QUESTION, Demo, ask
from baton.local import Event, Program, baton_words, is_free
from baton.members import LocalMember, Members, pool_of
from baton.output import announce_ready, emit
from baton.plan import LOOPBACK, PlacedEngine
from baton.registry_child import RegistryElsewhere
from baton.restarts import Restarts
from baton.signals import stopping_signals
from baton.state import Running, log_folder, save
from cluster.errors import BatonError
from cluster.ids import InstanceId, engine_of
from kvtransfer.asks import doors_of
from kvtransfer.door import introduce_each_other

DRAIN_S = 45.0
"""How long after Ctrl-C the programs may take to end by themselves: an agent's drain, and some seconds."""

PORTS_S = 15.0
"""Longest wait for the ports of something that was killed; a keeper needs 3 s at most."""

PORTS_EVERY_S = 0.1

OVERDUE_S = 15.0
"""An agent that was told to leave by a deadline is ended if it is still there this long after it."""

FINAL_CODES = (0, 1, 2)
"""Exit codes of Baton's programs that mean that another start would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """A fleet whose engines a controller starts on other machines."""

    words: tuple[str, ...]
    """Of `baton controller`, up to the registry's flags."""
    vllm_args: tuple[str, ...]
    count: int
    """Instances at the start."""
    model: str
    """A model's name in the API, for the example of use."""


class Scaling(Protocol):
    """The part that resizes a cluster while it serves."""

    @property
    def running(self) -> bool:
        """Whether resizing has begun."""

    async def run(self, fleet: LocalFleet) -> None:
        """Until cancelled."""


@dataclass(slots=True, kw_only=True)
class LocalRouter:
    """The router's settings, and this command's own."""

    title: str
    host: str
    port: int
    admin_host: str
    admin_port: int
    policy: str | None = None
    config: str | None = None
    """The cluster file; its classes and tenants, with their key files, are the router's to read."""
    ticket_keys_file: str | None = None
    limits: dict[str, float] = field(default_factory=dict)
    demo: bool = False
    as_json: bool = False

    def words(self) -> list[str]:
        """The `baton router` command, up to the registry's flags."""
        words = ["router", "--host", self.host, "--port", str(self.port)]
        words += ["--admin-host", self.admin_host, "--admin-port", str(self.admin_port)]
        if self.config is not None:
            words += ["--config", self.config]
        if self.policy is not None:
            words += ["--policy", self.policy]
        if self.ticket_keys_file is not None:
            words += ["--ticket-keys-file", self.ticket_keys_file]
        for name, value in self.limits.items():
            words += [f"--{name.replace('_', '-')}", f"{value}"]
        return words


class LocalFleet:
    """One cluster on this machine, from start to stop.

    The class is long because each program (registry, router, controller, agents) is started, watched and ended in an
    order that the others' states decide. `Members` knows which instances there are to be, `Restarts` how often a
    program is started again, `Board` what people see.
    """

    def __init__(
        self,
        front: LocalRouter,
        planned: list[PlacedEngine],
        running: Running,
        registry: RegistryElsewhere,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`planned`: the engines of this machine; empty if they run `elsewhere`."""
        self.front = front
        self.running = running
        self.board = Board(front.title, quiet=front.as_json)
        self.registry = registry
        logs = log_folder()
        words = self.registry.words()
        self.members = Members()
        for each in planned:
            self._add(each)
        self.router = Program("router", baton_words(*front.words(), *words), self._on_event, logs / "router.log")
        argv = self.registry.argv
        self.registry_program = (
            None if argv is None else Program("registry", argv, self._on_event, logs / "registry.log")
        )
        self.elsewhere = elsewhere
        self.controller = None if elsewhere is None else self._controller(elsewhere, words)
        self.router_ready = asyncio.Event()
        self.started = asyncio.Event()
        self.endpoint = self.admin = ""
        self.stopping = asyncio.Event()
        self.failure: str | None = None
        self.codes: dict[str, int] = {}
        self.scaling: Scaling | None = None
        """Resizes the fleet once it serves; None: it keeps its size."""
        self._group: asyncio.TaskGroup | None = None
        self._keepers: set[asyncio.Task[None]] = set()

    def _add(self, planned: PlacedEngine, pool: str = "", *, later: bool = False) -> LocalMember:
        """Add one more engine, not started yet."""
        name = planned.wanted.name
        argv = self._engine_argv(planned, self.registry.words())
        program = Program(name, argv, self._on_event, log_folder() / f"{name}.agent.log")
        member = LocalMember(planned=planned, program=program, pool=pool or pool_of(name), later=later)
        self.members.add(member)
        return member

    def _controller(self, elsewhere: Elsewhere, registry: list[str]) -> Program:
        argv = baton_words(*elsewhere.words, *registry)
        argv = [*argv, "--", *elsewhere.vllm_args] if elsewhere.vllm_args else argv
        return Program("controller", argv, self._on_event, log_folder() / "controller.log")

    @staticmethod
    def _engine_argv(planned: PlacedEngine, registry: list[str]) -> list[str]:
        argv = baton_words(*planned.words(registry))
        return [*argv, "--", *planned.wanted.vllm_args] if planned.wanted.vllm_args else argv

    # -- running --

    async def run(self) -> int:
        """Until stopped; the exit code."""
        with stopping_signals(self._interrupted), self.board:
            self._fill_board()
            async with asyncio.TaskGroup() as group:
                if self.registry_program:
                    group.create_task(self._keep(self.registry_program), name="registry")
                await self._wait_for_registry()
                self._group = group
                for program in self._programs():
                    self._begin(program)
                serving = group.create_task(self._serve(), name="serve")
                introducing = group.create_task(self._introduce(), name="introduce")
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
        """Wait for the registry before anything else is started; if it does not come up, its own `_keep` has said
        why.
        """
        try:
            await self.registry.wait_ready()
            self.board.update("registry", "ready")
        except BatonError as error:
            self.failure = self.failure or str(error)
            self._stop()

    def _fill_board(self) -> None:
        self.board.add("registry", self.registry.say)
        self.board.add("router", f"{self.front.host}:{self.front.port}")
        if self.controller is not None:
            self.board.add("controller", "starts engines on Ray")
        for member in self.members:
            self.board.add(member.name, f"{member.planned.url} on {member.planned.placed}")

    async def _keep(self, program: Program) -> None:
        """Run one program, and again if it is killed; if it fails for good, the cluster ends with it."""
        restarts = Restarts()
        while True:
            code = await program.run()
            self.codes[program.name] = code
            if self.stopping.is_set():
                self.board.update(program.name, "stopped")
                if program is self.router:
                    self._stop_engines()
                return
            member = self._member(program)
            if member is not None and (code == 0 or member.leaving):
                self.board.update(program.name, "stopped", "it was told to leave")  # an operator's doing, no failure
                self._forget(member)
                return
            if code in FINAL_CODES or not restarts.may(time.monotonic()):
                self.board.update(program.name, "failed", f"exit code {code}")
                self._failed(program, member, code)
                return
            self.board.update(program.name, "restarting", f"its process ended with {code}")
            await self._wait_for_ports(program)
            if member is not None and member.leaving:
                self._forget(member)
                return

    def _member(self, program: Program) -> LocalMember | None:
        return next((each for each in self.members if each.program is program), None)

    def _forget(self, member: LocalMember) -> None:
        """Forget an engine that has left. A fleet that is never resized keeps its name, for later questions about
        it.
        """
        if self.scaling is not None:
            self.members.remove(member)

    def _failed(self, program: Program, member: LocalMember | None, code: int) -> None:
        """Handle a program that failed for good: end the cluster, unless it serves and another engine can take the
        place.
        """
        if member is not None and self.scaling is not None and (member.later or self.scaling.running):
            member.failed = _why(program, code)
            return
        self.failure = self.failure or _why(program, code)
        self._stop()

    # -- while it serves: more engines and fewer --

    def scaled_at(self, url: str) -> None:
        """Its controller answers there."""
        self.running.scaling = url
        save(self.running)

    def begin_engine(self, planned: PlacedEngine, pool: str) -> None:
        """Start one more engine."""
        if self.stopping.is_set() or self._group is None:
            return
        member = self._add(planned, pool, later=True)
        self.board.add(member.name, f"{planned.url} on {planned.placed}")
        self.board.update(member.name, "starting", str(planned.placed))
        self._begin(member.program)

    def drain_engine(self, name: str, deadline_s: float) -> None:
        """Let an engine finish its requests and end: routers learn of it first. A second call would end it at once."""
        member = self.members.get(name)
        if member is None or member.leaving or member.failed:
            return
        member.leaving = True
        self.board.update(name, "stopping", "it drains")
        member.program.stop()
        asyncio.get_running_loop().call_later(deadline_s + OVERDUE_S, self._cut_off, member)

    def end_engine(self, name: str) -> None:
        """End an engine now, in order; forget one that has failed."""
        member = self.members.get(name)
        if member is None:
            return
        if member.failed:
            self.members.remove(member)
            return
        member.leaving = True
        self._cut_off(member)

    def _cut_off(self, member: LocalMember) -> None:
        if member.program.running:
            member.program.close()

    async def _wait_for_ports(self, program: Program) -> None:
        """Wait until a killed agent's keeper has ended its processes: until then its ports are taken."""
        ports = [port for each in self.members if each.program is program for port in each.planned.ports]
        for _ in range(int(PORTS_S / PORTS_EVERY_S)):
            if all(is_free(LOOPBACK, port) for port in ports):
                return
            await asyncio.sleep(PORTS_EVERY_S)

    async def _introduce(self) -> None:
        """Introduce engines each time one with Baton's connector has started: it may read from the others, and they
        from it.
        """
        while True:
            await self.started.wait()
            self.started.clear()
            doors = [each for each in self.members if each.planned.wanted.door and each.ready.is_set()]
            known = [
                (str(name), Path(path))
                for each in (member.planned.wanted for member in doors)
                for name, path in doors_of(InstanceId(each.name), each.door, each.ranks)
            ]
            try:
                await asyncio.to_thread(introduce_each_other, *known)
            except (OSError, ValueError) as error:  # one engine ends just now: its next start comes by here again
                self.board.say(
                    f"Engines with Baton's connector do not know each other yet; tried again at the next start: {error}"
                )

    async def _serve(self) -> None:
        await self.router_ready.wait()
        for member in self.members:
            await member.ready.wait()
        seen = await self._wait_until_routable()
        self.board.settle()
        model = next(iter(self.members)).model if self.elsewhere is None else self.elsewhere.model
        self._announce(model, seen)
        if self.front.demo:
            await self._demo(model)
        self.board.say("\nServing. Ctrl-C stops everything.")
        if self.scaling is not None:
            await self.scaling.run(self)

    def _announce(self, model: str, seen: list[dict[str, Any]]) -> None:
        instances = [
            {"id": each.planned.wanted.name, "role": each.planned.wanted.role.value, "url": each.planned.url}
            for each in self.members
        ]
        if self.front.as_json:
            announce_ready("baton", self.endpoint, as_json=True, admin=self.admin, model=model, instances=instances)
            return
        print(f"\nready baton {self.endpoint}\n", flush=True)
        self.board.say(_how_to_use(self.endpoint, model))

    async def _wait_until_routable(self) -> list[dict[str, Any]]:
        """Wait until the router knows every instance, or every rank of it; the router's own list of them."""
        count = 0 if self.elsewhere is None else self.elsewhere.count
        ranks = sum(each.planned.wanted.ranks for each in self.members)
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.admin}/ready") as response:
                        seen = (await response.json())["instances"]
                        engines = {engine_of(InstanceId(each["id"])) for each in seen}
                        enough = len(seen) == ranks if self.elsewhere is None else len(engines) >= count
                        if enough and all(each["state"] == "up" for each in seen):
                            return list(seen)
                await asyncio.sleep(0.2)

    async def _demo(self, model: str) -> None:
        self.board.say(f"\n> {QUESTION}")
        pullers = [each.planned.url for each in self.members if each.planned.wanted.role.decodes]
        show = (lambda _: None) if self.front.as_json else _show
        try:
            demo = await ask(self.endpoint, model, pullers, show)
        except (aiohttp.ClientError, ValueError) as error:
            self.failure = f"the first completion failed: {error}"
            self._stop()
            return
        if self.front.as_json:
            emit({"event": "demo", "text": demo.text, "first_token_s": demo.first_s, "pulled_tokens": demo.pulled})
            return
        print(flush=True)
        self.board.say(
            f"\nfirst token after {demo.first_s * 1000:.0f} ms, whole answer after {demo.total_s:.1f} s; {_way(demo)}"
        )

    # -- events of the programs --

    def _on_event(self, name: str, event: Event) -> None:
        if name == "registry":
            return
        if name == "router":
            self._router_event(event)
        elif name == "controller":
            self._controller_event(event)
        else:
            member = self.members.get(name)
            if member is not None:
                self._engine_event(member, event)

    def _engine_event(self, member: LocalMember, event: Event) -> None:
        name = member.name
        if event.get("event") == "ready":
            member.model = str(event.get("model", ""))
            self.board.update(name, "ready")
            member.ready.set()
            self.started.set()
        elif event.get("event") == "state" and event["state"] != "ready":
            self.board.update(name, str(event["state"]), str(event.get("detail", "")))

    def _controller_event(self, event: Event) -> None:
        if event.get("event") == "ready":
            self.board.update("controller", "ready")
            self.scaled_at(str(event["endpoint"]))
        elif event.get("event") == "scaling":
            self.board.say(str(event.get("said", "")))

    def _router_event(self, event: Event) -> None:
        if event.get("event") != "ready":
            return
        self.endpoint, self.admin = str(event["endpoint"]), str(event["admin"])
        self.front.port, self.front.admin_port = (int(url.rpartition(":")[2]) for url in (self.endpoint, self.admin))
        self.router.argv = baton_words(*self.front.words(), *self.registry.words())  # the same ports after a restart
        self.running.endpoint, self.running.admin = self.endpoint, self.admin
        save(self.running)
        self.board.update("router", "ready")
        self.router_ready.set()

    # -- stopping --

    def _interrupted(self) -> None:
        if self.stopping.is_set():
            self._kill()
        else:
            self.board.say("\nStopping; Ctrl-C again stops at once.")
            self._stop()

    def _stop(self) -> None:
        """Stop the router first: it finishes open requests. After its end no program sends requests, and the engines
        end at once, with all holds.
        """
        if self.stopping.is_set():
            return
        self.stopping.set()
        for program in self._programs():
            if program.running:
                self.board.update(program.name, "stopping")
        self.router.stop()
        if not self.router.running:
            self._stop_engines()
        asyncio.get_running_loop().call_later(DRAIN_S, self._kill)

    def _stop_engines(self) -> None:
        if self.controller is not None:
            self.controller.stop()  # the controller owns the engines, and ends them
        for member in self.members:
            member.program.close()

    def _kill(self) -> None:
        for program in self._programs():
            program.kill()
        if self.registry_program:
            self.registry_program.kill()

    def _programs(self) -> list[Program]:
        controller = [] if self.controller is None else [self.controller]
        return [self.router, *controller, *(member.program for member in self.members)]

    def _verdict(self) -> int:
        if self.failure is None:
            return 0
        print(self.failure, file=sys.stderr)
        return 2 if 2 in self.codes.values() else 1


def _why(program: Program, code: int) -> str:
    said = [line for line in program.last_words if line.strip()]
    return "\n".join([f"{program.name} ended with exit code {code}:", *(f"  {line}" for line in said)])


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _how_to_use(endpoint: str, model: str) -> str:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "{QUESTION}"}}], "stream": true}}'
    curl = f"curl -N {endpoint}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    python = (
        f'OpenAI(base_url="{endpoint}/v1", api_key="none").chat.completions.create('
        f'model="{model}", messages=[{{"role": "user", "content": "{QUESTION}"}}]).choices[0].message.content'
    )
    return f"  {curl}\n\n  from openai import OpenAI; print({python})"


def _way(demo: Demo) -> str:
    """How the first answer was served."""
    if demo.pulled:
        return f"the KV cache of {demo.pulled} prompt tokens went from prefill to decode over NIXL"
    whole = "served whole by one engine, which is cheaper while no other request runs (docs/policy.md)"
    if not demo.proven:
        return whole
    proof = f"prefill handed {demo.proven} prompt tokens over to decode by NIXL, to prove that the text is the same"
    return f"{whole}.\nBefore that, {proof}"
