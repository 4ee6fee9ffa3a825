"""The end of a cluster: no process of it is left, however its parent dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from support.cluster import Cluster, alive, descendants, within

from engine.agent.machine import QUIET_S
from engine.vllm.child import STOP_MARGIN_S
from engine.vllm.supervise import SuperviseLimits


@pytest.mark.long
def test_killed_up_leaves_no_orphan(tmp_path: Path, cluster: Cluster) -> None:
    """SIGKILL while engines start: vLLM's own children already run, and their parent cannot stop them any more."""
    other = Cluster.start(tmp_path)
    try:
        within(120, lambda: any(b"EngineCore" in _name(pid) for pid in descendants(other.process.pid)))
        family = descendants(other.process.pid)
        assert len(family) >= 6, "router, two agents, two keepers, two servers, ..."
        other.process.send_signal(signal.SIGKILL)
        other.process.wait(5)
        assert within(10, lambda: not alive(family), lambda: [_name(pid) for pid in alive(family)]) < 10
    finally:
        other.process.kill()
        other.process.wait(5)


async def _stream(cluster: Cluster, tokens: int, begun: asyncio.Event) -> str:
    body = {
        "model": cluster.model,
        "prompt": "Once upon a time",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{cluster.endpoint}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200
        first = await answer.content.readany()
        begun.set()
        return (first + await answer.read()).decode()


@pytest.mark.parametrize("name", [pytest.param("decode-0", marks=pytest.mark.long), "prefill-0"])
async def test_sigterm_drains_an_agent_without_losing_a_request(cluster: Cluster, name: str) -> None:
    """Open streams are finished, new ones go elsewhere, and the agent leaves the registry: zero failed requests."""
    pid = cluster.status()[name]["pid"]
    begun = [asyncio.Event() for _ in range(4)]
    early = [asyncio.ensure_future(_stream(cluster, 400, each)) for each in begun]
    for each in begun:
        await asyncio.wait_for(each.wait(), 60)
    os.kill(pid, signal.SIGTERM)
    late = [asyncio.ensure_future(_stream(cluster, 20, asyncio.Event())) for _ in range(4)]
    texts = await asyncio.gather(*early, *late)
    assert all(text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in texts)
    # vLLM may hang at its end: an engine that does not stop in time is killed, and the agent is gone all the same.
    gone_s = QUIET_S + SuperviseLimits().stop_s + STOP_MARGIN_S + 30
    await asyncio.to_thread(within, gone_s, lambda: not alive({pid}), lambda: _said(cluster, name, pid))
    assert name not in cluster.status()
    assert (await asyncio.to_thread(cluster.baton, "logs", f"{name}.agent", "-n", "5")).stdout.count(
        "stops: drained"
    ) == 1
    del cluster.urls[name]


def _said(cluster: Cluster, name: str, pid: int) -> str:
    """What an agent that does not end says, and its processes."""
    family = [_name(each).replace(b"\0", b" ")[-90:] for each in descendants(pid)]
    return f"{cluster.status().get(name)} {family} {cluster.baton('logs', f'{name}.agent', '-n', '12').stdout}"


def test_ctrl_c_stops_everything(cluster: Cluster) -> None:
    """Must be the last test of all: it ends the shared cluster."""
    family = descendants(cluster.process.pid)
    assert cluster.stop(signal.SIGINT) == 0
    assert not alive(family)
    assert cluster.left_behind() == []


def _name(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(autouse=True)
def _long_enough(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.timeout(240))
