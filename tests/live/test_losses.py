"""Engines and agents die under load. Requests that do not stream yet succeed on another instance, streams that can be
repeated go on there, and what died starts again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support import device
from support.cluster import Cluster, alive, descendants, processes, within
from support.tickets import GuardedUrl, ticketed

from engine.vllm.canary import STILL_S, STUCK_CPU_S
from engine.vllm.command import CPU_KV_LEASE_S

DEADLINE_S = 300.0
"""Seconds that the router allows for a first token. No request may take longer."""

BACK_S = 180.0
"""Seconds. An engine starts again in 20 s on an idle machine; here two engines do so at once."""


@dataclass
class Outcome:
    """How one request of the load ended."""

    seconds: float
    status: int = 0
    broken: bool = False
    """The stream ended with an error event, or without its end."""
    greedy: dict[str, Any] | None = None
    """The request, where its answer can be repeated: such a stream never breaks."""
    text: str = ""


def told_in(events: str) -> str:
    """The text of a stream."""
    parts = [json.loads(event.removeprefix("data: ")) for event in events.strip().split("\n\n")[:-1]]
    return "".join(part["choices"][0]["text"] for part in parts)


@dataclass
class Load:
    """Streams and answers in one piece, four at a time, without a pause."""

    cluster: Cluster
    outcomes: list[Outcome] = field(default_factory=list)
    running: bool = True
    going: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while engines start again, because two cores are few for that alone."""

    async def one(self, session: aiohttp.ClientSession, number: int, *, stream: bool) -> None:
        body = {"model": self.cluster.model, "prompt": f"{number}: once upon a time a fox", "max_tokens": 24,
                "stream": stream, "ignore_eos": True}  # fmt: skip
        greedy = {**body, "max_tokens": 64, "temperature": 0} if stream and number % 4 == 0 else None
        body = greedy or body
        started = time.monotonic()
        outcome = Outcome(0.0, greedy=greedy)
        try:
            async with session.post(f"{self.cluster.endpoint}/v1/completions", json=body) as answer:
                outcome.status = answer.status
                text = (await answer.read()).decode()
                outcome.broken = stream and ('"error"' in text or not text.endswith("data: [DONE]\n\n"))
                outcome.text = told_in(text) if stream and not outcome.broken else ""
        except (aiohttp.ClientError, TimeoutError):
            outcome.broken = True
        outcome.seconds = time.monotonic() - started
        self.outcomes.append(outcome)

    async def keep_asking(self, session: aiohttp.ClientSession, first: int) -> None:
        number = first
        while self.running:
            await self.going.wait()
            await self.one(session, number, stream=number % 2 == 0)
            number += 7

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        limit = aiohttp.ClientTimeout(total=DEADLINE_S + 5)
        async with aiohttp.ClientSession(timeout=limit) as session, asyncio.TaskGroup() as group:
            for first in range(4):
                group.create_task(self.keep_asking(session, first))
            self.going.set()
            try:
                yield
            finally:
                self.running = False
                self.going.set()

    async def rest_until(self, condition: Callable[[], bool]) -> None:
        """Send no new requests until this holds."""
        self.going.clear()
        await asyncio.to_thread(within, BACK_S, condition)
        self.going.set()

    async def served(self, more: int) -> None:
        """Wait until so many more requests have been answered."""
        until = len(self.outcomes) + more
        async with asyncio.timeout(60):
            while len(self.outcomes) < until:
                await asyncio.sleep(0.05)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        told: dict[str, Any] = json.loads(answer.read())
    return told


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "victims",
    [
        pytest.param([("decode-0", "server")], id="engine"),
        pytest.param(  # two engines start again on two cores: two minutes
            [("prefill-0", "core"), ("decode-0", "server")], id="engines", marks=pytest.mark.long
        ),
        pytest.param(
            [("both-0", "agent")], id="agent", marks=pytest.mark.long
        ),  # the agent's engine starts again: a minute
    ],
)
async def test_killed_engines_and_agents_are_survived(
    cluster: Cluster, victims: list[tuple[str, str]], pytestconfig: pytest.Config
) -> None:
    """SIGKILL for a decode engine; for a prefill engine and then, while it is away, a decode engine; for an agent."""
    await survives(cluster, victims, early=pytestconfig.getoption("--connector") != "nixl")


