"""Runs pods as processes of this machine. Each has its own loopback address, and a folder for its files."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from base64 import b64decode
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from support.k8s_api import ApiServer, Json

from k8s.plan.observe import is_true

STEP_S = 0.1
PRE_STOP_STEPS = 10
_numbers = itertools.count(2)


SHARED_ADDRESSES = (["--host", "::"], ["--admin-host", "127.0.0.1"])
"""Addresses that each pod has for itself, and processes of one machine share: here a pod does without them."""


@dataclass
class Running:
    process: asyncio.subprocess.Process
    address: str
    stop_steps: int | None = None
    told: bool = False


class Processes:
    """A kubelet whose containers are children of this process."""

    def __init__(self, server: ApiServer, folder: Path, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.folder = folder
        self.session = session
        self.running: dict[str, Running] = {}
        self.ended: list[tuple[str, int]] = []
        """Names and exit codes of pods that had started and were told to end."""

    async def run(self) -> None:
        try:
            while True:
                for pod in self.server.all("pods"):
                    await self._look(pod)
                async with self.server.changed:
                    self.server.changed.notify_all()
                await asyncio.sleep(STEP_S)
        finally:
            for each in list(self.running.values()):
                with suppress(ProcessLookupError):
                    each.process.kill()
                await each.process.wait()

    def address_of(self, part: str) -> list[str]:
        """Addresses of the Ready pods of one part, as a Service would list them."""
        ready = [
            each
            for each in self.server.all("pods")
            if each["metadata"]["labels"].get("serving.baton.dev/part") == part
            and is_true(each, "Ready")
            and not each["metadata"].get("deletionTimestamp")
        ]
        return [each["status"]["podIP"] for each in ready]

    async def lose(self, name: str) -> None:
        """Let a pod's node die: kill its process and remove the pod."""
        pod = next(each for each in self.server.all("pods") if each["metadata"]["name"] == name)
        each = self.running.pop(pod["metadata"]["uid"])
        each.process.kill()
        self.server.remove("pods", pod)  # before the `await` below: `run` would start the pod again
        await each.process.wait()

    async def _look(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        each = self.running.get(uid)
        if each is None:
            if not pod["metadata"].get("deletionTimestamp"):
                home = self.folder / pod["metadata"]["name"]
                if not self._mount(pod, home):
                    return
                self.running[uid] = await self._start(pod, home)
                placed = {**pod, "spec": {**pod["spec"], "nodeName": "here"}}
                self.server.change(self.server.kinds["pods"], pod, placed, "", "scheduler")
            return
        if pod["metadata"].get("deletionTimestamp"):
            if each.stop_steps is None:  # a shorter `preStop` sleep, while `address_of` no longer lists the pod
                each.stop_steps = PRE_STOP_STEPS if "lifecycle" in pod["spec"]["containers"][0] else 0
            elif each.stop_steps >= 0:
                each.stop_steps -= 1
            if each.stop_steps <= 0 and not each.told:
                each.told = True
                with suppress(ProcessLookupError):
                    each.process.terminate()
            if each.process.returncode is not None:
                statuses = pod.get("status", {}).get("containerStatuses", ())
                if any(one.get("started") for one in statuses):
                    self.ended.append((pod["metadata"]["name"], each.process.returncode))
                del self.running[uid]
                self.server.remove("pods", pod)
            return
        self._mount(pod, self.folder / pod["metadata"]["name"])
        await self._probe(pod, each)

    async def _start(self, pod: Json, home: Path) -> Running:
        address = f"127.0.7.{next(_numbers)}"
        container = pod["spec"]["containers"][0]
        variables = {"POD_IP": address, "NODE_NAME": "here"}
        variables |= {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
        words: list[str] = []
        for word in container["command"][1:]:
            for name, value in variables.items():
                word = word.replace(f"$({name})", value)  # noqa: PLW2901
            for place in ("/etc/baton", "/run/baton"):
                word = word.replace(place, str(home) + place)  # noqa: PLW2901
            if [*words[-1:], word] in SHARED_ADDRESSES:
                words.pop()
            else:
                words.append(address if word == "0.0.0.0" else word)
        with (home / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "baton", *words,
                stdout=log, stderr=log, env={**os.environ, "XDG_STATE_HOME": str(home), "BATON_TEST": ""},
            )  # fmt: skip
        return Running(process, address)

    def _mount(self, pod: Json, home: Path) -> bool:
        """Write those files of a pod that are new or have changed. False: a Secret or ConfigMap is missing, and the pod
        has to wait, as with a real kubelet.
        """
        places = {each["name"]: each["mountPath"] for each in pod["spec"]["containers"][0]["volumeMounts"]}
        files: dict[Path, str] = {}
        for volume in pod["spec"]["volumes"]:
            folder = home / places[volume["name"]].lstrip("/")
            sources = volume.get("projected", {}).get("sources", ())
            if "secret" in volume:
                said = volume["secret"]
                sources = ({"secret": {"name": said["secretName"], "items": said.get("items")}},)
            for source in sources:
                found = self._files(source, folder)
                if found is None:
                    return False
                files |= found
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                draft = path.with_name(f".{path.name}")
                draft.write_text(text)
                draft.replace(path)
        return True

    def _files(self, source: Any, folder: Path) -> dict[Path, str] | None:
        plural = "secrets" if "secret" in source else "configmaps"
        said = source.get("secret") or source["configMap"]
        thing = self.server.get(plural, said["name"])
        data = {} if thing is None else thing.get("data", {})
        items = said.get("items") or [{"key": key, "path": key} for key in data]
        if thing is None or any(item["key"] not in data for item in items):
            return None
        return {
            folder / item["path"]: b64decode(data[item["key"]]).decode() if plural == "secrets" else data[item["key"]]
            for item in items
        }

    async def _probe(self, pod: Json, each: Running) -> None:
        was_up = any(one.get("started") for one in pod.get("status", {}).get("containerStatuses", ()))
        probe = pod["spec"]["containers"][0]["readinessProbe" if was_up else "startupProbe"]["httpGet"]
        port = probe["port"]
        try:
            async with asyncio.timeout(2), self.session.get(f"http://{each.address}:{port}{probe['path']}") as answer:
                well = answer.status < 400
        except (aiohttp.ClientError, TimeoutError, OSError):
            well = False
        status = {key: value for key, value in pod.get("status", {}).items() if key != "conditions"}
        there = {one["type"]: one for one in pod.get("status", {}).get("conditions", ())}
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", ())]
        told = {"PodScheduled": True, "ContainersReady": well}
        told["Ready"] = well and all(is_true(pod, gate) for gate in gates)
        for kind, holds in told.items():
            if there.get(kind, {}).get("status") != str(holds):
                there[kind] = {"type": kind, "status": str(holds), "lastTransitionTime": self.server.stamp()}
        status |= {"podIP": each.address, "conditions": list(there.values())}
        status["containerStatuses"] = [{"started": well or was_up}]
        if status != pod.get("status"):
            self.server.change(self.server.kinds["pods"], pod, {**pod, "status": status}, "status", "kubelet")
