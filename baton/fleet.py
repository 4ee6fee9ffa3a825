"""The programs of one `baton up`: registry, router and agents as children; started, watched, restarted, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from baton.board import Board
from baton.demo import QUESTION, Demo, ask
from baton.local import Event, Program, baton_words, is_free
from baton.output import announce_ready, emit
from baton.plan import LOOPBACK, Planned
from baton.registry_child import RegistryElsewhere
from baton.signals import stopping_signals
from baton.state import Running, log_folder, save
from cluster.errors import BatonError
from kvtransfer.door import introduce_each_other

DRAIN_S = 45.0
"""How long after Ctrl-C the programs may take to end by themselves: an agent's drain, and some seconds."""

RESTARTS_MAX = 5
RESTARTS_WITHIN_S = 600.0
"""A program that was killed is started again, but not for ever: more than this often within this time, and all end."""

PORTS_S = 15.0
"""Longest wait for the ports of something that was killed; a keeper needs 3 s at most."""

PORTS_EVERY_S = 0.1

FINAL_CODES = (0, 1, 2)
"""Exit codes by which a program of ours says that starting it again would not help."""


@dataclass(slots=True, kw_only=True)
class Front:
    """What the router is told, and how this command behaves."""

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


@dataclass(slots=True)
class _Member:
    """One engine of this cluster."""

    planned: Planned
    program: Program
    model: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """One cluster on this machine, from start to stop."""

    def __init__(self, front: Front, planned: list[Planned], running: Running, registry: RegistryElsewhere) -> None:
        self.front = front
        self.running = running
        self.board = Board(front.title, quiet=front.as_json)
        self.registry = registry
        logs = log_folder()
        words = self.registry.words()
        self.members = [
            _Member(
                each,
                Program(
                    each.wanted.name,
                    self._engine_argv(each, words),
                    self._on_event,
                    logs / f"{each.wanted.name}.agent.log",
                ),
            )
            for each in planned
        ]
        self.router = Program("router", baton_words(*front.words(), *words), self._on_event, logs / "router.log")
        argv = self.registry.argv
        self.registry_program = (
            None if argv is None else Program("registry", argv, self._on_event, logs / "registry.log")
        )
        self.router_ready = asyncio.Event()
        self.started = asyncio.Event()
        self.endpoint = self.admin = ""
        self.stopping = asyncio.Event()
        self.failure: str | None = None
        self.codes: dict[str, int] = {}

    @staticmethod
    def _engine_argv(planned: Planned, registry: list[str]) -> list[str]:
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
                later = [self.router, *(member.program for member in self.members)]
                watched = [group.create_task(self._keep(program), name=program.name) for program in later]
                serving = group.create_task(self._serve(), name="serve")
                introducing = group.create_task(self._introduce(), name="introduce")
                await asyncio.wait(watched)
                serving.cancel()
                introducing.cancel()
                if self.registry_program:
                    self.stopping.set()
                    self.registry_program.stop()  # nobody is left who would miss it
        return self._verdict()

    async def _wait_for_registry(self) -> None:
        """Nothing else is worth starting before; when it does not come up, its own `_keep` has said why."""
        try:
            await self.registry.wait_ready()
            self.board.update("registry", "ready")
        except BatonError as error:
            self.failure = self.failure or str(error)
            self._stop()

    def _fill_board(self) -> None:
        self.board.add("registry", self.registry.say)
        self.board.add("router", f"{self.front.host}:{self.front.port}")
        for member in self.members:
            self.board.add(member.planned.wanted.name, f"{member.planned.url} on {member.planned.placed}")

    async def _keep(self, program: Program) -> None:
        """Run one program, again when it is killed; when it fails for good, the cluster ends with it."""
        starts: deque[float] = deque(maxlen=RESTARTS_MAX + 1)
        while True:
            starts.append(time.monotonic())
            code = await program.run()
            self.codes[program.name] = code
            if self.stopping.is_set():
                self.board.update(program.name, "stopped")
                if program is self.router:
                    self._stop_engines()
                return
            if code == 0 and program.name not in ("router", "registry"):
                self.board.update(program.name, "stopped", "it was told to leave")  # an operator's doing, no failure
                return
            flapping = len(starts) > RESTARTS_MAX and starts[-1] - starts[0] < RESTARTS_WITHIN_S
            if code in FINAL_CODES or flapping:
                self.board.update(program.name, "failed", f"exit code {code}")
                self.failure = self.failure or _why(program, code)
                self._stop()
                return
            self.board.update(program.name, "restarting", f"its process ended with {code}")
            await self._wait_for_ports(program)

    async def _wait_for_ports(self, program: Program) -> None:
        """What a killed agent left below it is being ended by its keeper: until then its ports are taken."""
        ports = [port for each in self.members if each.program is program for port in each.planned.ports]
        for _ in range(int(PORTS_S / PORTS_EVERY_S)):
            if all(is_free(LOOPBACK, port) for port in ports):
                return
            await asyncio.sleep(PORTS_EVERY_S)

    async def _introduce(self) -> None:
        """Each time an engine with Baton's connector has started: it may read from the others, and they from it."""
        while True:
            await self.started.wait()
            self.started.clear()
            doors = [each for each in self.members if each.planned.wanted.door and each.ready.is_set()]
            known = [(each.planned.wanted.name, Path(each.planned.wanted.door)) for each in doors]
            try:
                await asyncio.to_thread(introduce_each_other, *known)
            except (OSError, ValueError) as error:  # one of them ends just now: its next start comes by here again
                self.board.say(f"not introduced yet: {error}")

    async def _serve(self) -> None:
        await self.router_ready.wait()
        for member in self.members:
            await member.ready.wait()
        await self._wait_until_routable()
        self.board.settle()
        self._announce(self.members[0].model)
        if self.front.demo:
            await self._demo(self.members[0].model)
        self.board.say("\nServing. Ctrl-C stops everything.")

    def _announce(self, model: str) -> None:
        instances = [
            {"id": each.planned.wanted.name, "role": each.planned.wanted.role.value, "url": each.planned.url}
            for each in self.members
        ]
        if self.front.as_json:
            announce_ready("baton", self.endpoint, as_json=True, admin=self.admin, model=model, instances=instances)
            return
        print(f"\nready baton {self.endpoint}\n", flush=True)
        self.board.say(_how_to_use(self.endpoint, model))

    async def _wait_until_routable(self) -> None:
        """Until the router has heard of everybody."""
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.admin}/ready") as response:
                        seen = (await response.json())["instances"]
                        if len(seen) == len(self.members) and all(each["state"] == "up" for each in seen):
                            return
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
        else:
            self._engine_event(next(each for each in self.members if each.planned.wanted.name == name), event)

    def _engine_event(self, member: _Member, event: Event) -> None:
        name = member.planned.wanted.name
        if event.get("event") == "ready":
            member.model = str(event.get("model", ""))
            self.board.update(name, "ready")
            member.ready.set()
            self.started.set()
        elif event.get("event") == "state" and event["state"] != "ready":
            self.board.update(name, str(event["state"]), str(event.get("detail", "")))

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
        """The router first: it finishes what is open. Once it has ended nobody asks for anything any more, and the
        engines go at once, holds and all.
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
        for member in self.members:
            member.program.close()

    def _kill(self) -> None:
        for program in self._programs():
            program.kill()
        if self.registry_program:
            self.registry_program.kill()

    def _programs(self) -> list[Program]:
        return [self.router, *(member.program for member in self.members)]

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
    return "served whole by one engine, as that costs less while nobody else asks (docs/policy.md)"
