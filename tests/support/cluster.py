"""A real cluster for live tests: a process `baton up`, as a user would start it, and its JSON events."""

from __future__ import annotations

import atexit
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.instance import Load
from engine.vllm.metrics import parse_load

START_S = 240.0
"""Seconds until a cluster has to be ready. Two vLLM engines on two busy cores take up to two minutes."""


TESTS = str(Path(__file__).resolve().parents[1])
PROGRAM = ("-m", "baton")
"""The words after Python's name that run `baton`."""


def with_support() -> dict[str, str]:
    """An environment in which a child process finds the package `support`."""
    paths = filter(None, [TESTS, os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def shared_names() -> frozenset[str]:
    """Names of the shared memory and the semaphores of all Python processes of this machine."""
    folder = Path("/dev/shm")
    return frozenset(each.name for each in folder.iterdir() if each.name.startswith(("psm_", "sem.mp-")))


@dataclass
class Cluster:
    """A running `baton up`, its URLs and its processes."""

    process: subprocess.Popen[bytes]
    state: Path
    events: queue.Queue[dict[str, Any] | None] = field(default_factory=queue.Queue)
    said: list[str] = field(default_factory=list)
    endpoint: str = ""
    admin: str = ""
    model: str = ""
    urls: dict[str, str] = field(default_factory=dict)
    agents: dict[str, str] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    """Shared memory and semaphores that existed before the start."""
    temporary: Path = Path()
    """The folder of its temporary files. Paths of pytest's own folders are too long for Unix sockets."""

    @classmethod
    def start(cls, state: Path, *words: str, program: tuple[str, ...] = PROGRAM) -> Cluster:
        """Start `baton up`; `wait_ready` waits until it serves. `state` becomes XDG_STATE_HOME.

        Its router hands over whenever it can, unless a `--policy` or a cluster file decides (`support.hands_over`).
        """
        if "--policy" not in words and not any(word.endswith((".yaml", ".yml")) for word in words):
            words = ("--policy", "least_load", *words)
        temporary, shared = Path(tempfile.mkdtemp(prefix="live-")), shared_names()
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        process = subprocess.Popen(
            [sys.executable, *program, "up", "--port", "0", "--admin-port", "0", "--json", "--no-demo", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**with_support(), "XDG_STATE_HOME": str(state), "TMPDIR": str(temporary)},
        )
        cluster = cls(process, state, shared=shared, temporary=temporary)
        for target in (cluster._read_events, cluster._read_words):
            threading.Thread(target=target, daemon=True).start()
        return cluster

    @classmethod
    @contextmanager
    def of(cls, state: Path, file: str, *, program: tuple[str, ...] = PROGRAM) -> Iterator[Cluster]:
        """A cluster of a cluster file with this text. It is ready when the context begins, and stopped at its end."""
        path = state / "baton.yaml"
        path.write_text(file)
        cluster = cls.start(state, str(path), program=program)
        try:
            cluster.wait_ready()
            yield cluster
        finally:
            cluster.stop()

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.events.put(json.loads(line))
        self.events.put(None)

    def _read_words(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.said += [line.decode(errors="replace") for line in lines]

    def wait_ready(self) -> None:
        """Wait until the whole cluster serves.

        Raises:
            AssertionError: `baton up` ended, or took too long; the message has its stderr.
        """
        deadline = time.monotonic() + START_S
        while True:
            try:
                event = self.events.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not ready within {START_S:.0f} s\n{''.join(self.said)}") from None
            if event is None:
                self.process.wait(10)
                raise AssertionError(f"`baton up` ended with {self.process.returncode}\n{''.join(self.said)}")
            if event["event"] == "ready":
                break
        self.endpoint, self.admin, self.model = event["endpoint"], event["admin"], event["model"]
        self.urls = {instance["id"]: instance["url"] for instance in event["instances"]}

    def metrics(self, instance: str) -> str:
        with urllib.request.urlopen(self.urls[instance] + "/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def router_metric(self, name: str, default: float | None = None) -> float:
        """A metric of the router, by its name with labels; `default`, if given, where the router has none such yet."""
        with urllib.request.urlopen(self.admin + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} ")]
        if not found and default is not None:
            return default
        return found[0]

    def router_total(self, name: str) -> float:
        """A metric of the router, by its name without labels: the sum over all its labels; 0 where it has none yet."""
        with urllib.request.urlopen(self.admin + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def pulled(self) -> int:
        """Prompt tokens whose KV the engines have pulled from each other, by the engines' own metrics."""
        return sum(parse_load(self.metrics(instance)).external_kv_tokens for instance in self.urls)

    def baton(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run another `baton` command for this cluster."""
        return subprocess.run(
            [sys.executable, "-m", "baton", *words],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "XDG_STATE_HOME": str(self.state)},
        )

    def left_behind(self) -> list[str]:
        """Temporary files that still exist, and shared memory and semaphores that are new since the start.

        Left out: torch's cache of compiled code, and the file by which torch's processes find each other.
        """
        torchs = ("torchinductor", "vllm_dist_")
        files = [each.name for each in self.temporary.iterdir() if not each.name.startswith(torchs)]
        return sorted(files) + sorted(shared_names() - self.shared)

    def status(self) -> dict[str, dict[str, Any]]:
        """What `baton status` reports, by instance."""
        told = self._status()
        assert told is not None, "no registry answers"
        return told

    def all_ready(self) -> bool:
        """Whether every instance reports that it is ready.

        The agents are asked first: a `baton status` takes a core for a second, which starting engines need.
        """
        if len(self.agents) < len(self.urls):
            self.agents = {name: each["agent"] for name, each in (self._status() or {}).items()}
        if len(self.agents) < len(self.urls) or not all(map(_says_ready, self.agents.values())):
            return False
        told = self._status() or {}
        return [each["state"] for each in told.values()] == ["ready"] * len(self.urls)

    def _status(self) -> dict[str, dict[str, Any]] | None:
        """What `baton status` reports, by instance. None: the registry was killed and is not back yet."""
        told = self.baton("status", "--json")
        if told.returncode == 2:
            return None
        return {each["instance"]: each for each in json.loads(told.stdout)["instances"]}

    def idle(self) -> bool:
        """Whether no engine has a running request, a waiting request or a used KV block."""
        return all(load.running == load.waiting == 0 and load.kv_usage == 0 for load in self.loads().values())

    def proven(self, pairs: int = 1) -> bool:
        """Whether the router has proven so many pairs. A router without pairs left to prove sends no more probes."""
        return self.router_metric('baton_pair_proofs_total{result="passed"}', 0.0) >= pairs

    def loads(self) -> dict[str, Load]:
        """Each engine's load, from its own metrics."""
        return {instance: parse_load(self.metrics(instance)) for instance in self.urls}

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send `baton up` a signal and wait for its end. Returns its exit status."""
        self.process.send_signal(number)
        return self.process.wait(90)


def _says_ready(agent: str) -> bool:
    try:
        with urllib.request.urlopen(f"{agent}/state", timeout=10) as answer:
            return bool(json.loads(answer.read())["state"] == "ready")
    except OSError:
        return False


def within(seconds: float, condition: Callable[[], bool], instead: Callable[[], object] = lambda: "") -> float:
    """Wait until a condition holds. Returns how many seconds that took. `instead` is the text of the failure.

    Raises:
        AssertionError: it did not hold in time.
    """
    started = time.monotonic()
    while not condition():
        took = time.monotonic() - started
        assert took < seconds, f"still not so after {took:.1f} s {instead()}"
        time.sleep(0.02)
    return time.monotonic() - started


def descendants(of: int) -> set[int]:
    """Process ids of all descendants of a process, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
    found: set[int] = set()
    frontier = {of}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def processes(cluster: Cluster, instance: str) -> dict[str, int]:
    """Process ids of an instance's agent, vLLM server and engine core."""
    agent = cluster.status()[instance]["pid"]
    found = {"agent": agent}
    for pid in descendants(agent):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"EngineCore" in words:
            found["core"] = pid
        elif b"api_server" in words and b"keeper" not in words:
            found["server"] = pid
    return found


def mapped(pids: set[int]) -> set[str]:
    """Names of the shared memory and the semaphores that these processes use now."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split("/dev/shm/")[1].split()[0] for line in lines if "/dev/shm/" in line}
    return found


def alive(pids: set[int]) -> set[int]:
    """The processes among `pids` that still run; zombies do not count."""
    running = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in {"Z", "X"}:
            running.add(pid)
    return running
