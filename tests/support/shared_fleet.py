"""A fleet shared by several routers: mocks with real agents in the test's loop, router processes, a registry server.

Grants and bounds are read from the agents; requests are counted where they reach the mocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, cast

import aiohttp
from support.mock import mock_settings
from support.redis_server import RedisServer, start

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.keys import key_line
from cluster.registry.redis import RedisRegistry
from decode.rules import DecodeRules
from engine.agent.agent import Agent
from engine.agent.config import AgentConfig
from engine.mock.fleet import MockFleet
from engine.mock.instance import MockInstance as Mock
from engine.mock.settings import SimpleCosts
from engine.vllm.child import EngineChange, EngineProcess
from engine.vllm.spec import EngineSpec
from engine.vllm.supervise import EngineState
from prefill.rules import PrefillRules

logger = logging.getLogger("baton.fleet")
"""Takes what agents say to people: why one has left."""

STEP_MS = 15.0
"""Milliseconds of a mock's step. An answer of 40 tokens takes 0.6 s, so 36 answers at once hardly load two cores."""

READY_S = 30.0
"""Seconds within which three routers on busy cores have started and have credits."""


class Standing:
    """A stand-in for `EngineProcess`: reports a mock as ready to its agent, and runs until it is stopped."""

    log_path = Path("mock.log")
    model = "fake"

    def __init__(self, mock: Mock, role: Role) -> None:
        port = int(mock.url.rpartition(":")[2])
        self.spec = EngineSpec(
            instance=InstanceId(mock.settings.name), role=role, model="fake", python=sys.executable, device="cpu",
            port=port, side_channel_port=1,
        )  # fmt: skip
        self.agent: Agent | None = None
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        assert self.agent is not None
        for state in (EngineState.STARTING, EngineState.READY):
            self.agent.engine_changed(EngineChange(instance=self.spec.instance, state=state, detail="", epoch=1))
        await self.stopped.wait()

    def stop(self, *, at_once: bool = False) -> None:
        self.stopped.set()


