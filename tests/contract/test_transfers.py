"""Agents introduce their engines to each other, through the registry and each engine's agent socket (its *door*)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.ids import InstanceId
from cluster.instance import Load, Role
from cluster.registry.membership import Heartbeat, MemberState
from cluster.registry.memory import MemoryRegistry
from cluster.registry.registry import Author, RegistryDown
from engine.agent.meetings import (
    HandoffReport,
    Meetings,
    exposition,
    meet,
    read_engine,
    read_state,
    read_text,
    with_door,
)
from engine.agent.transfers import DoorShut, Transfers, ask_door
from kvtransfer.asks import DTYPE, LEFT, Forget, Introduce, Metadata, Payload, parse
from kvtransfer.keys import read_fleet
from kvtransfer.seal import identity_text, read_identity

FLEET = read_fleet("k1 " + "11" * 32 + "\n")
STRANGERS = read_fleet("k1 " + "22" * 32 + "\n")


class FakeDoor:
    """An agent socket that answers as the connector does, and records what the agent asked."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.life = 1
        self.known: dict[str, tuple[str, Any]] = {}
        self.asked: list[str] = []
        self.answer: bytes | None = None
        self.left = ""
        """The reason why vLLM's own connector hands over this engine's KV cache; empty: Baton's connector does."""
        self.dtype = "bfloat16"
        self.aside: set[str] = set()
        """The producers that this engine has set aside."""
        self.tries = False
        """The pause of producers set aside is over: the next pull is a try."""
        self.link = "met"
        """The state of the links to peers that were introduced, except to `unmet`."""
        self.unmet: set[str] = set()
        """Peers that were introduced, but have not been met yet."""
        self.server: asyncio.Server | None = None

    @property
    def engine_id(self) -> str:
        return f"{self.name}#{self.life}"

    @property
    def payloads(self) -> list[dict[str, Any]]:
        return [{"stage": 0, "rank": 0, "data": base64.b64encode(self.engine_id.encode() * 9).decode()}]

    async def open(self) -> None:
        self.server = await asyncio.start_unix_server(self._serve, self.path)

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.path.unlink(missing_ok=True)

    async def restart(self) -> None:
        self.life, self.known = self.life + 1, {}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ask = json.loads(await reader.readline())
        writer.write(json.dumps(self._answer(ask)).encode() + b"\n" if self.answer is None else self.answer)
        await writer.drain()
        writer.close()

    def _answer(self, ask: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(ask["ask"])
        if self.left:
            told = {LEFT: self.left, DTYPE: self.dtype}
            return told if ask["ask"] in {"metadata", "state"} else {"error": self.left}
        match ask["ask"]:
            case "metadata":
                told = {"engine_id": self.engine_id, "epoch": 0, DTYPE: self.dtype, "compatibility": "c"}
                return {**told, "payloads": self.payloads}
            case "state":
                pulls = {"pulled": 7, "failed": len(self.aside)}
                peers = {
                    engine: {
                        "instance": name,
                        "link": "introduced" if name in self.unmet else self.link,
                        "aside": name in self.aside,
                        "shunned": name in self.aside and not self.tries,
                        **pulls,
                    }
                    for engine, (name, _) in self.known.items()
                }
                return {"counts": {"confirmed": 7, "a block is not what was held": 1}, "peers": peers}
            case "introduce":
                self.known[ask["engine_id"]] = ask["instance"], ask["payloads"]
            case "forget":
                self.known.pop(ask["engine_id"], None)
        return {"ok": True}


class Site:
    """The part of one agent that is about transfers."""

    def __init__(self, fleet: Fleet, name: str, role: Role, *, keys=FLEET, model: str = "tiny") -> None:
        self.fleet, self.name, self.role = fleet, name, role
        self.keys = keys
        """The fleet's keys when its files were last made."""
        self.models: tuple[str, ...] = (model,)
        self.epoch, self.seq, self.agent = 1, 0, f"agent-{name}"
        self.door = FakeDoor(fleet.folder / f"{name}.sock", name)
        self.transfers = Transfers(
            self.door.path,
            fleet.registry,
            InstanceId(name),
            lambda: read_identity(identity_text(self.keys, InstanceId(name))),
            self.agent,
            epoch=lambda: self.epoch,
            role=lambda: self.role,
            models=lambda: self.models,
            on_change=self.changed,
        )
        self.changes = 0
        self.state = MemberState.READY

    def changed(self) -> None:
        self.changes += 1

    async def beat(self) -> None:
        self.seq += 1
        more: dict[str, Any] = {
            "models": tuple({"id": each} for each in self.models),
            "url": "http://h:1",
            "state": self.state,
        }
        more["shuns"] = self.transfers.acquainted.shuns
        beat = Heartbeat(id=self.name, agent=self.agent, epoch=self.epoch, seq=self.seq, role=self.role, **more)
        await self.fleet.registry.beat(beat)


class Fleet:
    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.now = 0.0
        self.folder, self.stack = folder, stack
        self.registry = MemoryRegistry(lambda: self.now)
        self.sites: dict[str, Site] = {}

    async def join(self, name: str, role: Role, **more: Any) -> Site:
        site = self.sites[name] = Site(self, name, role, **more)
        await site.door.open()
        self.stack.push_async_callback(site.door.close)
        return site

    async def settle(self, turns: int = 4) -> None:
        for _ in range(turns):
            self.now += 1.0
            for site in self.sites.values():
                await site.beat()
                await site.transfers.look(self.now)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="doors-"))  # a Unix socket's path must be short
        yield Fleet(Path(folder), stack)


