"""Requests through a cluster that the operator makes of local processes: none fails in resizes and rollouts."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.k8s_api import ApiServer, serving
from support.k8s_json import NS
from support.k8s_nodes import FakeFleet, Nodes, by_part
from support.k8s_processes import Processes
from support.redis_server import RedisServer

pytest.importorskip("kubernetes", reason="the kubernetes client is not installed: pip install kubernetes==37.0.2")

from baton.k8s_scaling import Controllers
from cluster.ids import InstanceId
from k8s.crd import crds
from k8s.crd.names import API_VERSION
from k8s.operator import controller
from k8s.operator.client import ApiClient
from k8s.operator.controller import Operator, OperatorSettings
from k8s.operator.fleet import HttpFleet
from k8s.operator.scaling import ScalingBoard
from k8s.operator.secrets import access, keys_in
from k8s.plan import Images
from k8s.plan.observe import INSTANCE, is_true
from kvtransfer.keys import instance_text

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LIMIT_S = 180.0


class Load:
    """Sends streams, one at a time for each `run`, to the routers that are Ready, by turns."""

    def __init__(self, session: aiohttp.ClientSession, routers: Callable[[], list[str]]) -> None:
        self.session = session
        self.routers = routers
        self.seen: Counter[str] = Counter()
        self.paused = False
        self.open = 0

    async def run(self, number: int) -> None:
        count = 0
        while True:
            count += 1
            addresses = self.routers()
            if addresses and not self.paused:
                self.open += 1
                self.seen[await self._one(addresses[count % len(addresses)], f"{number} {count}")] += 1
                self.open -= 1
            await asyncio.sleep(0.1)

    async def _one(self, address: str, words: str, tokens: int = 40, times: int = 30) -> str:
        body = {"model": "mock", "prompt": f"count {words} " * times, "max_tokens": tokens, "stream": True}
        try:
            async with (
                asyncio.timeout(60),
                self.session.post(f"http://{address}:8000/v1/completions", json=body) as answer,
            ):
                text = (await answer.read()).decode()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        if answer.status != 200:
            return f"{answer.status}: {text[:200]}"
        return "ok" if "[DONE]" in text and '"error"' not in text else f"broken: {text[-300:]}"


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[ApiServer, ApiClient, Processes, Load]]:
    registry = RedisServer(folder, standin=True)
    registry.start()
    async with serving(time.time) as (server, _, url), aiohttp.ClientSession() as session:
        client = await ApiClient.open(host=url)
        for crd in crds():
            await client.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body=crd)
        data = {"keys.registry": b64encode(registry.password.encode()).decode()}
        metadata = {"name": "chat-files", "namespace": NS}
        await client.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        processes = Processes(server, folder / "pods", session)
        controllers = Nodes(server, FakeFleet(), controls_only=True)
        images = Images(engine="e:1", router="r:1", redis="d")
        board = ScalingBoard()
        operator = Operator(
            client, HttpFleet(session), OperatorSettings(namespace=NS, images=images, board=board), time.time
        )
        controllers_of = Controllers(operator, board, client, time.monotonic)
        load = Load(session, lambda: processes.address_of("router"))
        loop = asyncio.get_running_loop()
        work = (
            processes.run(),
            controllers.run(),
            operator.run(),
            controllers_of.run(),
            *(load.run(number) for number in range(3)),
        )
        tasks = [loop.create_task(each) for each in work]
        tasks[2].set_name("operator")
        pools = {role: {"min": 1, "max": 6} for role in ("prefill", "decode")}
        spec = {
            "models": [{"name": "meta-llama/Llama-3.1-8B", "served_name": "mock", "pools": pools}],
            "registry": {"url": registry.url, "password_file": "keys/registry"},
            "kubernetes": {"engine": "mock", "routers": 2, "drain_s": 30},
        }
        metadata = {"name": "chat", "namespace": NS}
        made = {"apiVersion": API_VERSION, "kind": "BatonCluster", "metadata": metadata, "spec": spec}
        await client.create(made)
        try:
            yield server, client, processes, load
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.wait(tasks)
            await client.close()
            registry.kill()


async def settled(server: ApiServer, prefill: int, decode: int) -> None:
    def holds() -> bool:
        (thing,) = server.all("batonclusters")
        status = thing.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        whole = (status.get("prefill"), status.get("decode")) == (f"{prefill}/{prefill}", f"{decode}/{decode}")
        fresh = status.get("observedGeneration") == thing["metadata"]["generation"]
        return whole and fresh and conditions.get("Progressing") == "False"

    try:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"not settled: {server.all('batonclusters')[0].get('status')}") from None


def reason(server: ApiServer, kind: str) -> str:
    """The reason in this condition of the BatonCluster."""
    (thing,) = server.all("batonclusters")
    return next(str(each["reason"]) for each in thing["status"]["conditions"] if each["type"] == kind)


async def states(server: ApiServer, processes: Processes) -> dict[str, Any]:
    """The `/state` of every instance's agent, by pod, requested as the operator does; None: no answer."""
    named = {name: server.get("secrets", name) for name in ("chat-internal", "chat-ticket-keys")}
    given = access(named["chat-internal"], named["chat-ticket-keys"])
    fleet = HttpFleet(processes.session)
    pods = [each for each in server.all("pods") if INSTANCE in each["metadata"]["labels"]]
    return {each["metadata"]["name"]: await fleet._agent("GET", each, "/state", given) for each in pods}


