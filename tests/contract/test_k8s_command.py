"""`baton operator` and `baton k8s` as processes, against the API double."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.k8s_api import ApiServer, serving
from support.k8s_json import NS
from support.k8s_nodes import by_part

pytest.importorskip("kubernetes", reason="the kubernetes client is not installed: pip install kubernetes==37.0.2")

from k8s.crd import crds
from k8s.operator.client import ApiClient

ROOT = Path(__file__).resolve().parents[2]
RSS_MIB_MAX = 150
INSTANCES = 100


def kubeconfig(folder: Path, url: str) -> Path:
    file = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NS}}],
        "current-context": "x",
    }
    file.write_text(yaml.safe_dump(config))
    return file


async def baton(*words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton", *words, stdout=pipe, stderr=pipe, cwd=ROOT, env={**os.environ}
    )


@asynccontextmanager
async def started(folder: Path, prefill: int, decode: int) -> AsyncIterator[tuple[ApiServer, Path, Path]]:
    """An API double with one BatonCluster, a kubeconfig for the double, and the file of the BatonCluster."""
    async with serving(time.time) as (server, _, url):
        client = await ApiClient.open(host=url)
        for crd in crds():
            await client.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body=crd)
        pools = {"prefill": {"min": prefill, "max": 100}, "decode": {"min": decode, "max": 100}}
        thing: dict[str, Any] = {
            "apiVersion": "serving.baton.dev/v1alpha1",
            "kind": "BatonCluster",
            "metadata": {"name": "chat", "namespace": NS},
            "spec": {"models": [{"name": "m", "pools": pools}]},
        }
        file = folder / "chat.yaml"
        file.write_text(yaml.safe_dump(thing))
        await client.create(thing)
        yield server, kubeconfig(folder, url), file
        await client.close()


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def test_the_operator_follows_a_hundred_instances_in_little_memory(tmp_path: Path) -> None:
    async with started(tmp_path, INSTANCES // 2, INSTANCES // 2) as (server, config, _):
        process = await baton("operator", "--kubeconfig", str(config), "--namespace", NS, "--port", "0", "--json")
        try:
            assert process.stdout is not None
            async with asyncio.timeout(60):
                ready = json.loads(await process.stdout.readline())
                assert ready["event"] == "ready"
                while len(by_part(server, "instance")) < INSTANCES:
                    await asyncio.sleep(0.05)
                while not server.all("batonclusters")[0].get("status"):
                    await asyncio.sleep(0.05)
            assert rss_mib(process.pid) <= RSS_MIB_MAX
            lease = server.get("leases", "baton-operator")
            assert lease is not None
            assert lease["spec"]["holderIdentity"].endswith(f"_{process.pid}")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                _, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()[-2000:]
            lease = server.get("leases", "baton-operator")
            assert lease is not None
            assert lease["spec"]["holderIdentity"] == "", "given away: the next one need not wait"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_diff_says_what_would_change_and_doctor_what_is_missing(tmp_path: Path) -> None:
    async with started(tmp_path, 1, 1) as (_, config, file):
        diff = await baton("k8s", "diff", "-f", str(file), "--kubeconfig", str(config), "--namespace", NS)
        out, errors = await diff.communicate()
        assert diff.returncode == 1, errors.decode()
        assert "# chat: apply Deployment chat-decode-0: starts with 1" in out.decode()
        doctor = await baton("k8s", "doctor", "--kubeconfig", str(config), "--namespace", NS, "--json")
        out, errors = await doctor.communicate()
        told = [json.loads(line) for line in out.splitlines()]
        assert told[0]["what"] == "API server", errors.decode()
        assert doctor.returncode == 1


async def test_diff_tells_what_is_wrong_with_each_resource_and_goes_on(tmp_path: Path) -> None:
    """It once said "nothing to do" of a spec with errors, and ended in a traceback at a resource without a name."""
    async with started(tmp_path, 1, 1) as (_, config, file):
        good = yaml.safe_load(file.read_text())
        nameless = {**good, "metadata": {"namespace": NS}}
        wrong = {**good, "metadata": {"name": "wrong"}, "spec": {**good["spec"], "limits": {"stall_s": -1}}}
        file.write_text(yaml.safe_dump_all([nameless, wrong, {**good, "metadata": {"name": "last"}}]))
        diff = await baton("k8s", "diff", "-f", str(file), "--kubeconfig", str(config), "--namespace", NS)
        out, errors = await diff.communicate()
        assert diff.returncode == 1
        for word in ("metadata.name", "is missing", "write a name", "limits.stall_s", "-1"):
            assert word in errors.decode()
        told = out.decode()
        assert "# wrong: not acted on, because of 1 error: correct what stands on stderr" in told
        assert "# last: apply Deployment last-decode-0: starts with 1" in told
        assert "nothing to do" not in told


async def test_diff_names_the_secret_that_another_resource_has(tmp_path: Path) -> None:
    """The operator makes no plan then, and `baton k8s diff` once said "nothing to do"."""
    async with started(tmp_path, 1, 1) as (server, config, file):
        labels = {"serving.baton.dev/cluster": "chat"}
        metadata = {"name": "chat-internal", "namespace": NS, "labels": labels}
        client = await ApiClient.open(str(config))
        await client.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
        await client.close()
        diff = await baton("k8s", "diff", "-f", str(file), "--kubeconfig", str(config), "--namespace", NS, "--json")
        out, errors = await diff.communicate()
        assert diff.returncode == 1, errors.decode()
        (event,) = [json.loads(line) for line in out.splitlines()]
        assert (event["event"], event["cluster"], event["reason"]) == ("obstacle", "chat", "NameTaken")
        assert event["because"].startswith("Secret chat-internal is there and is not this resource's: rename or delete")
        assert server.all("deployments") == []


async def test_diff_goes_on_after_a_refused_request_and_says_that_a_resource_is_paused(tmp_path: Path) -> None:
    async with started(tmp_path, 1, 1) as (server, config, file):
        good = yaml.safe_load(file.read_text())
        paused = {**good, "spec": {**good["spec"], "kubernetes": {"paused": True}}}
        file.write_text(yaml.safe_dump_all([paused, {**paused, "metadata": {"name": "other"}}]))
        told = []
        for hidden in ((), ("deployments",)):
            server.hidden.update(hidden)
            diff = await baton("k8s", "diff", "-f", str(file), "--kubeconfig", str(config), "--namespace", NS)
            out, errors = await diff.communicate()
            assert diff.returncode == len(hidden), errors.decode()
            told += out.decode().splitlines()
        names, reason = ("chat", "other"), "it is paused by kubernetes.paused"
        assert told[:2] == [f"# {name}: nothing to do: {reason}" for name in names]
        for name, line in zip(names, told[2:], strict=True):
            assert line.startswith(
                f"# {name}: cannot be followed in full (Refused): the API server refuses a request: "
            )
            assert line.endswith("; `baton k8s doctor` names missing rights")