async def test_engines_that_hand_over_to_each_other_are_introduced(fleet) -> None:
    p, d, e = [
        await fleet.join(name, role) for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE))
    ]
    other = await fleet.join("p1", Role.PREFILL, model="another")
    await fleet.settle()
    assert p.door.known == {"d0#1": ("d0", d.door.payloads), "d1#1": ("d1", e.door.payloads)}
    assert d.door.known == e.door.known == {"p0#1": ("p0", p.door.payloads)}
    assert other.door.known == {}
    asked = len(p.door.asked)
    await fleet.settle()
    assert p.door.asked[asked:] == ["metadata", "state"] * 4, "a known peer is not introduced again"


async def test_posts_in_the_registry_are_sealed(fleet) -> None:
    p = await fleet.join("p0", Role.PREFILL)
    await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    author = Author("p0", p.agent, 1)
    (box,) = await fleet.registry.posted([author], "d0")
    assert box is not None and p.door.payloads[0]["data"].encode() not in box and b"p0#1" not in box
    assert await fleet.registry.posted([author], "d1") == (None,)


async def test_an_engine_that_restarts_is_introduced_to_all_peers_again(fleet) -> None:
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    await d.door.restart()
    d.epoch = 2
    await fleet.settle()
    assert p.door.known == {"d0#2": ("d0", d.door.payloads)}
    assert d.door.known == {"p0#1": ("p0", p.door.payloads)}
    await p.door.close()
    await fleet.settle()
    await p.door.restart()
    await p.door.open()
    p.epoch = 5
    await fleet.settle()
    assert set(p.door.known) == {"d0#2"} and set(d.door.known) == {"p0#2"}
    assert await fleet.registry.posted([Author("p0", p.agent, 1)], "d0") == (None,), "the former life's post is gone"


async def test_an_instance_that_left_is_forgotten_and_its_posts_are_removed(fleet) -> None:
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    del fleet.sites["p0"]
    await fleet.registry.leave("p0", p.agent)
    await fleet.settle(8)
    assert d.door.known == {} and d.transfers.counts["forgotten"] == 1
    assert await fleet.registry.posted([Author("p0", p.agent, 1)], "d0") == (None,)


async def test_an_engine_that_restarts_while_the_registry_is_away_meets_its_peers_of_before(fleet) -> None:
    """Without them it would compute each prompt again that is handed over to it, and P's blocks would wait in vain."""
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    fleet.registry.down = True
    await d.door.restart()
    assert d.door.known == {}
    for _ in range(3):
        fleet.now += 1.0
        with pytest.raises(RegistryDown):
            await d.transfers.look(fleet.now)
    assert d.door.known == {"p0#1": ("p0", p.door.payloads)}


async def test_no_peer_is_forgotten_while_the_registry_is_away(fleet) -> None:
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    fleet.registry.down = True
    for _ in range(20):
        fleet.now += 1.0
        with pytest.raises(RegistryDown):
            await d.transfers.look(fleet.now)
    assert set(d.door.known) == {"p0#1"}
    fleet.registry.down = False
    fleet.registry.forget()  # it comes back empty, and p0's next heartbeat is not due yet
    fleet.now += 0.1
    await d.transfers.look(fleet.now)
    await fleet.settle()
    assert set(d.door.known) == {"p0#1"} and set(p.door.known) == {"d0#1"}
    assert d.transfers.counts["forgotten"] == 0
    assert (await fleet.registry.posted([Author("p0", p.agent, 1)], "d0"))[0] is not None