async def nothing_is_held(server: ApiServer, processes: Processes, load: Load) -> None:
    """Check that no instance keeps a KV block once no request is open, well before a hold's lease would expire."""
    async with asyncio.timeout(30):  # first wait for a load above zero: agents do report it
        while not any(
            each is not None and any(each["load"].values()) for each in (await states(server, processes)).values()
        ):
            await asyncio.sleep(0.05)
    load.paused = True
    async with asyncio.timeout(60):
        while load.open:
            await asyncio.sleep(0.05)
    try:
        async with asyncio.timeout(10):
            while True:
                said = await states(server, processes)
                assert said
                if all(each is not None and not any(each["load"].values()) for each in said.values()):
                    break
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError({name: each and each["load"] for name, each in said.items()}) from None
    load.paused = False


async def heard_by_routers(server: ApiServer, processes: Processes) -> list[dict[str, Any]]:
    """The `/ui/data` of every router."""
    key = access(server.get("secrets", "chat-internal"), None).admin
    found = []
    for router in processes.address_of("router"):
        headers = {"Authorization": f"Bearer {key}"}
        async with processes.session.get(f"http://{router}:8001/ui/data", headers=headers) as answer:
            found.append(await answer.json())
    return found


async def stranger(
    server: ApiServer, processes: Processes, load: Load, folder: Path, name: str, keys: str | None
) -> bool:
    """Start an instance that has the registry's password. Returns whether every router accepts it as an instance.

    `keys`: the contents of its ticket key file; None: it has no such file.
    """
    pod = next(each for each in server.all("pods") if "-decode-" in each["metadata"]["name"])
    home = folder / "pods" / pod["metadata"]["name"]
    words = [*pod["spec"]["containers"][0]["command"][1:]]
    at = words.index("--ticket-keys-file")
    words[at : at + 2] = []
    variables = {"$(POD_IP)": f"127.0.8.{len(name)}", "$(NODE_NAME)": "elsewhere", "$(BATON_INSTANCE)": name}
    words = [
        variables.get(word, word.replace("/etc/", f"{home}/etc/").replace("/run/", f"{home}/run/")) for word in words
    ]
    if keys is not None:
        (folder / name).write_text(keys)
        words += ["--ticket-keys-file", str(folder / name)]
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton", *words, stdout=file, stderr=file, env={**os.environ}
        )
    try:
        async with asyncio.timeout(60):
            while b'"ready"' not in log.read_bytes():
                await asyncio.sleep(0.2)
                assert process.returncode is None, log.read_text()
        before = load.seen["ok"]
        async with asyncio.timeout(60):
            while load.seen["ok"] < before + 20:
                await asyncio.sleep(0.1)
        heard = [{str(each["id"]) for each in word["instances"]} for word in await heard_by_routers(server, processes)]
        assert heard
        assert all(heard), "routers tell which instances they know"
        return all(name in each for each in heard)
    finally:
        process.terminate()
        await process.wait()


