"""Decides which peers an engine has to know, and reads what its agent socket says about it. Pure.

The agent tells its engine of every peer that it may hand over to or pull from, and of a peer's end. The agent remembers
what it has told the engine for one life of the engine: an engine that restarted knows no peer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.ids import InstanceId
from cluster.instance import Load, Role
from cluster.registry.membership import Member, MemberState
from decode.peers import MET
from kvtransfer.asks import DTYPE, LEFT, PAYLOADS_MAX
from kvtransfer.early_notes import CHANNEL_STAGE

AGAIN_S, AGAIN_S_MAX = 15.0, 300.0
"""Seconds without a link after which a peer is introduced to the engine again. The pause doubles each time, up to
`AGAIN_S_MAX`."""
TEXT_CHARS_MAX = 512
"""Longest text that is kept from a socket's answer or from a peer."""
PEERS_MAX = 4096
"""Most peers that are read from a socket's report."""
ALIVE = frozenset({MemberState.STARTING, MemberState.READY, MemberState.DRAINING})
"""States in which an instance can be met. A draining one still hands over its holds; a starting one is met before it
takes work."""
PEERS_ENOUGH = 2
"""An instance takes work once this many can hand over to it, or it to them; it meets the rest meanwhile."""


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """An engine as its socket describes it: how others reach its memory. Agents seal its `text` for peers."""

    engine_id: str
    epoch: int
    compatibility: str
    payloads: tuple[tuple[int, int, str], ...] = field(repr=False)
    """Pipeline stage, rank and base64 data of each rank."""

    def text(self) -> bytes:
        """The description as canonical JSON: equal descriptions give equal bytes."""
        payloads = [{"stage": stage, "rank": rank, "data": data} for stage, rank, data in self.payloads]
        told = {"engine_id": self.engine_id, "epoch": self.epoch, "compatibility": self.compatibility}
        return json.dumps({**told, "payloads": payloads}, sort_keys=True, separators=(",", ":")).encode()

    @property
    def early(self) -> bool:
        """Whether it has a notice channel, and so takes early legs (`decode.early`)."""
        return any(stage == CHANNEL_STAGE for stage, _, _ in self.payloads)

    @property
    def digest(self) -> str:
        """Changes with any part of the description."""
        return hashlib.sha256(self.text()).hexdigest()

    def introduction(self, instance: InstanceId) -> dict[str, Any]:
        """The message that introduces this engine to another engine's socket."""
        payloads = [{"stage": stage, "rank": rank, "data": data} for stage, rank, data in self.payloads]
        return {"ask": "introduce", "engine_id": self.engine_id, "instance": instance, "payloads": payloads}


def read_engine(told: object) -> EngineEndpoint | None:
    """An engine from a socket's answer, or from what a peer sealed; None for anything else. Never raises."""
    if not isinstance(told, Mapping):
        return None
    engine_id, epoch = told.get("engine_id"), told.get("epoch", 0)
    compatibility, listed = told.get("compatibility"), told.get("payloads")
    if not isinstance(engine_id, str) or not 0 < len(engine_id) <= TEXT_CHARS_MAX:
        return None
    if type(epoch) is not int or epoch < 0 or not isinstance(listed, list) or not 0 < len(listed) <= PAYLOADS_MAX:
        return None
    payloads = [_payload(each) for each in listed]
    kept = tuple(each for each in payloads if each is not None)
    if len(kept) != len(payloads):
        return None
    return EngineEndpoint(engine_id, epoch, str(compatibility or "")[:TEXT_CHARS_MAX], kept)


def left_in(told: object) -> str:
    """From a socket's answer: why vLLM's own connector hands over the engine's KV cache; empty: Baton's does."""
    return _text_in(told, LEFT)


def dtype_in(told: object) -> str:
    """From a socket's answer: the engine's number format (`Instance.dtype`); empty: it does not say."""
    return _text_in(told, DTYPE)


