"""Mock engines for tests: in a process of their own (`Mocks`), or in the test's loop (`mock_settings`, `MockFleet`)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from typing import Any, Self

from cluster.instance import Role
from engine.mock.settings import MockSettings, SimpleCosts
from engine.twin.config import TwinConfig


@dataclass
class Mocks:
    """A running process `baton mock`."""

    process: subprocess.Popen[str]
    urls: dict[str, str]

    @classmethod
    def start(cls, *words: str) -> Mocks:
        command = [sys.executable, "-m", "baton", "mock", "--port", "0", "--json", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        mocks = cls(process, {})
        count = sum(int(term.partition("=")[2]) for term in words[words.index("--instances") + 1].split(","))
        assert process.stdout is not None
        for _ in range(count):
            line = process.stdout.readline()
            assert line, f"`baton mock` ended with {process.wait(10)}"
            told = json.loads(line)
            mocks.urls[told["name"]] = told["endpoint"]
        return mocks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert code == 0

    def set_fault(self, name: str, **fault: Any) -> None:
        raw = json.dumps(fault).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.urls[name]}/mock/faults", raw), timeout=10).close()


def mock_settings(
    name: str, role: Role, *, step_ms: float = 1.0, transfer_ms: float = 0.5, **more: Any
) -> MockSettings:
    """Settings of a fast mock. `more`: fields of `MockSettings`, or of the twin's `TwinConfig`."""
    own = {key: more.pop(key) for key in list(more) if key in MockSettings.__dataclass_fields__}
    config = TwinConfig(**{"role": role, "num_blocks": 4096, "max_model_len": 8192, **more})
    plain = {"model": "fake", "kv_bytes_per_token": 1000, "costs": SimpleCosts(step_ms=step_ms, prefill_ms_per_1k=5.0)}
    return MockSettings(
        name=name, role=role, config=config, transfer_ms=lambda _size, _sharers: transfer_ms, **{**plain, **own}
    )
