"""A hold is released by its name at the engine's own port: with a ticket, the guard asks the agent socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tickets import FLEET, signed

from cluster import wire
from cluster.ids import InstanceId, RequestId, TransferId
from engine.vllm.tiers import Tiers, beside
from kvtransfer import guard as g
from kvtransfer.asks import Ask, ReleaseName
from kvtransfer.door import Door
from kvtransfer.keys import FILE_VARIABLE, instance_text

pytestmark = pytest.mark.sockets

P, NOW = "prefill-0", 1_800_000_000.0
ID = TransferId(RequestId("req-1"), 2, 5)


@pytest.fixture
def asked() -> list[Ask]:
    return []


@pytest.fixture
def door(tmp_path: Path, asked: list[Ask]) -> Iterator[Path]:
    def answer(ask: Ask) -> dict[str, Any]:
        asked.append(ask)
        return {"ok": True}

    opened = Door(tmp_path / "engine" / "door", answer)
    yield opened.path
    opened.close()


async def post(
    body: Any,
    door: Path | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stock: bool = False,
    tiers: bool = False,
    rank: str | None = None,
) -> tuple[int, Any]:
    """Status and answer of one POST, which must not reach the engine."""
    keys = tmp_path / "keys"
    keys.write_text(instance_text((FLEET,), InstanceId(P)))
    monkeypatch.setenv(FILE_VARIABLE, str(keys))
    more: Any = None if stock else {"door": str(door)}
    if tiers:
        own = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": more}
        more = beside(own, Tiers(host_bytes=1 << 30))["kv_connector_extra_config"]
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=more))
    app = SimpleNamespace(state=SimpleNamespace(vllm_config=config))
    scope = {
        "type": "http", "method": "POST", "path": wire.RELEASE_PATH, "app": app,
        "headers": [] if rank is None else [(b"x-data-parallel-rank", rank.encode())],
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def engine(*_: Any) -> None:
        raise AssertionError("the engine has no such path")

    await g.Guard(engine, clock=lambda: NOW)(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def ticketed() -> dict[str, Any]:
    return {"kv_transfer_params": signed(wire.release_by_name(ID)["kv_transfer_params"], P, at=NOW)}


@pytest.mark.parametrize("tiers", [False, True], ids=["alone", "beside tiers"])
async def test_a_release_with_a_ticket_is_asked_at_the_agent_socket(
    tiers: bool, door: Path, asked: list[Ask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await post(ticketed(), door, tmp_path, monkeypatch, tiers=tiers) == (200, {"ok": True})
    assert asked == [ReleaseName("req-1/2@5")]


@pytest.mark.parametrize(("rank", "status"), [("1", 200), ("0", 503), (None, 503), ("x", 503), ("../1", 503)])
async def test_the_rank_that_the_request_names_is_asked(
    rank: str | None, status: int, asked: list[Ask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(ask: Ask) -> dict[str, Any]:
        asked.append(ask)
        return {"ok": True}

    opened = Door(tmp_path / "engine" / "door1", answer)
    try:
        told = await post(ticketed(), tmp_path / "engine" / "door{rank}", tmp_path, monkeypatch, rank=rank)
    finally:
        opened.close()
    assert (told[0], len(asked)) == (status, status == 200)


@pytest.mark.parametrize("body", [wire.release_by_name(ID), {}, {"transfer_id": "req-1/2@5"}, []])
async def test_without_a_ticket_nothing_is_asked(
    body: Any, door: Path, asked: list[Ask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, answer = await post(body, door, tmp_path, monkeypatch)
    assert status == (403 if body == wire.release_by_name(ID) else 400)
    assert answer["error"]["message"] and asked == []


async def test_an_engine_without_our_connector_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, answer = await post(ticketed(), None, tmp_path, monkeypatch, stock=True)
    assert status == 404 and "connector" in answer["error"]["message"]


async def test_an_agent_socket_that_is_gone_is_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, answer = await post(ticketed(), tmp_path / "nothing", tmp_path, monkeypatch)
    assert status == 503 and "agent socket" in answer["error"]["message"]