@pytest.mark.long
@pytest.mark.timeout(700)
async def test_the_default_policy_survives_too_and_changes_no_answer(tmp_path: Path) -> None:
    """Other live tests have a router that hands over whenever it can. The default serves most requests of this model
    whole, and hands over some.
    """
    with Cluster.of(tmp_path, device.example()) as as_it_starts:
        await survives(as_it_starts, [("decode-0", "server")], early=False)


async def survives(cluster: Cluster, victims: list[tuple[str, str]], *, early: bool) -> None:
    """Kill these processes under load. No request fails before it streams, and answers are an engine's own.

    `early`: decode legs that are sent while P computes are among what is struck, as these engines take them and the
    router hands all over. It pulls eight in a row to compare, so some are waited for.
    """
    legs = await asyncio.to_thread(cluster.router_total, "baton_early_legs_total")
    before = {name: each["epoch"] for name, each in cluster.status().items()}
    load = Load(cluster)
    async with load.flowing():
        for _ in range(8):
            await load.served(8)
            sent = await asyncio.to_thread(cluster.router_total, "baton_early_legs_total") - legs
            if sent or not early:
                break
        for name, part in victims:
            os.kill((await asyncio.to_thread(processes, cluster, name))[part], signal.SIGKILL)
            if part != "agent":
                await load.served(8)
            told = (await asyncio.to_thread(cluster.status)).get(name)  # None: nobody has the name any more
            assert told is None or told["state"] != "ready", "status tells the truth"
        await load.served(8)
        await load.rest_until(cluster.all_ready)
        await load.served(8)
    legs = await asyncio.to_thread(cluster.router_total, "baton_early_legs_total") - legs
    print(f"{len(load.outcomes)} requests; early legs: {sent:.0f} before the first kill, {legs:.0f} in all")
    assert not early or sent > 0, "early legs are among what is struck"
    after = {name: each["epoch"] for name, each in cluster.status().items()}
    assert all(after[name] > before[name] for name, _ in victims), "each came back under a new epoch"
    failed = [each for each in load.outcomes if each.status != 200]
    assert not failed, f"{len(failed)} of {len(load.outcomes)} failed before they streamed: {failed[:3]}"
    assert max(each.seconds for each in load.outcomes) < DEADLINE_S + 1
    repeatable = [each for each in load.outcomes if each.greedy is not None]
    assert not [each for each in repeatable if each.broken], "a stream that can be repeated goes on elsewhere"
    asked = [{**(each.greedy or {}), "stream": False} for each in repeatable]
    with ThreadPoolExecutor(8) as pool:
        alone = pool.map(lambda body: post(f"{cluster.urls['decode-0']}/v1/completions", body), asked)
        assert [each.text for each in repeatable] == [each["choices"][0]["text"] for each in alone]
    broken = sum(each.broken for each in load.outcomes)
    assert broken <= 4 * len(victims), "only sampled streams from a dying engine may break"
    # With vLLM's own connector, a hold for an engine that died while it read ends only with its lease.
    await asyncio.to_thread(within, CPU_KV_LEASE_S + 10.0, cluster.idle)


