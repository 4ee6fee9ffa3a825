"""A fleet on a Ray cluster: the registry and the router as processes, a controller as Ray driver, engines as actors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from support.cluster import with_support, within

from cluster.registry.launch import registry_command

FILE = """\
models:
  - name: meta-llama/Llama-3.1-8B
    pools:
      prefill: {min: 1, max: 3, gpu: L4}
      decode: {min: 1, max: 3, gpu: H100-SXM}
"""
MODEL = "meta-llama/Llama-3.1-8B"
BATON = ("-m", "baton")
SCRIPTED = ("-m", "support.scripted_up")


class RayFleet:
    """A fleet that starts when this object is made; `close` ends it."""

    def __init__(
        self, address: str, cluster: str, *, program: tuple[str, ...] = SCRIPTED, looks: int = 6, on: str = "ray"
    ) -> None:
        """`looks`: for how many looks a scripted controller keeps six instances. `on`: `baton controller --on`."""
        self._on = on
        self.cluster = cluster
        self.lost_node = False
        """Whether the Ray cluster has lost a node, so that its resources do not all come back."""
        self.folder = Path(tempfile.mkdtemp(prefix="ray-fleet-"))
        self.file = self.folder / "baton.yaml"
        self.file.write_text(FILE)
        self._environ = {**with_support(), "XDG_STATE_HOME": str(self.folder), "RAY_ADDRESS": address}
        self._environ["SCRIPT_LOOKS"] = str(looks)
        self._program = program
        registry = registry_command(self.folder, standin=True)
        self._registry = ["--registry", registry.url, "--cluster", cluster]
        self._registry += ["--registry-password-file", str(registry.password_file)]
        self.processes = [subprocess.Popen([*registry.argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
        words = ["router", "--port", "0", "--admin-port", "0", *self._registry]
        self.router = self._start("router", (*BATON, *words))
        ready = self._ready(self.router)
        self.endpoint, self.admin = str(ready["endpoint"]), str(ready["admin"])
        self.controller = self.start_controller()

    def start_controller(self) -> subprocess.Popen[str]:
        """Start a controller, as a driver of its own."""
        words = ["controller", str(self.file), "--on", self._on, "--engine", "mock", "--owns", *self._registry]
        return self._start("controller", (*self._program, *words))

    def _start(self, name: str, words: tuple[str, ...]) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *words, "--json"], stdout=subprocess.PIPE, stderr=log, text=True, env=self._environ
            )
        self.processes.append(process)  # type: ignore[arg-type]
        return process

    @staticmethod
    def _ready(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            found: dict[str, Any] = json.loads(line)
            if found.get("event") == "ready":
                return found
        raise AssertionError("it ended before it was ready")

    def instances(self) -> dict[str, str]:
        """The state of each instance, as the router sees it."""
        try:
            with urllib.request.urlopen(f"{self.admin}/ready", timeout=10) as answer:
                told = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            told = json.loads(error.read())
        return {each["id"]: each["state"] for each in told["instances"]}

    def wait_for(self, count: int, seconds: float = 150) -> dict[str, str]:
        """Wait until the router knows exactly so many instances, all of them up."""

        def up() -> bool:
            found = self.instances()
            return len(found) == count and set(found.values()) == {"up"}

        within(seconds, up, lambda: (self.instances(), self.said()))
        return self.instances()

    def said(self) -> str:
        log = self.folder / "controller.log"
        return log.read_text()[-2000:] if log.exists() else ""

    def close(self) -> None:
        """End all processes, the controller first: it owns the instances, and ends them."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def engines_of(cluster: str, *names: str) -> list[int]:
    """Process ids of these instances of this fleet; another fleet on this machine may have the same names."""
    return [pid for name in names for pid in pids_of(f"--name\0{name}\0", f"--cluster\0{cluster}\0")]


def pids_of(*words: str) -> list[int]:
    """Ids of the processes on this machine with all of these words in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            told = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in told for word in words):
            found.append(int(entry.name))
    return found
