"""Router peers: four processes on one port, and a second router. Each answers for all; orders to one hold for all."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.cluster import alive, descendants
from support.redis_server import RedisServer
from support.shared_fleet import Front, SharedFleet, until

from cluster.instance import Role

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SHIPPED = ("prometheus/alerts.yml", "grafana/baton.json")

PROCESSES = 4
ROLES = {Role.PREFILL: 2, Role.DECODE: 3}
START_S, HEARD_S, END_S = 30.0, 15.0, 20.0
"""Generous: five processes start, news come with heartbeats, and a process that lost its parent ends within 7 s."""


class Replicas(SharedFleet):
    """A router of four processes and one of one."""

    @property
    def admins(self) -> dict[str, str]:
        """The admin URL of each router that announces itself, by its name."""
        agent = next(iter(self.agents.values()))
        assert agent.announcer is not None
        return {str(each.id): str(each.beat.agent_url) for each in agent.announcer.routers.snapshot()}

    def pids(self) -> dict[str, int]:
        """The process id of each router, by its name."""
        agent = next(iter(self.agents.values()))
        assert agent.announcer is not None
        return {str(each.id): int(each.beat.where.rpartition(":")[2]) for each in agent.announcer.routers.snapshot()}

    async def begin(self) -> None:
        file = str(self._cluster_file())
        password = str(self.server.command.password_file)
        argv = (sys.executable, "-m", "baton", "router", "--json", "--port", "0", "--admin-port", "0", "--config", file)
        argv = (*argv, "--registry", self.server.url, "--registry-password-file", password, "--drain-s", "5")
        self.fronts = [Front((*argv, "--processes", str(count))) for count in (PROCESSES, 1)]
        for front in self.fronts:
            await asyncio.to_thread(front.read_ready)
        await until(lambda: len(self.admins) == PROCESSES + 1, "all announce themselves", START_S)
        for admin in self.admins.values():
            await self.told(admin, "/ui/data", lambda said: len(said["routers"]) == PROCESSES + 1)
            await self.told(admin, "/ready", lambda said: [each["state"] for each in said["instances"]] == ["up"] * 5)

    async def get(self, admin: str, path: str) -> Any:
        async with self.client.get(admin + path) as answer:
            return await (answer.json() if answer.content_type == "application/json" else answer.text())

    async def told(self, admin: str, path: str, right: Any) -> None:
        """Wait until this router's answer for `path` is right."""
        said: Any = None
        try:
            async with asyncio.timeout(HEARD_S):
                while not right(said := await self.get(admin, path)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"{admin}{path} still says {said}")

    async def change(self, method: str, url: str, **body: Any) -> int:
        async with self.client.request(method, url, json=body) as answer:
            return answer.status

    async def send(self, ids: Sequence[str], router: int) -> Counter[str]:
        """Send requests, each over a connection of its own. Return, by instance, the most that it had at once."""
        self.most.clear()
        room = asyncio.Semaphore(8)

        async def one(name: str) -> None:
            body = {"model": "fake", "prompt": f"[{name}] once upon a time", "max_tokens": 3}
            headers = {"Authorization": "Bearer sk-acme", "X-Request-Id": name, "Connection": "close"}
            async with room, self.client.post(f"{self.fronts[router].endpoint}/v1/completions", json=body,
                                              headers=headers) as answer:  # fmt: skip
                assert answer.status == 200, await answer.text()
                await answer.read()

        await asyncio.gather(*map(one, ids))
        return +self.most


@pytest.fixture
async def replicas(tmp_path: Path) -> AsyncIterator[Replicas]:
    standin = shutil.which("redis-server") is None
    async with Replicas(tmp_path, standin=standin, tenants={"acme": 1.0}, roles=ROLES, places=8) as found:
        await found.begin()
        yield found


def _states(ready: Any) -> dict[str, str]:
    return {each["id"]: each["state"] for each in ready["instances"]}


def _served(metrics: str) -> int:
    lines = [line for line in metrics.splitlines() if line.startswith("baton_requests_total{")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if 'outcome="served"' in line))


@pytest.mark.timeout(120)
async def test_each_router_peer_answers_for_all(replicas: Replicas) -> None:
    await _counts_add_up_and_everything_is_explained(replicas)
    await _rules_and_dashboard_use_metrics_that_exist(replicas)
    await _an_instance_is_quarantined_at_all_routers(replicas)
    await _a_draining_instance_gets_no_request_from_any_router(replicas)
    await _a_dead_process_is_replaced_and_all_end_with_their_parent(replicas)


