"""Links between engines that were lost, or whose handshake failed: another introduction restores them."""

from __future__ import annotations

import importlib.util
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster import within
from support.engine_pair import ask, load

from bench.pair import Engines
from cluster import wire
from cluster.ids import RequestId, TransferId
from cluster.instance import Role
from decode.peers import MET
from engine.tiny import model_path
from kvtransfer.asks import Introduce, Payload
from kvtransfer.door import ask as knock

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what vLLM imports
]
PATH = "/v1/completions"


class Worker:
    """The part of `BatonWorker` that meets peers, without vLLM's worker and NIXL."""

    def __init__(self) -> None:
        from engine.vllm.connector.links import Links, SlotTable
        from engine.vllm.connector.worker import BatonWorker

        of: Any = BatonWorker
        self.meet, self._keep, self._look_again = (partial(each, self) for each in (of.meet, of._keep, of._look_again))
        self.kv_transfer_config = SimpleNamespace(kv_role="kv_both")
        self._links = Links(None, lambda *_: self.readable)
        self._links.reached("e", 0, SlotTable(4096, 1))
        self._remote_agents: dict[str, dict[tuple[int, int], str]] = {}
        self._engine_by_address: dict[tuple[str, int], str] = {}
        self._handshake_futures: dict[str, Any] = {}
        self._handshake_lock = threading.RLock()
        self._handshake_initiation_executor = ThreadPoolExecutor(1)
        self.readable = True

    def _ensure_handshake(self, engine_id: str, *_: Any) -> Any:
        if engine_id in self._remote_agents:
            return None
        self._remote_agents[engine_id] = {(0, 0): "agent"}
        self._links.try_all(engine_id, self._remote_agents[engine_id])
        return object()

    def _forget(self, engine_id: str) -> None:
        self._links.forget(engine_id)

    def hears(self, *told: Introduce) -> str:
        """The state of the link that the worker reports after these introductions."""
        self._links.take_news()
        self.meet(SimpleNamespace(introductions=told, forgotten=()))
        self._handshake_initiation_executor.submit(lambda: None).result(5)
        return self._links.take_news().get("e", "")


@pytest.fixture(scope="module", autouse=True)
def needs_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup")


def test_an_engine_that_is_introduced_again_is_looked_at_again() -> None:
    worker, met = Worker(), Introduce("e", "p0", (Payload(0, 0, b"x"),))
    worker.readable = False
    assert worker.hears(met) == "met, and rank 0 cannot be read"
    assert worker.hears(met) == "met, and rank 0 cannot be read"
    worker.readable = True
    assert worker.hears() == ""
    assert worker.hears(met) == MET
    assert worker.hears(met) == MET, "reported again, because the scheduler's half may have forgotten the link"
    assert not worker._handshake_futures
    worker._remote_agents.clear()  # vLLM drops a peer whose connection was cut
    assert worker.hears(met) == MET


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    with Engines(tmp_path_factory.mktemp("links"), str(model_path()), roles) as engines:
        yield engines


def test_forgotten_and_introduced_within_one_step(two: Engines) -> None:
    """An agent that is silent for a moment counts as gone, and comes back a moment later."""

    def link() -> str:
        return str(next(iter(knock(two.door("d"), {"ask": "state"})["peers"].values()), {}).get("link"))

    within(20, lambda: link() == MET)
    described = knock(two.door("p"), {"ask": "metadata"})
    back = {"ask": "introduce", "instance": "p", "engine_id": described["engine_id"],
            "payloads": described["payloads"]}  # fmt: skip
    for number in itertools.count(1):
        assert knock(two.door("d"), {"ask": "forget", "engine_id": described["engine_id"]}) == {"ok": True}
        assert knock(two.door("d"), back) == {"ok": True}
        within(20, lambda: link() == MET)
        body = {"model": "tiny", "prompt": [60 + number, *range(97, 97 + 25)] * 10, "max_tokens": 4,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        name = TransferId(RequestId(f"links-{number}"), 1, 1)
        status, answer = ask(two.url("p"), PATH, wire.prefill_body(body, transfer=name))
        transfer = wire.read_transfer(answer)
        assert status == 200 and transfer is not None
        before = load(two.url("d")).external_kv_tokens
        assert ask(two.url("d"), PATH, wire.decode_body(body, transfer))[0] == 200
        within(10, lambda: load(two.url("d")).external_kv_tokens - before >= transfer.tokens)  # noqa: B023
        if number == 6:
            break
