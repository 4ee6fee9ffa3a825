"""A router that runs out of file descriptors: no engine is blamed, and idle connections end before it comes to that."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import socket
import subprocess
import sys
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from support.fake_engine import FakeEngine
from support.fleet import Fleet, Starter, eventually

from cluster.errors import UsageError
from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from router.api import app
from router.api.config import RouterConfig
from router.fleet.probes import Prober
from router.fleet.view import FleetView
from router.http import questions
from router.http.doors import CLIENTS_MAX
from router.http.legs import Legs
from router.http.upstream import EngineLost, Upstream

ASKED = {"model": "fake", "prompt": "hello", "max_tokens": 5}


async def ask(fleet: Fleet, path: str = "completions") -> tuple[int, dict[str, Any], Any]:
    async with fleet.client.post(f"{fleet.endpoint}/v1/{path}", json={**ASKED, "input": "x"}) as response:
        return response.status, dict(response.headers), await response.json()


async def states(fleet: Fleet) -> list[str]:
    async with fleet.client.get(fleet.admin + "/ready") as response:
        return [each["state"] for each in (await response.json())["instances"]]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_no_descriptor_for_a_leg_is_no_fault_of_an_engine(
    start: Starter, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fleet = await start()
    assert (await fleet.get("/v1/models"))[0] == 200  # the client's connection is there
    engines = list(fleet.engines.values())
    for engine in engines:
        engine.closes, engine.probed = True, 0
    await eventually(lambda: all(engine.probed for engine in engines), "no probe's connection is left for a leg")

    async def none_left(*_: object, **__: object) -> None:
        raise OSError(number, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "create_connection", none_left)
        for _ in range(4):
            status, headers, told = await ask(fleet)
            assert status == 503, told
            assert headers["Retry-After"] == "1"
            assert "file descriptors" in told["error"]["message"]
        assert await states(fleet) == ["up", "up"]
    assert (await ask(fleet))[0] == 200


async def test_no_descriptor_for_a_probe_or_a_relay_is_no_fault_either(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", none_left)
    instance = Instance(id=InstanceId("both-0"), role=Role.BOTH, url="http://127.0.0.1:9")
    view = FleetView()
    view.add(instance)
    view.seen(instance.id, ({"id": "fake"},), None)
    upstream = Upstream()
    await upstream.start()
    try:
        with pytest.raises(EngineLost) as lost:
            await upstream.open(instance, "GET", "/health", None, {})
        assert lost.value.ours
        assert not lost.value.reached
        legs = Legs()
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", none_left)
        prober = Prober(
            view, lambda at, path: questions.ask(legs, at, path, b""), lambda *_, **__: None, read_metrics=False
        )
        for _ in range(10):
            assert not await prober._probe(instance, models=False, paths=False)
        assert view.get(instance.id).up
        legs.close()
    finally:
        await upstream.close()


def limited(*argv: str) -> subprocess.Popen[str]:
    """A `baton` command that may have at most 64 file descriptors."""
    words = ["bash", "-c", 'ulimit -n 64; exec "$0" "$@"', sys.executable, "-m", "baton", *argv]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long  # a process of its own: eight seconds to start on a busy machine
async def test_silent_clients_do_not_keep_others_out() -> None:
    """A hundred connections that send nothing, at a router with 64 file descriptors."""
    async with FakeEngine("both-0") as engine:
        router = limited("router", "--json", "--port", "0", "--admin-port", "0", "--both-url", engine.url)
        silent: list[socket.socket] = []
        try:
            assert router.stdout is not None
            said = json.loads(await asyncio.to_thread(router.stdout.readline))
            address = urlsplit(said["endpoint"])
            silent += [socket.create_connection((address.hostname, address.port)) for _ in range(100)]
            statuses = Counter[int]()
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
                async with asyncio.timeout(30):
                    while statuses[200] < 60:  # within the first second none of the silent is idle for long enough
                        try:
                            async with client.post(f"{said['endpoint']}/v1/completions", json=ASKED) as response:
                                statuses[response.status] += 1
                                told = await response.text()
                                assert response.status == 200 or "--connections-max" in told
                        except aiohttp.ClientConnectionError:
                            statuses[0] += 1
                            await asyncio.sleep(0.05)
                async with client.get(f"{said['admin']}/metrics") as response:
                    metrics = await response.text()
            assert "baton_instance_up{" in metrics
            assert re.search(r"baton_instance_up\{[^}]*\} 1\.0", metrics)
            assert float(re.search(r'connections_ended_total\{what="closed"\} (\S+)', metrics)[1]) > 0  # type: ignore[index]
            assert 0 < float(re.search(r"\nbaton_client_connections_max (\S+)", metrics)[1]) < 30  # type: ignore[index]
        finally:
            router.terminate()
            _, logged = await asyncio.to_thread(router.communicate)
            for each in silent:
                each.close()
    assert router.returncode == 0
    assert "Traceback" not in logged, logged


@pytest.mark.parametrize(("given", "limit"), [(60, 64), (1, 24), (5000, 4096)])
def test_more_connections_than_descriptors_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, given: int, limit: int
) -> None:
    monkeypatch.setattr(app.resource, "getrlimit", lambda _: (limit, limit))
    config = RouterConfig(has_registry=True, connections_max=given)
    with pytest.raises(UsageError, match=rf"--connections-max {given}: .* {limit} files .*ulimit -n"):
        app._guests_max(config)


@pytest.mark.parametrize(("given", "limit", "most"), [(0, 1 << 20, CLIENTS_MAX), (40, 64, 40), (0, -1, CLIENTS_MAX)])
def test_as_many_connections_as_descriptors_allow(
    monkeypatch: pytest.MonkeyPatch, given: int, limit: int, most: int
) -> None:
    monkeypatch.setattr(app.resource, "getrlimit", lambda _: (limit, limit))
    assert app._guests_max(RouterConfig(has_registry=True, connections_max=given)) == most