async def _counts_add_up_and_everything_is_explained(replicas: Replicas) -> None:
    ids = [f"r{number}" for number in range(80)]
    await asyncio.gather(replicas.send(ids[:60], 0), replicas.send(ids[60:], 1))
    admins = replicas.admins
    for admin in admins.values():  # a router counts an answer after it is written: the client may be quicker
        await replicas.told(admin, "/metrics?all=1", lambda text: _served(text) >= len(ids))
    own = {name: _served(await replicas.get(admin, "/metrics")) for name, admin in admins.items()}
    assert sum(own.values()) == len(ids)
    assert all(own.values()), f"the kernel gave each process some connections: {own}"
    listed = (await replicas.get(next(iter(admins.values())), "/explain?n=200"))["requests"]
    assert {each["client_id"] for each in listed} == set(ids)
    one_of = {each["router"]: each["id"] for each in listed}
    assert one_of.keys() == admins.keys()
    for admin in admins.values():
        everybody = await replicas.get(admin, "/metrics?all=1")
        assert (_served(everybody), "baton_routers_silent 0.0" in everybody) == (len(ids), True)
        for router, name in one_of.items():
            story = await replicas.get(admin, f"/explain/{name}")
            assert (story["id"], story["router"], story["state"]) == (name, router, "served")
            assert story["turns"][0]["because"]
    async with replicas.client.get(f"{replicas.fronts[0].endpoint}/metrics") as answer:
        assert answer.status == 403, "these would be the metrics of one process only"


async def _rules_and_dashboard_use_metrics_that_exist(replicas: Replicas) -> None:
    """Every metric of the alert rules and the dashboard is exposed by a router or an agent."""
    asked = {name for file in SHIPPED for name in re.findall(r"\bbaton_[a-z0-9_]+", (DEPLOY / file).read_text())}
    assert len(asked) > 25
    told: set[str] = set()
    for url in (*replicas.admins.values(), *(agent.url for agent in replicas.agents.values())):
        text = await replicas.get(url, "/metrics")
        told |= {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} <= told


async def _an_instance_is_quarantined_at_all_routers(replicas: Replicas) -> None:
    *others, last = replicas.admins.values()
    assert await replicas.change("POST", f"{others[0]}/quarantine/decode-0", because="answers wrong") == 200
    for admin in (*others, last):
        assert await replicas.get(admin, "/quarantine") == {"quarantined": {"decode-0": "answers wrong"}}
    reached = await replicas.send([f"q{number}" for number in range(40)], 0)
    reached += await replicas.send([f"b{number}" for number in range(10)], 1)
    assert reached["decode-0"] == 0
    assert reached["decode-1"] > 0
    assert await replicas.change("DELETE", f"{last}/quarantine/decode-0") == 200
    for admin in others:
        assert await replicas.get(admin, "/quarantine") == {"quarantined": {}}


async def _a_draining_instance_gets_no_request_from_any_router(replicas: Replicas) -> None:
    admins = list(replicas.admins.values())

    async def all_see(state: str) -> None:
        for admin in admins:
            await replicas.told(admin, "/ready", lambda said: _states(said)["decode-1"] == state)

    assert await replicas.change("POST", f"{admins[1]}/drain/decode-1", deadline_s=5) == 202
    await all_see("draining")
    reached = await replicas.send([f"d{number}" for number in range(40)], 0)
    reached += await replicas.send([f"e{number}" for number in range(10)], 1)
    assert reached["decode-1"] == 0
    assert reached["decode-0"] > 0, "its quarantine ended above"
    assert await replicas.change("POST", f"{admins[2]}/resume/decode-1") == 202
    await all_see("up")


async def _a_dead_process_is_replaced_and_all_end_with_their_parent(replicas: Replicas) -> None:
    shared, single = replicas.fronts
    below = descendants(shared.process.pid)
    assert len(below) == PROCESSES
    before = replicas.pids()
    dead = next(name for name, pid in before.items() if pid in below)
    os.kill(before[dead], signal.SIGKILL)
    await until(lambda: bool(replicas.admins.keys() - before.keys()), "another one took its place", START_S)
    new = (replicas.admins.keys() - before.keys()).pop()
    await replicas.told(replicas.admins[new], "/ready", lambda said: said["ready"])
    await replicas.send([f"n{number}" for number in range(20)], 0)

    everybody = descendants(shared.process.pid)
    assert len(everybody) == PROCESSES
    shared.process.kill()
    await until(lambda: not alive(everybody), "nothing outlives the one that holds the port", END_S)
    single.process.terminate()
    assert await asyncio.to_thread(single.process.wait, END_S) == 0


@pytest.mark.timeout(60)
def test_a_stop_ends_all_processes_in_order_and_a_taken_port_is_reported(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, standin=shutil.which("redis-server") is None)
    server.start()
    words = ("--registry", server.url, "--registry-password-file", str(server.command.password_file))
    argv = (sys.executable, "-m", "baton", "router", "--json", "--admin-port", "0", "--processes", "2", *words)
    front = Front((*argv, "--port", "0"))
    try:
        front.read_ready()
        port = front.endpoint.rpartition(":")[2]
        second = subprocess.run((*argv, "--port", port), capture_output=True, text=True, timeout=START_S, check=False)
        assert (second.returncode, second.stdout) == (2, "")
        assert f"cannot listen on 127.0.0.1:{port}" in second.stderr
        below = descendants(front.process.pid)
        assert len(below) == 2
        front.process.terminate()
        assert front.process.wait(END_S) == 0
        assert not alive(below)
    finally:
        front.kill()
        server.kill()
