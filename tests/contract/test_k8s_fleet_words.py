"""Odd answers of agents and routers to the operator: it ignores them, and raises nothing."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.served import answering

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role
from k8s.operator import fleet
from k8s.operator.fleet import HttpFleet, known_by
from k8s.operator.secrets import Access
from kvtransfer.ticket import SigningKey
from router.admin.overview import PAIRS, Overview, whole
from router.core.values import ProofStanding
from router.fleet.view import FleetView
from router.scheduler.scheduler import Scheduler
from router.scheduler.scoring.policies import POLICIES
from router.telemetry.explain_store import ExplainStore
from router.telemetry.pairs import Pairs
from router.telemetry.recomputed import Recomputed
from router.telemetry.rolling import RollingStatistics

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


def word_of_router(count: int, standing: ProofStanding | None) -> dict[str, Any]:
    """What a router with `count` instances of each role answers at /ui/data. `standing`: None: it needs no proofs."""
    view = FleetView()
    for name in (f"{role}-{number}" for role in ("prefill", "decode") for number in range(count)):
        view.add(Instance(id=InstanceId(name), role=Role(name.partition("-")[0]), url=f"http://{name}"))
        view.seen(InstanceId(name), ({"id": "m"},), Load())
        view.get(InstanceId(name)).credits = 1
    if standing is not None:
        view.proven(standing)
    scheduler = Scheduler(view, POLICIES["least_load"])
    overview = Overview(scheduler, ExplainStore(10), RollingStatistics(), Pairs(), Recomputed(), {})
    overview.look(1000.0, {})
    told: dict[str, Any] = json.loads(json.dumps(whole(overview.own("router", 1000.0), {})))
    return told


def proven(prefills: Iterable[int] = (), decodes: Iterable[int] = ()) -> ProofStanding:
    """The standing with these instances in one circle and no others."""
    gives = {InstanceId(f"prefill-{number}"): 7 for number in prefills}
    return ProofStanding(gives, {InstanceId(f"decode-{number}"): 7 for number in decodes}, {}, {})


def proven_pairs(word: dict[str, Any], count: int) -> set[tuple[int, int]]:
    known = known_by({"r": word}, frozenset({"r"}))
    both = range(count)
    return {(p, d) for p in both for d in both if known.proven(f"prefill-{p}", f"decode-{d}")}


def test_a_pair_that_a_router_has_no_room_to_list_is_not_taken_for_proven() -> None:
    count = 16
    word = word_of_router(count, proven())
    assert len(word["pairs"]) == PAIRS < count * count
    assert proven_pairs(word, count) == set()
    assert proven_pairs(word_of_router(count, proven([0, 9], [3])), count) == {(0, 3), (9, 3)}
    every = proven(range(count), range(count))
    assert len(proven_pairs(word_of_router(count, every), count)) == count * count


def test_a_pair_in_one_circle_that_a_router_keeps_apart_is_not_proven() -> None:
    word = word_of_router(2, proven([0, 1], [0, 1]))
    word["pairs"] = [{"prefill": "prefill-1", "decode": "decode-0", "apart": True}]
    assert proven_pairs(word, 2) == {(0, 0), (0, 1), (1, 1)}


def test_where_no_proof_is_needed_every_pair_that_is_not_apart_counts() -> None:
    word = word_of_router(2, None)
    assert not any({"gives", "takes"} & each.keys() for each in word["instances"])
    word["pairs"] = [{"prefill": "prefill-1", "decode": "decode-0", "apart": True}]
    assert proven_pairs(word, 2) == {(0, 0), (0, 1), (1, 1)}


@pytest.mark.parametrize("odd", [None, "7", 7.5, [7], {}])
def test_an_odd_circle_is_no_circle(odd: Any) -> None:
    word = {"instances": [{"id": "prefill-0", "gives": odd, "takes": 0}, {"id": "decode-0", "gives": 0, "takes": odd}]}
    assert proven_pairs(word, 1) == set()


def test_a_pair_counts_once_all_routers_have_proven_it() -> None:
    word = word_of_router(1, proven([0], [0]))
    words = {"one": word, "two": word_of_router(1, proven())}
    assert not known_by(words, frozenset(words)).proven("prefill-0", "decode-0")
    assert known_by({"one": word}, frozenset({"one"})).proven("prefill-0", "decode-0")
    assert not known_by({}, frozenset({"one"})).proven("prefill-0", "decode-0")


def test_what_is_kept_of_a_large_fleet_grows_with_its_instances_and_not_with_its_pairs() -> None:
    word = {"instances": [{"id": f"prefill-{number}", "gives": 1, "takes": 1} for number in range(2000)], "pairs": []}
    tracemalloc.start()
    try:
        known = known_by({"one": word, "two": word}, frozenset({"one", "two"}))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert known.proven("prefill-0", "prefill-1999")
    assert most < 2000 * 2000, "less than a byte a pair"
