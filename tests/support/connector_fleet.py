"""Two engines with Baton's connector and without agents: a router's calls to them, and faults that a test asks for."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support import device
from support.cluster import within
from support.engine_pair import RandomPrompts, ask, load

from bench.pair import Engines, _wait
from cluster import wire
from cluster.ids import RequestId, TransferId
from cluster.instance import Role
from engine.tiny import model_path
from engine.vllm.child import end_session
from kvtransfer.door import ask as knock
from kvtransfer.door import introduce_each_other

PATH = "/v1/completions"
BLOCK = 128
"""Tokens per KV block of a CPU engine."""
NAMES = "pd"
TESTS = str(Path(__file__).resolve().parents[1])
"""The folder in which engines find `support.faulty_connector`."""


@dataclass
class FaultyFleet(RandomPrompts):
    """The two engines, `p` and `d`. Each takes both kinds of leg; `way` of `hand_over` chooses the direction."""

    engines: Engines
    folder: Path
    chance: random.Random = field(default_factory=lambda: random.Random(23))
    made: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    # --- what a router does ---

    def name(self) -> TransferId:
        with self.lock:
            self.made += 1
            return TransferId(RequestId(f"faulty-{self.made}"), 1, 1)

    def url(self, name: str) -> str:
        return self.engines.url(name)

    def leg(self, prompt: list[int], by: str = "p", name: TransferId | None = None) -> dict[str, Any]:
        """Send a prefill leg. Returns its transfer fields."""
        body = wire.prefill_body(self.body(prompt), transfer=name or self.name())
        status, answer = ask(self.url(by), PATH, body)
        assert status == 200, answer
        transfer = wire.read_transfer(answer)
        assert transfer is not None, answer
        return dict(transfer.fields)

    def decode(self, prompt: list[int], fields: Mapping[str, Any], by: str = "d", tokens: int = 6) -> list[int]:
        """Send a decode leg. Returns its token ids."""
        status, answer = ask(
            self.url(by), PATH, wire.decode_body(self.body(prompt, tokens), wire.TransferFields(dict(fields)))
        )
        assert status == 200, answer
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def hand_over(self, prompt: list[int], way: str = "pd", tokens: int = 6) -> list[int]:
        """Send both legs, and the release that a router sends in any case. Returns the token ids."""
        name = self.name()
        try:
            return self.decode(prompt, self.leg(prompt, way[0], name), way[1], tokens)
        finally:
            self.release(name, way[0])

    def alone(self, prompt: list[int], by: str = "p", tokens: int = 6) -> list[int]:
        """One engine's own answer. The cache salt keeps it from using KV that was pulled."""
        status, answer = ask(self.url(by), PATH, {**self.body(prompt, tokens), "cache_salt": "alone"})
        assert status == 200, answer
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def release(self, name: TransferId, by: str = "p") -> None:
        assert knock(self.engines.door(by), {"ask": "release", "transfer_id": str(name)}) == {"ok": True}

    # --- what the engines report ---

    def state(self, name: str) -> dict[str, Any]:
        return knock(self.engines.door(name), {"ask": "state"})

    def counted(self, what: str, name: str = "d") -> int:
        return int(self.state(name)["counts"].get(what, 0))

    def pulled(self, name: str = "d") -> int:
        return load(self.url(name)).external_kv_tokens

    def nothing_is_held(self) -> bool:
        alive = [name for name in NAMES if self.engines.running[name].alive()]
        return all(self.state(name)[what] == 0 for name in alive for what in ("holds", "legs", "pulls"))

    def both_know_each_other(self) -> bool:
        """Whether each engine has shaken hands with the other. An idle engine reports a handshake at its next step,
        so each gets a request first.
        """
        for name in NAMES:
            self.alone(self.prompt(2), name, 1)
        peers = [self.state(name)["peers"] for name in NAMES]
        return all(len(each) == 1 and {peer["link"] for peer in each.values()} == {"met"} for each in peers)

    # --- faults ---

    def fault(self, name: str, **asked: Any) -> None:
        """Ask an engine for a fault (see `support.faulty_connector`), and wait until it has read this.

        The engine looks at every step, so a request is sent to it.
        """
        file = self.folder / name / "faults"
        written = file.with_suffix(".new")
        written.write_text(json.dumps(asked))
        written.rename(file)
        self.alone(self.prompt(5), name, 1)
        within(5, lambda: not file.exists())

    def processes(self, name: str) -> list[int]:
        """Process ids of the engine's core and its worker; the worker has the KV cache."""
        session, found = self.engines.running[name].process.pid, []
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int((each / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                    continue
                if (each / "cmdline").read_bytes().startswith(b"VLLM::"):
                    found.append(int(each.name))
        assert found, f"{name} has none"
        return found

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the engine's core and worker. SIGKILL goes to the HTTP server, too; other signals do not."""
        if number == signal.SIGKILL:
            end_session(self.engines.running[name].process.pid)
            self.engines.running[name].process.wait(30)
        else:
            for each in self.processes(name):
                os.kill(each, number)

    def start_again(self, *names: str) -> None:
        """Start engines that were killed, and introduce them as agents do."""
        self.engines.start_again(*names)
        self.introduce()

    def introduce(self) -> None:
        introduce_each_other(*((each, self.engines.door(each)) for each in NAMES))
        within(30, self.both_know_each_other)


ROLES = {"p": Role.PREFILL, "d": Role.DECODE}


@dataclass
class FaultyEngines(Engines):
    """Two engines with `support.faulty_connector`, which can be started again."""

    def start_again(self, *names: str) -> None:
        for name in names:
            self.running[name] = self._start(name, ROLES[name], NAMES.index(name))
        for name in names:
            _wait(self.running[name])


@contextlib.contextmanager
def faulty_fleet(
    folder: Path, *, digests: bool = False, flags: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> Iterator[FaultyFleet]:
    """Start two engines, introduce them to each other, and end them. Each takes both kinds of leg."""
    for name in NAMES:
        (folder / name).mkdir(mode=0o700)

    def transfer(role: Role) -> str:
        mine = folder / ("p" if role is Role.PREFILL else "d")
        extra = {"door": str(mine / "door"), "faults": str(mine / "faults"), "kv_lease_duration": 60}
        return json.dumps({
            "kv_connector": "BatonConnector", "kv_connector_module_path": "support.faulty_connector",
            "kv_role": "kv_both", "kv_buffer_device": "cuda" if device.gpus() else "cpu",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**extra, "digests": digests},
        })  # fmt: skip

    paths = ":".join(filter(None, [TESTS, os.environ.get("PYTHONPATH")]))
    engines = FaultyEngines(
        folder,
        str(model_path()),
        ROLES,
        transfer=transfer,
        flags=(*flags, *device.flags()),
        more={"extra_env": dict(env or {})},
        gpus=device.gpus(),
    )
    with patch.dict(os.environ, PYTHONPATH=paths), engines:
        fleet = FaultyFleet(engines, folder)
        fleet.introduce()
        yield fleet