def _text_in(told: object, name: str) -> str:
    text = told.get(name) if isinstance(told, Mapping) else None
    if not isinstance(text, str):
        return ""
    return "".join(char if char.isprintable() else "?" for char in text[:TEXT_CHARS_MAX])


@dataclass(frozen=True, slots=True)
class PullState:
    """The state of one engine's pulls from one other engine."""

    engine: str
    """The other engine's id, new in each of its lives."""
    instance: InstanceId
    link: str
    """The state of the introduction: ``introduced``, ``met``, ``gone``."""
    pulled: int
    failed: int
    aside: bool
    """Whether it is set aside: too many pulls have failed, so only a test pull is made now and then."""
    shunned: bool = False
    """Whether no pull may be made now, not even a test: it is set aside, and the next test is not due."""


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """An engine's report of the blocks that come and go."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts since its start, under the connector's own names."""
    pulls: tuple[PullState, ...] = ()
    recomputed_tokens: int | None = None
    """Prompt tokens that were handed over and that the engine computed itself, since its start; None: unknown."""

    @property
    def able(self) -> frozenset[str]:
        """Engines that it can pull from now: met, and not set aside."""
        return frozenset(each.engine for each in self.pulls if each.link == MET and not each.shunned)


def read_state(told: object) -> HandoffReport:
    """The report in a socket's answer; unreadable parts are left out. Never raises."""
    if not isinstance(told, Mapping):
        return HandoffReport()
    counts, peers = told.get("counts"), told.get("peers")
    listed = list(peers.items())[:PEERS_MAX] if isinstance(peers, Mapping) else []
    pulls = [_pulls(str(engine)[:TEXT_CHARS_MAX], each) for engine, each in listed]
    kept = (
        {str(name)[:TEXT_CHARS_MAX]: count for name, count in counts.items() if type(count) is int}
        if isinstance(counts, Mapping)
        else {}
    )
    tokens = told.get("recomputed_tokens")
    recomputed = tokens if type(tokens) is int and tokens >= 0 else None
    return HandoffReport(kept, tuple(each for each in pulls if each is not None), recomputed)


def with_door(load: Load, told: HandoffReport) -> Load:
    """An engine's load by vLLM's metrics, with the recomputed tokens of its socket's report, which counts exactly."""
    return load if told.recomputed_tokens is None else replace(load, recomputed_tokens=told.recomputed_tokens)


def _pulls(engine: str, told: object) -> PullState | None:
    if not isinstance(told, Mapping) or not isinstance(told.get("instance"), str):
        return None
    pulled, failed = told.get("pulled", 0), told.get("failed", 0)
    if type(pulled) is not int or type(failed) is not int:
        return None
    name = InstanceId(told["instance"][:TEXT_CHARS_MAX])
    aside, shunned = told.get("aside") is True, told.get("shunned") is True
    return PullState(engine, name, str(told.get("link", ""))[:TEXT_CHARS_MAX], pulled, failed, aside, shunned)