class Front:
    """The process of one router. Its log goes to the test's standard error: a test that fails shows it."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        self.process: subprocess.Popen[bytes] = start(argv, stderr=None)
        self.endpoint = self.name = ""
        self.alive = True

    def read_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the router ended with {self.process.wait(10)}"
        self.endpoint = json.loads(line)["endpoint"]

    def kill(self) -> None:
        """SIGKILL the router and wait for its end."""
        self.alive = False
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=10)


class SharedFleet:
    """The fleet. `async with` starts the registry, mocks and agents, and ends them with routers and clients."""

    def __init__(
        self,
        folder: Path,
        *,
        standin: bool,
        tenants: Mapping[str, float],
        roles: Mapping[Role, int],
        places: int,
        prompt_words: int = 6,
        prefill_ms_per_1k: float = 5.0,
    ) -> None:
        """`places`: credits of each instance. `prompt_words`: words, and about as many tokens, of each prompt."""
        self.server = RedisServer(folder, standin=standin)
        self.folder, self.tenants, self.roles, self.places = folder, tenants, roles, places
        self._prompt = "once " * prompt_words
        self._costs = SimpleCosts(step_ms=STEP_MS, prefill_ms_per_1k=prefill_ms_per_1k)
        self.agents: dict[str, Agent] = {}
        self.fronts: list[Front] = []
        self.most: Counter[str] = Counter()
        """By instance: the most requests that it has had at once."""
        self.served: Counter[str] = Counter()
        """By tenant: requests answered with status 200."""
        self.failed: list[str] = []
        """Errors that clients of running routers received."""
        self._asked: Counter[tuple[str, int]] = Counter()
        """By tenant and router: how many clients are wanted."""
        self._clients: dict[tuple[str, int], list[asyncio.Task[None]]] = {}
        self._number = 0
        self._begun = time.monotonic()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self.server.start()
            stack.callback(self.server.kill)
            settings = [
                mock_settings(f"{role.value}-{number}", role, costs=self._costs)
                for role, count in self.roles.items()
                for number in range(count)
            ]
            mocks = await stack.enter_async_context(MockFleet(settings))
            for mock in mocks.instances.values():
                self._count(mock)
                await self._begin_agent(mock, stack)
            self.client = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._clients.values():
            for client in each:
                client.cancel()
        everybody = [client for each in self._clients.values() for client in each]
        if everybody:
            await asyncio.wait(everybody)
        for front in self.fronts:
            front.kill()
        await self._stack.aclose()

    def _count(self, mock: Mock) -> None:
        """Count the mock's open requests whenever one starts: their number is highest at such a moment."""
        name, serving, frontend = mock.settings.name, mock.serving, mock.frontend
        own = frontend._start

        def begin(*args: Any) -> None:
            own(*args)
            self.most[name] = max(self.most[name], serving.open_requests)

        frontend._start = begin  # type: ignore[misc]

    async def _begin_agent(self, mock: Mock, stack: AsyncExitStack) -> None:
        role = mock.settings.role
        engine = Standing(mock, role)
        registry = RedisRegistry.open(self.server.url, password_file=self.server.command.password_file)
        rules = PrefillRules(legs_max=self.places) if role is Role.PREFILL else DecodeRules(streams_max=self.places)
        agent = Agent(cast("EngineProcess", engine), rules, AgentConfig(), registry, lambda _: None, logger.warning)
        engine.agent = agent
        running = asyncio.ensure_future(agent.run())

        async def end() -> None:
            engine.stopped.set()
            await asyncio.wait({running})
            running.result()

        stack.push_async_callback(end)
        self.agents[mock.settings.name] = agent

    # -- routers --

    async def begin_routers(self, count: int) -> None:
        """Start routers, and wait until every instance has granted credits to each, and the grants keep the limit."""
        file = self._cluster_file()
        argv = (sys.executable, "-m", "baton", "router", "--json", "--port", "0", "--admin-port", "0", "--config")
        words = (str(file), "--registry", self.server.url, "--registry-password-file")
        # A router's own proofs need no credit, and would be counted with its clients' requests.
        last = (str(self.server.command.password_file), "--log-level", "ERROR", "--no-prove-pairs")
        for _ in range(count):
            front = Front((*argv, *words, *last))
            self.fronts.append(front)
        for front in self.fronts:
            await asyncio.to_thread(front.read_ready)
        await until(lambda: all(len(each) == count for each in self.grants().values()), "all have grants", READY_S)
        await until(lambda: all(self.bound(name) <= self.places for name in self.agents), "all go by them", READY_S)
        agent = next(iter(self.agents.values()))
        assert agent.announcer is not None
        names = {member.beat.url: str(member.id) for member in agent.announcer.routers.snapshot()}
        for front in self.fronts:
            front.name = names[front.endpoint]

    def _cluster_file(self) -> Path:
        lines = ["models: [{name: fake}]", "slo: {any: {ttft_ms: 60000}}", "tenants:"]
        (self.folder / "keys").mkdir()
        for name, share in self.tenants.items():
            (self.folder / "keys" / name).write_text(key_line(f"sk-{name}"))
            lines.append(f"  {name}: {{share: {share:g}}}")
        file = self.folder / "baton.yaml"
        file.write_text("\n".join(lines) + "\n")
        return file

    def grants(self) -> dict[str, dict[str, int]]:
        """Credits that each instance has granted to each router."""
        return {name: agent.report.state()["grants"] for name, agent in self.agents.items()}

    def granted(self, router: int) -> int:
        """The credits that a router has of all decode instances together."""
        name = self.fronts[router].name
        return sum(each.get(name, 0) for at, each in self.grants().items() if self.agents[at].spec.role.decodes)

    def bound(self, name: str) -> int:
        """How many legs all routers together can have at an instance at most, as its agent calculates."""
        return self.agents[name].machine.shared.bound

    def credits(self, name: str) -> int:
        """The credits that an instance has now."""
        return self.agents[name].machine.credits

    # -- clients --

    def clients(self, tenant: str, router: int, count: int) -> None:
        """Let so many clients of a tenant send requests to this router, one after the other. Missing clients start;
        surplus clients stop after their current request.
        """
        at = (tenant, router)
        self._asked[at] = count
        clients = self._clients.setdefault(at, [])
        clients[:] = [each for each in clients if not each.done()]
        clients += [asyncio.create_task(self._client(tenant, router, number)) for number in range(len(clients), count)]

    async def _client(self, tenant: str, router: int, number: int) -> None:
        front = self.fronts[router]
        while number < self._asked[tenant, router]:
            self._number += 1
            body = {"model": "fake", "prompt": f"[{self._number}] {self._prompt}", "max_tokens": 40}
            headers = {"Authorization": f"Bearer sk-{tenant}", "x-slo-class": "any"}
            try:
                async with self.client.post(f"{front.endpoint}/v1/completions", json=body, headers=headers) as answer:
                    if answer.status == 200:
                        await answer.read()
                        self.served[tenant] += 1
                    else:
                        self._fail(router, f"{answer.status} {await answer.text()}")
            except aiohttp.ClientError as error:
                if front.alive:
                    self._fail(router, repr(error))
                return  # its router is dead: this client ends

    def _fail(self, router: int, said: str) -> None:
        self.failed.append(f"{time.monotonic() - self._begun:.1f} s: router {router}: {said}")

    async def shares(self, seconds: float) -> tuple[dict[str, float], float]:
        """Measure for so many seconds. Returns each tenant's requests divided by its weight, and requests a second."""
        before, begun = Counter(self.served), time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - begun
        done = {name: self.served[name] - before[name] for name in self.tenants}
        return {name: count / self.tenants[name] for name, count in done.items()}, sum(done.values()) / took_s


async def until(condition: Any, what: str, within_s: float) -> float:
    """Wait for a condition that other tasks make true. Returns how many seconds that took."""
    begun = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.02)
    assert condition(), f"not within {within_s:g} s: {what}"
    return time.monotonic() - begun