@pytest.mark.long  # ten minutes until it counts as lost on CPUs, and then a start
@pytest.mark.timeout(1200)
def test_a_core_that_stands_still_behind_a_healthy_api_is_started_again(cluster: Cluster) -> None:
    """SIGSTOP for an engine core alone: /health answers 200 all the time, and the engine looks idle."""
    core = processes(cluster, "decode-0")["core"]
    before = cluster.status()["decode-0"]["epoch"]
    os.kill(core, signal.SIGSTOP)
    with urllib.request.urlopen(f"{cluster.urls['decode-0']}/health", timeout=10) as answer:
        assert answer.status == 200
    agent = cluster.status()["decode-0"]["agent"]

    def detail() -> str:
        with urllib.request.urlopen(f"{agent}/state", timeout=10) as answer:
            return str(json.loads(answer.read())["detail"])

    within(STILL_S + STUCK_CPU_S + 60, lambda: "its core has made no token and changed no counter" in detail())
    within(10, lambda: not alive({core}))
    within(BACK_S, cluster.all_ready)
    assert cluster.status()["decode-0"]["epoch"] > before
    asked = {"model": cluster.model, "prompt": "Once upon a time", "max_tokens": 4}
    assert post(f"{cluster.urls['decode-0']}/v1/completions", asked)["choices"]


def test_killed_registry_is_survived(cluster: Cluster) -> None:
    """The router serves on with what it knows. When the registry is back, all instances announce themselves again."""
    (registry,) = [pid for pid in descendants(cluster.process.pid) if _is_registry(pid)]
    os.kill(registry, signal.SIGKILL)
    body = {"model": cluster.model, "prompt": "Once upon a time", "max_tokens": 4}
    for _ in range(5):
        assert post(f"{cluster.endpoint}/v1/completions", body)["choices"]
    within(30, cluster.all_ready, lambda: cluster.baton("status").stdout)


def _is_registry(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"keeper" not in words and (b"redis-server" in words or b"cluster.registry.standin" in words)


def test_drain_waits_for_a_hold_and_can_be_taken_back(cluster: Cluster) -> None:
    """A hold that is not pulled yet keeps a draining prefill instance from being drained; the pull ends that."""
    agent = cluster.status()["prefill-0"]["agent"]
    leg = {"model": cluster.model, "prompt": "Once upon a time " * 30, "max_tokens": 1,
           "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}  # fmt: skip
    prefill, decode = GuardedUrl.of(cluster, "prefill-0"), GuardedUrl.of(cluster, "decode-0")
    hold = post(f"{prefill}/v1/completions", ticketed(prefill, leg))["kv_transfer_params"]
    post(f"{agent}/drain", {"deadline_s": 60})
    told = cluster.status()["prefill-0"]
    assert (told["state"], told["drained"]) == ("draining", False)
    assert "holds of" in within_detail(cluster, "holds of")
    body = {"model": cluster.model, "prompt": "Once upon a time", "max_tokens": 4}
    for _ in range(4):
        assert post(f"{cluster.endpoint}/v1/completions", body)["choices"], "the other instances serve on"
    pull = {**leg, "max_tokens": 2, "kv_transfer_params": hold}
    post(f"{decode}/v1/completions", ticketed(decode, pull))
    within(10, lambda: bool(cluster.status()["prefill-0"]["drained"]))
    post(f"{agent}/resume", {})
    within(10, cluster.all_ready)


def within_detail(cluster: Cluster, words: str) -> str:
    within(5, lambda: words in cluster.status()["prefill-0"]["detail"])
    return str(cluster.status()["prefill-0"]["detail"])


def test_status_and_logs(cluster: Cluster) -> None:
    shown = cluster.baton("status")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for name in cluster.urls:
        assert name in shown.stdout
    assert cluster.endpoint in shown.stdout
    assert "prefill-0" in cluster.baton("logs").stdout
    assert "vllm" in cluster.baton("logs", "prefill-0", "-n", "200").stdout.lower()
    wrong = cluster.baton("logs", "prefil-0")
    assert wrong.returncode == 2
    assert "do you mean" in wrong.stderr


def test_doctor_looks_at_a_running_engine(cluster: Cluster) -> None:
    done = cluster.baton("doctor", "--engine", cluster.urls["both-0"], "--json")
    told = {each["what"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0, told
    assert told["Prefill leg"]["verdict"] == "note"
    assert "guarded" in told["Prefill leg"]["found"], "the engine takes no leg without the router's ticket"
    assert told["Abort by id"]["verdict"] == "ok"