@pytest.mark.parametrize("order", ["pd", "dp"])
async def test_a_registry_that_lost_its_data_stops_no_hand_over(fleet, order: str) -> None:
    """Posts are gone, and agents write them again: the engines know each other all the time."""
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    assert d.transfers.acquainted.shuns == ()
    fleet.registry.forget()
    for _ in range(4):
        fleet.now += 1.0
        for site in (p, d) if order == "pd" else (d, p):
            await site.beat()
            await site.transfers.look(fleet.now)
            assert d.transfers.acquainted.shuns == ()
    late = await fleet.join("d1", Role.DECODE)
    await fleet.settle()
    assert set(late.door.known) == {"p0#1"} and set(p.door.known) == {"d0#1", "d1#1"}
    assert not any(each.transfers.counts["not_opened"] for each in (p, d, late))


async def test_no_peer_is_forgotten_while_the_registry_takes_no_heartbeats(fleet) -> None:
    """Redis answers readers while it is a replica, or its disk is full: every heartbeat in it expires."""
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    fleet.registry.full = True
    for _ in range(20):
        fleet.now += 1.0
        for site in (p, d):
            with pytest.raises(RegistryDown):
                await site.beat()
        with contextlib.suppress(RegistryDown):  # what it has posted is to be posted again
            await d.transfers.look(fleet.now)
    fleet.registry.full = False
    await fleet.settle()
    assert set(d.door.known) == {"p0#1"} and d.transfers.counts["forgotten"] == 0


@pytest.mark.parametrize("call", range(12))
async def test_a_registry_that_goes_away_at_any_moment_of_a_meeting_only_delays_it(fleet, monkeypatch, call) -> None:
    """Three registry calls in a row fail, at each point of a meeting: reading members, reading posts, posting."""
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    calls, failed = 0, 0

    def failing(ask: Any) -> Any:
        async def asked(*args: Any) -> Any:
            nonlocal calls, failed
            calls += 1
            if call < calls <= call + 3:
                failed += 1
                raise RegistryDown("gone")
            return await ask(*args)

        return asked

    for name in ("read", "posted", "post", "keep", "unpost"):
        monkeypatch.setattr(fleet.registry, name, failing(getattr(fleet.registry, name)))
    for _ in range(10):
        fleet.now += 1.0
        for site in (p, d):
            await site.beat()
            with contextlib.suppress(RegistryDown):
                await site.transfers.look(fleet.now)
    assert failed == 3
    assert p.door.known == {"d0#1": ("d0", d.door.payloads)} and d.door.known == {"p0#1": ("p0", p.door.payloads)}
    assert [site.transfers.counts["introduced"] for site in (p, d)] == [1, 1], "each introduced the other once"
    assert [site.transfers.counts["forgotten"] for site in (p, d)] == [0, 0]


async def test_an_engine_shuns_the_producers_that_it_has_set_aside(fleet) -> None:
    await fleet.join("p0", Role.PREFILL)
    d = await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    assert d.transfers.acquainted.shuns == () and d.changes == 2, "it shunned p0 until they had met"
    d.door.aside.add("p0")
    await fleet.settle(1)
    assert d.transfers.acquainted.shuns == ("p0",) and d.changes == 3
    text = exposition({InstanceId("d0"): d.transfers.handoffs})
    assert 'baton_agent_pair_set_aside{instance="d0",producer="p0"} 1\n' in text
    assert 'baton_agent_pulls_total{instance="d0",producer="p0",ended="badly"} 1\n' in text
    assert 'baton_agent_connector_events_total{instance="d0",event="a block is not what was held"} 1\n' in text
    d.door.tries = True
    await fleet.settle(1)
    assert d.transfers.acquainted.shuns == () and d.transfers.handoffs.pulls[0].aside, "the next pull is a try"
    d.door.aside.clear()
    await fleet.settle(1)
    assert not d.transfers.handoffs.pulls[0].aside and d.door.known, "p0 is still introduced"
    await d.door.close()
    await fleet.settle(1)
    assert d.transfers.handoffs == HandoffReport() and not d.transfers.acquainted.enough


