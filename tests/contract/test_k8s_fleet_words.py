"""Odd answers of agents and routers to the operator: it ignores them, and raises nothing."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.served import answering

from cluster.instance import Role
from k8s.operator import fleet
from k8s.operator.fleet import HttpFleet, known_by
from k8s.operator.secrets import Access
from kvtransfer.ticket import SigningKey

ODD: list[Any] = [None, 7, [], "x", {"role": {}, "drained": True}, {"role": [1]}, {"role": "king"}]


def pod(port: int) -> dict[str, Any]:
    return {"metadata": {"name": "p", "labels": {fleet.INSTANCE: "decode-0"}}, "status": {"podIP": "127.0.0.1"}}


@pytest.mark.parametrize("said", ODD, ids=map(repr, range(len(ODD))))
async def test_an_agents_odd_answer_is_no_role(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(said)

    async with answering(answer) as url, aiohttp.ClientSession(auto_decompress=False) as session:
        monkeypatch.setattr(fleet, "_url", lambda *_: f"{url}/state")
        told = await HttpFleet(session).look([pod(0)], [], Access(admin="key", fleet=(SigningKey("k", b"s" * 32),)))
    assert not told.roles


async def test_an_agents_role_is_heard_and_an_endless_answer_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    big = False

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"role": "decode", "more": "x" * (9 << 20) if big else ""})

    async with answering(answer) as url, aiohttp.ClientSession(auto_decompress=False) as session:
        monkeypatch.setattr(fleet, "_url", lambda *_: f"{url}/state")
        access = Access(admin="key", fleet=(SigningKey("k", b"s" * 32),))
        assert (await HttpFleet(session).look([pod(0)], [], access)).roles == {"decode-0": Role.DECODE}
        big = True
        assert not (await HttpFleet(session).look([pod(0)], [], access)).roles


@pytest.mark.parametrize("odd", [None, 3, "x", {"id": 1}, [None, 3, "x", []]])
def test_a_routers_odd_answer_names_no_instance(odd: Any) -> None:
    known = known_by({"one": {"instances": odd, "pairs": odd}}, frozenset({"one"}))
    assert not known.known_to