async def test_no_request_fails_in_resize_rollout_revert_and_node_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "BUSY_S", 0.5)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    async with cluster(tmp_path) as (server, client, processes, load):
        await settled(server, 1, 1)
        load.seen.clear()  # while nothing had come up, 503 was right
        async with asyncio.timeout(30):
            while not all(word["scaling"] for word in await heard_by_routers(server, processes)):
                await asyncio.sleep(0.2)
        assert reason(server, "Scaling") == "Controller"
        spec: dict[str, Any] = {"cluster": "chat", "pool": "decode", "replicas": 2}
        metadata = {"name": "chat-decode", "namespace": NS}
        await client.create({"apiVersion": API_VERSION, "kind": "BatonPool", "metadata": metadata, "spec": spec})
        await settled(server, 1, 2)
        for replicas in (6, 1):
            await client.merge(API_VERSION, "BatonPool", NS, "chat-decode", {"spec": {"replicas": replicas}})
            await settled(server, 1, replicas)
            assert load.seen.keys() == {"ok"}, load.seen
        assert reason(server, "Scaling") == "ScalingExternal"
        await nothing_is_held(server, processes, load)
        assert not await stranger(server, processes, load, tmp_path, "chat-decode-77", None)
        fleet = keys_in(server.get("secrets", "chat-ticket-keys") or {})
        own = instance_text(fleet, InstanceId("chat-decode-778"))
        assert await stranger(server, processes, load, tmp_path, "chat-decode-778", own), "it is the key that decides"
        before = set(by_part(server, "instance"))
        await client.merge(API_VERSION, "BatonCluster", NS, "chat", {"spec": {"kubernetes": {"image": "e:2"}}})
        while set(by_part(server, "instance")) == before:
            await asyncio.sleep(0.05)
        await client.merge(API_VERSION, "BatonCluster", NS, "chat", {"spec": {"kubernetes": {"image": None}}})
        await settled(server, 1, 1)
        assert load.seen.keys() == {"ok"}, load.seen
        assert set(by_part(server, "instance")) == before, "a revert keeps those that served"
        await client.merge(API_VERSION, "BatonCluster", NS, "chat", {"spec": {"kubernetes": {"image": "e:3"}}})
        await settled(server, 1, 1)
        assert not set(by_part(server, "instance")) & before
        assert load.seen.keys() == {"ok"}, load.seen
        router = processes.address_of("router")
        promise = {"slo": {"fast": {"ttft_ms": 5000}}}
        await client.merge(API_VERSION, "BatonCluster", NS, "chat", {"spec": promise})
        async with asyncio.timeout(LIMIT_S):
            while set(processes.address_of("router")) & set(router) or not processes.address_of("router"):
                await asyncio.sleep(0.1)
        await settled(server, 1, 1)
        assert load.seen.keys() == {"ok"}, load.seen
        assert load.seen["ok"] >= 30
        assert {code for _, code in processes.ended} == {0}, processes.ended
        await nothing_is_held(server, processes, load)
        await client.merge(API_VERSION, "BatonPool", NS, "chat-decode", {"spec": {"replicas": 2}})
        await settled(server, 1, 2)
        await a_node_is_lost(server, processes, load)
        await last_streams_end(server, client, processes, load)