async def test_an_instance_that_starts_meets_its_peers_before_it_takes_work(fleet) -> None:
    d = await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    assert d.transfers.acquainted.enough, "there is no peer to meet"
    d.door.link = "introduced"
    p = await fleet.join("p0", Role.PREFILL)
    p.state = MemberState.STARTING
    await fleet.settle()
    assert set(d.door.known) == {"p0#1"} and d.transfers.acquainted.shuns == ("p0",)
    assert not d.transfers.acquainted.enough and not p.transfers.acquainted.enough
    d.door.link = "met, and rank 0 cannot be read"
    await fleet.settle()
    assert not p.transfers.acquainted.enough
    d.door.link = "met"
    await fleet.settle(2)
    assert d.transfers.acquainted.shuns == () and d.transfers.acquainted.enough and p.transfers.acquainted.enough
    p.epoch, p.state = 2, MemberState.READY  # p0 restarts, and its socket is closed for a while
    await p.door.close()
    await fleet.settle(2)
    assert d.transfers.acquainted.shuns == ("p0",), "d0 does not pull by what it knows of p0's former life"
    await p.door.restart()
    await p.door.open()
    await fleet.settle()
    assert d.transfers.acquainted.shuns == () and p.transfers.acquainted.enough


@pytest.mark.parametrize(("told", "tokens"), [(281, 281), (0, 0), (None, 480), (-1, 480), (True, 480), ("9", 480)])
def test_the_connectors_count_of_recomputed_tokens_replaces_the_engines(told: Any, tokens: int) -> None:
    load = Load(running=2, recomputed_tokens=480)
    assert with_door(load, read_state({"recomputed_tokens": told})) == replace(load, recomputed_tokens=tokens)


async def test_engines_that_are_left_to_vllm_hand_over_to_each_other(fleet, caplog) -> None:
    """Agents introduce no engines that vLLM's own connector serves: these need not meet, and none shuns another."""
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    p.door.left = d.door.left = "it has more kinds of KV cache than full attention"
    await fleet.settle()
    for site in (p, d):
        assert site.transfers.acquainted.shuns == () and site.transfers.acquainted.enough
        assert site.door.known == {} and set(site.door.asked) <= {"metadata", "state"}
    said = [each.getMessage() for each in caplog.records]
    assert [each for each in said if each.startswith("d0:")] == [
        "d0: its KV cache is handed over by vLLM's own connector: it has more kinds of KV cache than full attention"
    ]


@pytest.mark.parametrize("left", ["", "it has more kinds of KV cache than full attention"])
async def test_an_agent_reads_its_engines_number_format_from_the_socket(fleet, left) -> None:
    """Whichever connector hands over. A socket without an answer for a moment says nothing new."""
    p = await fleet.join("p0", Role.PREFILL)
    assert p.transfers.dtype == ""
    p.door.left, p.door.dtype = left, "float32"
    await fleet.settle(1)
    assert p.transfers.dtype == "float32"
    p.door.answer = b'{"error": "busy"}\n'
    await fleet.settle(1)
    assert p.transfers.dtype == "float32"
    await p.door.close()
    await fleet.settle(1)
    assert p.transfers.dtype == "float32"
    p.door.answer, p.door.dtype = None, "bfloat16"
    await p.door.open()
    await fleet.settle(1)
    assert p.transfers.dtype == "bfloat16", "an engine that was started again, with other flags"


@pytest.mark.parametrize("left", ["p0", "d0"])
async def test_an_engine_that_is_left_to_vllm_and_one_that_is_not_hand_over_nothing(fleet, left) -> None:
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    fleet.sites[left].door.left = "data parallelism"
    await fleet.settle()
    assert d.transfers.acquainted.shuns == ("p0",) and p.door.known == d.door.known == {}
    fleet.sites[left].door.left = ""  # the engine was started again, with other flags
    await fleet.settle(6)
    assert d.transfers.acquainted.shuns == () and set(d.door.known) == {"p0#1"}


async def test_an_instance_whose_models_are_unknown_has_met_no_peer(fleet) -> None:
    """An engine's agent socket opens before its models are known. Until then the engine meets no peer, and must not
    take work as if it had none to meet.
    """
    d = await fleet.join("d0", Role.DECODE)
    d.door.link = "introduced"
    p = await fleet.join("p0", Role.PREFILL)
    p.state, (p.models, serves) = MemberState.STARTING, ((), p.models)
    await fleet.settle()
    assert d.door.known == {} and not p.transfers.acquainted.enough
    p.models = serves
    await fleet.settle()
    assert set(d.door.known) == {"p0#1"} and not p.transfers.acquainted.enough
    d.door.link = "met"
    await fleet.settle()
    assert p.transfers.acquainted.enough