def exposition(reports: Mapping[InstanceId, HandoffReport]) -> str:
    """The reports of an agent's instances as Prometheus text, for its ``/metrics``: each name once."""
    events: list[tuple[str, int]] = []
    pulls: list[tuple[str, int]] = []
    aside: list[tuple[str, int]] = []
    for instance, told in reports.items():
        mine = f'instance="{instance}"'
        events += [(f'{mine},event="{_escaped(name)}"', count) for name, count in sorted(told.counts.items())]
        for each in told.pulls:
            producer = f'{mine},producer="{_escaped(each.instance)}"'
            pulls += [(f'{producer},ended="well"', each.pulled), (f'{producer},ended="badly"', each.failed)]
            aside.append((producer, int(each.aside)))
    lines = []
    for name, kind, samples in (
        ("baton_agent_connector_events_total", "counter", events),
        ("baton_agent_pulls_total", "counter", pulls),
        ("baton_agent_pair_set_aside", "gauge", aside),
    ):
        lines += [f"# TYPE {name} {kind}\n"] if samples else []
        lines += [f"{name}{{{labels}}} {value}\n" for labels, value in samples]
    return "".join(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def read_text(text: bytes) -> EngineEndpoint | None:
    """An engine from its `text`; None if that is no such text. Never raises."""
    try:
        return read_engine(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _payload(told: object) -> tuple[int, int, str] | None:
    if not isinstance(told, Mapping):
        return None
    stage, rank, data = told.get("stage", 0), told.get("rank"), told.get("data")
    if type(stage) is not int or type(rank) is not int or not isinstance(data, str):
        return None
    return (stage, rank, data) if 0 <= stage < PAYLOADS_MAX and 0 <= rank < PAYLOADS_MAX and data else None


def meet(one: Role, other: Role) -> bool:
    """Whether instances of these two roles ever hand anything over to each other."""
    return Role.BOTH in {one, other} or one is not other


def peers(
    members: Iterable[Member], me: InstanceId, role: Role, models: Iterable[str], *, shares: bool = False
) -> tuple[Member, ...]:
    """The members that this engine has to know: alive, of a role that it meets, serving a model that it serves.

    `shares`: this engine shares prompts' beginnings, so it also meets others that share, whatever their role.
    """
    mine = set(models)
    return tuple(
        member
        for member in members
        if member.id != me
        and member.beat.state in ALIVE
        and (meet(role, member.beat.role) or (shares and member.beat.peers))
        and not mine.isdisjoint(member.beat.model_names)
    )


@dataclass(slots=True)
class Meetings:
    """The peers that one life of this engine was told of."""

    life: str = ""
    """Digest of this engine: another digest is another engine, and knows no peer."""
    known: dict[InstanceId, EngineEndpoint] = field(default_factory=dict)
    _apart: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By engine id of a peer without a link: when the engine is told of it again, and the pause before that."""

    def began(self, ours: EngineEndpoint) -> None:
        """Begin with this engine; if it is another one than before, it was told of no peer yet."""
        if ours.digest != self.life:
            self.life, self.known, self._apart = ours.digest, {}, {}

    def ended(self) -> None:
        """The engine does not answer: the next one that does has to be told again."""
        self.life, self.known, self._apart = "", {}, {}

    def due(self, found: Mapping[InstanceId, EngineEndpoint], alive: Iterable[InstanceId]) -> list[dict[str, Any]]:
        """The messages for the engine's socket now, in order: forget peers that left or restarted, introduce new ones.

        `found` has engines as their instances describe them; `alive` has all living instances, described or not. An
        instance whose description is missing at the moment is not forgotten.
        """
        there = set(alive)
        asks: list[dict[str, Any]] = []
        for instance, engine in self.known.items():
            now = found.get(instance, engine) if instance in there else None
            if now is None or now.digest != engine.digest:
                asks.append({"ask": "forget", "engine_id": engine.engine_id})
        new = [(name, engine) for name, engine in found.items() if name in there and self._is_new(name, engine)]
        return [*asks, *(engine.introduction(name) for name, engine in sorted(new, key=lambda each: each[0]))]

    def again(
        self, found: Mapping[InstanceId, EngineEndpoint], told: HandoffReport, now: float
    ) -> list[dict[str, Any]]:
        """The introductions to repeat: of peers that the engine knows and has no link with. The handshake may have
        failed, or the connection been cut since. Then no router sends a request that would try the link again.

        Args:
            found: as in `due`.
            told: the engine's own report, which has its links.
            now: in seconds.
        """
        links = {each.engine: each.link for each in told.pulls}
        apart = {
            engine.engine_id: (name, engine)
            for name, engine in self.known.items()
            if links.get(engine.engine_id, MET) != MET and name in found and found[name].digest == engine.digest
        }
        self._apart = {each: self._apart.get(each, (now + AGAIN_S, AGAIN_S)) for each in apart}
        asks = []
        for engine_id, (at, pause) in self._apart.items():
            if now >= at:
                longer = min(AGAIN_S_MAX, 2 * pause)
                self._apart[engine_id] = now + longer, longer
                name, engine = apart[engine_id]
                asks.append(engine.introduction(name))
        return asks

    def told(self, ask: Mapping[str, Any], found: Mapping[InstanceId, EngineEndpoint]) -> None:
        """Note that the socket has taken this message."""
        if ask["ask"] == "forget":
            self.known = {name: each for name, each in self.known.items() if each.engine_id != ask["engine_id"]}
        else:
            instance = InstanceId(ask["instance"])
            self.known[instance] = found[instance]

    def _is_new(self, instance: InstanceId, engine: EngineEndpoint) -> bool:
        known = self.known.get(instance)
        return known is None or known.digest != engine.digest


def unable(
    producers: Iterable[Member], found: Mapping[InstanceId, EngineEndpoint], told: HandoffReport
) -> tuple[InstanceId, ...]:
    """The producers from which this engine can pull nothing now: not met in their present life, or set aside.

    `found` has engines as their instances describe them now.
    """
    names = [each.id for each in producers]
    return tuple(sorted(name for name in names if name not in found or found[name].engine_id not in told.able))


@dataclass(slots=True)
class Acquainted:
    """Which peers one instance cannot pull from, and whether it has met enough peers to take work."""

    shuns: tuple[InstanceId, ...] = ()
    """Producers, and others that share prompts' beginnings, from which the engine can pull nothing now; the heartbeat
    announces them."""
    enough: bool = False
    """Whether hand-overs work with `PEERS_ENOUGH` peers each way, or with all that exist."""
    _since: dict[InstanceId, tuple[int, int]] = field(default_factory=dict)
    """By consumer that has met this engine: the order of the consumer's heartbeat when this was first seen."""

    def look(
        self,
        me: InstanceId,
        role: Role,
        met: Iterable[Member],
        found: Mapping[InstanceId, EngineEndpoint],
        told: HandoffReport,
        *,
        shares: bool = False,
    ) -> bool:
        """Compute `shuns` and `enough` anew; True if `shuns` has changed. `met` has this engine's peers; `found` is as
        in `unable`; `shares` is as in `peers`.
        """
        listed = tuple(met)
        producers = [each for each in listed if role.decodes and each.beat.role.prefills]
        consumers = [each for each in listed if role.prefills and each.beat.role.decodes]
        sources = [each for each in listed if shares and each.beat.peers and each not in producers]
        former, self.shuns = self.shuns, unable([*producers, *sources], found, told)
        knows = {each.id: self._since.get(each.id, each.beat.order) for each in consumers if each.id in found}
        self._since = knows
        # A consumer that has met this engine says with any later heartbeat if it cannot pull from this engine.
        ready = [each for each in consumers if each.id in knows and each.beat.order > knows[each.id]]
        able = sum(me not in each.beat.shuns for each in ready)
        pulled_from = sum(each.id not in self.shuns for each in producers)
        enough_pull = pulled_from >= min(PEERS_ENOUGH, len(producers))
        self.enough = enough_pull and able >= min(PEERS_ENOUGH, len(consumers))
        return self.shuns != former

    def look_as_vllms(self, role: Role, met: Iterable[Member], found: Mapping[InstanceId, EngineEndpoint]) -> bool:
        """As `look`, for an engine of vLLM's own connector. Such an engine reaches others of its kind by their
        addresses, without a meeting. It reaches no engine of Baton's connector (those in `found`): they open no port.
        """
        producers = [each.id for each in met if role.decodes and each.beat.role.prefills]
        former, self.shuns = self.shuns, tuple(sorted(name for name in producers if name in found))
        self.enough, self._since = True, {}
        return self.shuns != former