async def a_node_is_lost(server: ApiServer, processes: Processes, load: Load) -> None:
    """One of two decode instances dies and comes back. Only streams that were open at that moment may fail."""
    lost = next(each for each in server.all("pods") if "-decode-" in each["metadata"]["name"])
    name = lost["metadata"]["labels"][INSTANCE]
    before = Counter(load.seen)
    before_open = load.open
    await processes.lose(lost["metadata"]["name"])
    async with asyncio.timeout(LIMIT_S):
        while not any(
            each["metadata"]["labels"].get(INSTANCE) == name
            and each["metadata"]["uid"] != lost["metadata"]["uid"]
            and is_true(each, "Ready")
            for each in server.all("pods")
        ):
            await asyncio.sleep(0.1)
    await settled(server, 1, 2)
    failed = load.seen - before
    del failed["ok"]
    assert failed.total() <= before_open, f"only streams that ran on the lost node may end: {failed}"
    load.seen = Counter(ok=load.seen["ok"])


async def last_streams_end(server: ApiServer, client: ApiClient, processes: Processes, load: Load) -> None:
    """The BatonCluster is deleted while streams run: each stream ends well, and then every pod ends."""
    load.paused = True
    async with asyncio.timeout(60):
        while load.open:
            await asyncio.sleep(0.05)
    processes.ended.clear()
    loop = asyncio.get_running_loop()
    address = processes.address_of("router")[0]
    streams = [loop.create_task(load._one(address, f"last {number}", tokens=300)) for number in range(3)]
    async with asyncio.timeout(30):
        while not any(
            each is not None and each["load"]["running"] for each in (await states(server, processes)).values()
        ):
            await asyncio.sleep(0.05)
    await client.delete(API_VERSION, "BatonCluster", NS, "chat")
    assert await asyncio.gather(*streams) == ["ok"] * 3
    async with asyncio.timeout(60):
        while server.all("pods"):
            await asyncio.sleep(0.1)
    assert {code for _, code in processes.ended} == {0}, processes.ended


@pytest.mark.parametrize("at_once", [False, True], ids=["in order", "at once"])
async def test_a_deleted_cluster_answers_all_that_it_had_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """The operator is dead and the BatonCluster is deleted while streams run, prompts are computed and requests wait.
    Each is answered in full, because instances are told to end after the last router (docs/decisions/0010).

    `at_once`: all pods are told to end at the same moment, as if their namespace were deleted, or with
    `--cascade=foreground`. Then instances linger: they take work for a while longer.
    """
    monkeypatch.setattr(controller, "BUSY_S", 0.5)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    async with cluster(tmp_path) as (server, client, processes, load):
        await settled(server, 1, 1)
        load.paused = True
        for task in asyncio.all_tasks():
            if task.get_name() == "operator":
                task.cancel()
        async with asyncio.timeout(60):
            while load.open:
                await asyncio.sleep(0.05)
        loop = asyncio.get_running_loop()
        addresses = processes.address_of("router")
        streams = [loop.create_task(load._one(addresses[0], f"stream {each}", tokens=400)) for each in range(4)]
        await running(server, processes, 4)
        long = [
            loop.create_task(load._one(addresses[each % len(addresses)], f"long {each}", times=5000))
            for each in range(12)
        ]
        await asyncio.sleep(0.7)  # some are prefilled, some wait for it
        assert not any(each.done() for each in long), "all of them are on their way"
        processes.ended.clear()
        if at_once:
            end_all(server)
        else:
            await client.delete(API_VERSION, "BatonCluster", NS, "chat")
        said = Counter(await asyncio.gather(*streams, *long))
        assert said == {"ok": 16}, said
        async with asyncio.timeout(60):
            while server.all("pods"):
                await asyncio.sleep(0.1)
        assert {code for _, code in processes.ended} == {0}, processes.ended


def end_all(server: ApiServer) -> None:
    for each in server.all("deployments"):
        server.remove("deployments", each)
    for each in server.all("pods"):
        server.delete(server.kinds["pods"], each, {})


async def running(server: ApiServer, processes: Processes, count: int) -> None:
    """Wait until engines run at least `count` requests."""
    async with asyncio.timeout(30):
        while True:
            said = [each for each in (await states(server, processes)).values() if each is not None]
            if sum(each["load"]["running"] for each in said) >= count:
                return
            await asyncio.sleep(0.05)