async def test_a_few_peers_are_enough_and_the_others_are_met_later(fleet) -> None:
    for number in range(4):
        await fleet.join(f"p{number}", Role.PREFILL)
    await fleet.settle()
    d = await fleet.join("d0", Role.DECODE)
    d.door.unmet = {"p1", "p2", "p3"}
    await fleet.settle()
    assert d.transfers.acquainted.shuns == ("p1", "p2", "p3") and not d.transfers.acquainted.enough
    d.door.unmet = {"p3"}
    await fleet.settle(1)
    assert d.transfers.acquainted.shuns == ("p3",) and d.transfers.acquainted.enough
    assert fleet.sites["p0"].transfers.acquainted.enough


async def test_an_instance_without_an_identity_of_the_fleet_is_not_introduced(fleet, caplog) -> None:
    d = await fleet.join("d0", Role.DECODE)
    stranger = await fleet.join("p0", Role.PREFILL, keys=STRANGERS)
    await fleet.settle()
    assert d.door.known == stranger.door.known == {}
    assert sum("the fleet's key has not signed" in record.message for record in caplog.records) == 2, "once each"


async def test_a_post_that_was_tampered_with_is_not_used(fleet) -> None:
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    await fleet.settle(2)
    author = Author("p0", p.agent, 1)
    items = fleet.registry._posted[author][0]
    d.door.known.clear()
    d.transfers.meetings.ended()
    items["d0"] = items["d0"][:-1] + bytes([items["d0"][-1] ^ 1])
    fleet.now += 1.0
    await d.transfers.look(fleet.now)
    assert d.door.known == {} and d.transfers.counts["not_opened"] == 1


@pytest.mark.parametrize(
    "answer", [b"", b"\n", b"[]\n", b"{\n", b'{"error": "no"}\n', b'{"engine_id": 7}\n', b"\xff\n"]
)
async def test_a_wrong_answer_of_an_agent_socket_stops_no_agent(fleet, answer) -> None:
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    p.door.answer = answer
    await fleet.settle(2)
    assert d.door.known == {}
    p.door.answer = None
    await fleet.settle()
    assert set(d.door.known) == {"p0#1"} and set(p.door.known) == {"d0#1"}


async def test_a_missing_agent_socket_is_an_error(tmp_path) -> None:
    with pytest.raises(DoorShut):
        await ask_door(tmp_path / "none", {"ask": "state"})


def test_identities_are_made_with_ticket_keys(tmp_path) -> None:
    from baton.ticket_keys import add_fleet_key, files_for, open_identity, write_instance_file
    from cluster.errors import UsageError

    add_fleet_key(tmp_path / "tickets")
    files = {name: write_instance_file(tmp_path / "tickets", name) for name in ("p0", "d0")}
    read_p, read_d = (open_identity(files[name], InstanceId(name)) for name in ("p0", "d0"))
    assert read_p is not None and read_d is not None
    p, d = read_p(), read_d()
    box = p.seal(b"x", d.me, d.credentials(), life="", nonce=bytes(12))
    assert box is not None and d.unseal(box, p.me, p.credentials(), life="") == b"x"
    assert (tmp_path / "tickets.p0.identity").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="the identity of p0, and this is d0"):
        open_identity(files["p0"], InstanceId("d0"))
    assert open_identity(None, InstanceId("p0")) is None and open_identity(tmp_path / "none", InstanceId("p0")) is None
    with files_for(["p0"], None) as (_, engines):
        assert open_identity(engines["p0"], InstanceId("p0")) is not None


def test_identities_are_read_again_when_their_files_change(tmp_path, caplog) -> None:
    from baton.ticket_keys import add_fleet_key, open_identity, write_instance_file

    add_fleet_key(tmp_path / "tickets")
    files = {name: write_instance_file(tmp_path / "tickets", name) for name in ("p0", "d0")}
    identity = open_identity(files["p0"], InstanceId("p0"))
    assert identity is not None
    former = identity().credentials()
    add_fleet_key(tmp_path / "tickets")
    write_instance_file(tmp_path / "tickets", "p0")
    assert identity().credentials() != former and identity() is identity()
    latest = identity().credentials()
    (tmp_path / "tickets.d0.identity").replace(tmp_path / "tickets.p0.identity")
    assert identity().credentials() == latest and identity().me == "p0"
    assert "is the identity of d0, and this is p0" in caplog.text


