"""The worker's part in introductions, on vLLM's own class without its state."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="make setup installs torch")
pytest.importorskip("vllm", reason="make setup installs vLLM")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own deprecations as it is imported
    from engine.vllm.connector import links_worker
    from engine.vllm.connector.links_worker import LinksWorker
    from kvtransfer.asks import Introduce


class MetLinks:
    """Links that all stand."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def introduce(self, _: Introduce) -> tuple[str, ...]:
        return ()

    def report_met(self, _: str) -> bool:
        return True

    def forget(self, engine: str) -> None:
        self.forgotten.append(engine)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that has shaken hands with the engine `p0#1` of the instance `p0`."""
    monkeypatch.setattr(links_worker, "reads_peers", lambda _: True)
    monkeypatch.setattr(LinksWorker, "_ensure_handshake", lambda *_: None)
    made: Any = object.__new__(LinksWorker)
    made._links, made.kv_transfer_config = MetLinks(), None
    made._handshake_lock = threading.Lock()
    made._remote_agents, made._engine_by_address = {"p0#1": {(0, 0): "agent"}}, {("p0", 0): "p0#1"}
    return made


def introduced(engine: str) -> SimpleNamespace:
    return SimpleNamespace(introductions=(SimpleNamespace(engine_id=engine, instance="p0", ranks=1),), forgotten=())


def test_an_engine_that_is_met_again_during_a_read_is_not_dropped_after_it(worker: Any) -> None:
    """vLLM drops the engines that stand at no address, once no read uses them."""
    worker.meet(SimpleNamespace(introductions=(), forgotten=("p0#1",)))
    assert worker._engine_by_address == {}, "a read keeps it among the engines that have shaken hands"
    worker.meet(introduced("p0#1"))
    assert worker._engine_by_address == {("p0", 0): "p0#1"}


def test_an_engine_without_a_handshake_gets_no_address(worker: Any) -> None:
    worker.meet(introduced("p0#2"))
    assert worker._engine_by_address == {("p0", 0): "p0#1"}
