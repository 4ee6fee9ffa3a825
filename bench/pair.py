"""Starts real vLLM engines without agents, router or registry, for comparing and testing connectors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.processes import free_port
from cluster.ids import InstanceId
from cluster.instance import Role
from engine.vllm.child import CPU_SITE, end_session
from engine.vllm.command import command, environment
from engine.vllm.placement import CudaGpu, measures_memory, share
from engine.vllm.scratch import scratch
from engine.vllm.spec import EngineSpec
from kvtransfer.door import introduce_each_other

START_S = 240.0
"""Two engines on two busy cores take up to two minutes."""
SITE = Path(__file__).resolve().parents[1]
"""vLLM imports our modules from here."""


@dataclass
class Running:
    """One engine's process, the head of a session of its own."""

    spec: EngineSpec
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return self.spec.url

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def alive(self) -> bool:
        return self.process.poll() is None


def _ours(_: Role) -> str:
    return ""


@dataclass
class Engines:
    """Some engines of one model on this machine's cores; `with` starts them together and ends them."""

    folder: Path
    model: str
    roles: Mapping[str, Role]
    transfer: Callable[[Role], str] = _ours
    """vLLM's `--kv-transfer-config` for a role; empty: Baton's connector, each introduced to all others."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of every `EngineSpec`."""
    flags: tuple[str, ...] = ()
    """Other flags of vLLM."""
    paced: bool = True
    """Whether NIXL's progress thread is paced from outside (`engine/vllm/cpu_site`); Baton's connector paces its
    own."""
    gpus: tuple[str, ...] = ()
    """GPUs for the engines in turn; if there are too few, engines share a GPU's memory. Without GPUs, one core each.
    Those that share one start one after the other, but with ``--kv-cache-memory-bytes`` in `flags` at the same time."""
    connected: bool = True
    """Whether they have a connector at all; False: vLLM alone."""
    introduced: bool = True
    """Whether engines with Baton's connector are introduced to each other; False if it leaves the cache to vLLM's."""
    running: dict[str, Running] = field(default_factory=dict)
    temporary: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Their folders for temporary files."""

    def __enter__(self) -> Self:
        try:
            for number, (name, role) in enumerate(self.roles.items()):
                self._wait_for_turn(number)
                self.running[name] = self._start(name, role, number)
            for engine in self.running.values():
                _wait(engine)
            ours = [name for name, role in self.roles.items() if not self.transfer(role)]
            if self.introduced and self.connected:
                introduce_each_other(*((name, self.door(name)) for name in ours))
        except BaseException:  # an interrupt too: no engine is left behind
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_for_turn(self, number: int) -> None:
        """Wait until no engine starts that could measure this one's memory as its own (`engine.vllm.turns`)."""
        gpus = self._place(number).get("gpus", ())
        for other in self.running.values():
            if measures_memory(self.flags) and {*gpus} & {*other.spec.gpus}:
                _wait(other)

    def _start(self, name: str, role: Role, number: int) -> Running:
        transfer = self.transfer(role)
        fields: dict[str, Any] = {
            "instance": InstanceId(name),
            "role": role,
            "model": self.model,
            "served_name": "tiny",
            "python": sys.executable,
            "port": free_port(),
            "side_channel_port": free_port(),
            **self._place(number),
            "max_model_len": 2048,
            "dtype": "float32",
            "connector": "baton",
            "door": str(self.folder / name / "door"),
            "extra_args": (*(("--kv-transfer-config", transfer) if transfer else ()), *self.flags),
            **self.more,
        }
        spec = EngineSpec(**fields)
        env = environment(spec, os.environ, str(CPU_SITE) if self.paced else str(_half_site(self.folder)))
        kept = "" if spec.tiers is None else spec.tiers.folder
        env = self.temporary.enter_context(scratch(env, kept))
        first = [str(_pacing_site(self.folder))] if self.gpus and self.paced else []
        env["PYTHONPATH"] = ":".join(filter(None, [*first, env.get("PYTHONPATH"), str(SITE)]))
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                _words(spec, connected=self.connected),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
        return Running(spec, process, log)

    def _place(self, number: int) -> dict[str, Any]:
        """Its part of the machine."""
        if not self.gpus:
            cores = sorted(os.sched_getaffinity(0))
            return {"device": "cpu", "cores": (cores[number % len(cores)],)}
        placed = share(len(self.roles), [CudaGpu(id=each) for each in self.gpus], ())[number]
        return {"device": "gpu", "gpus": placed.gpus, "gpu_memory_share": placed.gpu_memory_share}

    def url(self, name: str) -> str:
        return self.running[name].url

    def door(self, name: str) -> Path:
        return Path(self.running[name].spec.door)

    def stop(self) -> None:
        """End them and whatever they started."""
        for engine in self.running.values():
            if engine.alive():
                engine.process.send_signal(signal.SIGTERM)
        for engine in self.running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.process.wait(15)
            end_session(engine.process.pid)  # the engine's core and workers, too
            engine.process.wait(10)
        self.temporary.close()


def _words(spec: EngineSpec, *, connected: bool) -> list[str]:
    words = command(spec)
    if not connected:
        at = words.index("--kv-transfer-config")
        del words[at : at + 2]
    return words


def _half_site(folder: Path) -> Path:
    """A start-up folder with the one half of Baton's without which two engines stall on two cores
    (`os.sched_yield`).
    """
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text("import os, time\nos.sched_yield = lambda: time.sleep(0.0002)\n")
    return site


def _pacing_site(folder: Path) -> Path:
    """A start-up folder with the other half, for engines on GPUs, where the launcher changes nothing: NIXL's thread."""
    site = folder / "pacing"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "from engine.vllm.cpu_site import sitecustomize as ours\n"
        "sys.meta_path.insert(0, ours.AfterImport(ours._NIXL_APIS, ours.pace_progress_thread))\n"
    )
    return site


def _wait(engine: Running) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and engine.alive():
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(engine.url + "/health", timeout=5) as answer,  # noqa: S310 - an engine of ours
        ):
            if answer.status == 200:
                return
        time.sleep(0.25)
    raise RuntimeError(f"{engine.spec.instance} did not start:\n{engine.tail()}")


def cores_used(engine: Running, seconds: float) -> float:
    """Cores that an engine's processes take during so many seconds."""
    before = _cpu_s(engine.process.pid)
    time.sleep(seconds)
    return (_cpu_s(engine.process.pid) - before) / seconds


def _cpu_s(session: int) -> float:
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended meanwhile
        if int(fields[3]) == session:
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total