async def test_the_fleets_keys_are_replaced_while_agents_run(fleet) -> None:
    """The steps of docs/security.md."""
    old, new = FLEET, read_fleet("k2 " + "33" * 32 + "\n")
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    await fleet.settle()
    for keys in ((*old, *new), new):
        for site in (p, d):
            site.keys = keys
            await fleet.settle(3)
            assert p.transfers.acquainted.enough and d.transfers.acquainted.shuns == ()
    thief = await fleet.join("p1", Role.PREFILL, keys=old)
    later = await fleet.join("d1", Role.DECODE, keys=new)
    await fleet.settle()
    assert set(p.door.known) == {"d0#1", "d1#1"} and set(d.door.known) == set(later.door.known) == {"p0#1"}
    assert thief.door.known == {}


async def test_transfers_run_until_they_are_cancelled(fleet) -> None:
    p, d = await fleet.join("p0", Role.PREFILL), await fleet.join("d0", Role.DECODE)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        tasks = [group.create_task(site.transfers.run()) for site in (p, d)]
        while not (p.door.known and d.door.known):
            await p.beat()
            await d.beat()
            fleet.registry._nudge()
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
    assert await fleet.registry.posted([Author("p0", p.agent, 1)], "d0") == (None,)


# --- the pure part ---------------------------------------------------------------------------------------------------


def test_only_roles_that_hand_over_to_each_other_meet() -> None:
    assert meet(Role.PREFILL, Role.DECODE) and meet(Role.BOTH, Role.BOTH) and meet(Role.BOTH, Role.PREFILL)
    assert not meet(Role.PREFILL, Role.PREFILL) and not meet(Role.DECODE, Role.DECODE)


def test_only_a_valid_description_is_read_as_an_engine() -> None:
    good = {"engine_id": "e", "epoch": 1, "compatibility": "c", "payloads": [{"rank": 0, "data": "AA=="}]}
    engine = read_engine(good)
    assert engine is not None and read_text(engine.text()) == engine
    assert engine.digest != read_engine({**good, "epoch": 2}).digest  # type: ignore[union-attr]
    for name, value in (("engine_id", ""), ("epoch", -1), ("epoch", True), ("payloads", []), ("payloads", [{}])):
        assert read_engine({**good, name: value}) is None
    assert read_text(b"[" * 10_000) is None and read_text(b"\xff") is None and read_engine(None) is None


@pytest.mark.parametrize(
    "told",
    [None, [], {}, {"counts": 3, "peers": []}, {"counts": {"a": "b", "c": True}, "peers": {"e": 1, "f": {}}},
     {"peers": {"e": {"instance": 5}, "f": {"instance": "p", "pulled": "x"}}}],
)  # fmt: skip
def test_a_wrong_state_gives_no_report(told: Any) -> None:
    assert read_state(told) == HandoffReport() and exposition({InstanceId("d"): read_state(told)}) == ""


def test_the_connector_understands_agents_requests() -> None:
    engine = read_engine({"engine_id": "e", "epoch": 3, "payloads": [{"rank": 1, "data": "AAE="}]})
    assert engine is not None
    told = parse(json.dumps(engine.introduction(InstanceId("p0"))).encode())
    assert told == Introduce("e", "p0", (Payload(0, 1, b"\x00\x01"),))
    meetings = Meetings(life="any", known={InstanceId("p0"): engine})
    (ask,) = meetings.due({}, [])
    assert parse(json.dumps(ask).encode()) == Forget("e")
    assert parse(b'{"ask": "metadata"}') == Metadata()


def test_a_peer_without_a_description_is_not_forgotten() -> None:
    engine = read_engine({"engine_id": "e", "payloads": [{"rank": 0, "data": "AA=="}]})
    assert engine is not None
    meetings = Meetings()
    meetings.began(engine)
    peer = InstanceId("p0")
    (ask,) = meetings.due({peer: engine}, [peer])
    meetings.told(ask, {peer: engine})
    assert meetings.due({}, [peer]) == []
    assert meetings.due({}, []) == [{"ask": "forget", "engine_id": "e"}]
