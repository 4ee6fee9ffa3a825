"""Which members the fleet has: heartbeats in, a snapshot and the reasons for every change out. Pure.

An agent writes its *heartbeat* into the registry about once a second. Every reader (each router, `baton status`) folds
what it reads by the rules below, on its own clock, so that readers need no agreement between them:

- **One owner per name.** The name of a live member belongs to its agent. Another agent's heartbeat under that name is
  *refused*, whatever its epoch: otherwise two live agents would take the name from each other for ever, and the one
  that restarts more would win. Only a goodbye or expiry frees a name.
- **Nothing goes back.** Of one agent only a higher (epoch, seq) counts. The same pair again is nothing new; a lower
  pair is *stale* and ignored. An agent that takes over a freed name must bring an epoch above all seen under it.
- **The reader's clock decides.** A member expires when the reader has heard no *new* heartbeat for a ttl. The agent's
  own clock is only reported: a clock that is an hour off changes no decision and is reported once, in words.
- **Deaf is not dead.** While the registry cannot be read, or takes no heartbeats, no member expires; after that every
  member gets one full ttl.

This module does not know where heartbeats are kept, and trusts none of them: the codec is total and bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from cluster.credits import POOLS_MAX, TenantDemand
from cluster.flow import SERIES_MAX, Backlog, FlowCounts
from cluster.ids import InstanceId
from cluster.instance import TENANTS_MAX, TIER_GB_S_MAX, TIER_GB_S_MIN, Instance, Load, Role, Tier

TTL_S = 6.0
"""Seconds without a new heartbeat after which a member is gone: six lost in a row. Routers and engines that talk to a
dead engine notice earlier. This timeout only ends members that no program talks to, so it may be lenient with a machine
that stalls."""

BEAT_EVERY_S = 1.0
"""Seconds between two heartbeats of one agent; changes of state are sent at once."""

HEARTBEAT_BYTES_MAX = 64 * 1024
"""Largest heartbeat read or written. A usual one has under 1 KB, most of it the models' entries."""

QUARANTINED_MAX = 64
"""A router announces what it knows of at most this many instances in quarantine, or readmitted."""

SHUNS_MAX = 1024
"""An agent announces at most this many producers that its engine pulls nothing from."""

SHUNS_BYTES_MAX = 16 * 1024
"""Most bytes of such producers' names in one heartbeat: a quarter of it."""

BEAT_MODELS_MAX = 64
"""A heartbeat lists at most this many models, LoRA adapters included."""

BEAT_MODELS_BYTES_MAX = 24 * 1024
"""Most bytes of these entries and of adapters' digests in one heartbeat: less than half of it."""

SKEW_WORTH_SAYING_S = 60.0
"""Difference of clocks that is reported. A heartbeat may be a ttl old when it is first read, so less means nothing."""

NAMES_REMEMBERED_MAX = 4096
"""Freed names whose last epoch is remembered, so that no older heartbeat counts again; the oldest names go first."""

EPOCH_ZERO_S = 1_767_225_600
"""2026-01-01 00:00 UTC in Unix seconds: where epochs begin to count."""

EPOCH_MAX = 2**48
"""No instance is started this often. A larger number in the registry was written to leave no epoch above it."""


class MemberKind(StrEnum):
    """The kinds of members; each kind has names of its own."""

    INSTANCE = "instance"
    ROUTER = "router"
    """Router replicas. Agents learn from their heartbeats how many routers share the credits; `baton status` learns
    where the routers are."""
    CONTROLLER = "controller"
    """The controller, which sizes the fleet. All controllers want one name, so that one acts at a time
    (`goodput.actuate.lease`)."""


class MemberState(StrEnum):
    """What an agent says about its instance."""

    STARTING = "starting"
    READY = "ready"
    """The only state in which new work may be sent."""
    RESTARTING = "restarting"
    DRAINING = "draining"
    """Alive; it finishes its open legs and takes no new ones."""
    STOPPING = "stopping"
    FAILED = "failed"
    """The engine does not come up; the agent stays to report it."""
    GONE = "gone"
    """The goodbye: an agent's last heartbeat, written by `Registry.leave`."""


COUNT_MAX = 2**53
"""Largest count: the largest number that every reader of JSON takes unchanged."""

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z"  # no colon: names stand between colons in the registry's keys
_MEMBER = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}(@[0-9]{1,4})?\Z"  # an instance's may end in its rank (`cluster.ids`)


def is_name(text: str) -> bool:
    """Whether an instance or a router can have this name in the registry."""
    return re.match(_NAME, text) is not None


_Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
_Member = Annotated[str, msgspec.Meta(pattern=_MEMBER)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
_GbS = Annotated[float, msgspec.Meta(ge=TIER_GB_S_MIN, le=TIER_GB_S_MAX)]
_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[!-~]+\Z", max_length=512)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """One announcement of an agent about its instance, or of a router or controller about itself.

    It has many fields because one value in the registry tells all that readers know of its sender. The sender chooses
    the text. Text that goes to logs and terminals passes the codec only without control characters.
    """

    id: Annotated[InstanceId, msgspec.Meta(pattern=_MEMBER)]
    """The name, unique in the fleet among its kind, e.g. ``prefill-0``."""
    agent: _Name
    """Random id of the agent's process: tells two processes with one name apart."""
    where: _Text = ""
    """``host:pid`` of the agent, for messages only."""
    kind: MemberKind = MemberKind.INSTANCE
    epoch: _Count = 1
    """Which start of the engine the heartbeat is about (`Registry.next_epoch`): grows with every start, also the
    agent's."""
    seq: _Count = 0
    """Grows with every heartbeat of this agent."""
    role: Role = Role.BOTH
    models: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(max_length=BEAT_MODELS_MAX)] = ()
    """The engine's own ``/v1/models`` entries, without `permission`; the first ones if they are too many."""
    adapters: Annotated[dict[_Text, _Text], msgspec.Meta(max_length=BEAT_MODELS_MAX)] = field(default_factory=dict)
    """By name of a LoRA adapter, the digest of its files; compared for equality only. An empty digest: unknown."""
    url: _Url
    """Base URL of the engine's HTTP server (of a router: of its endpoint), no trailing slash."""
    agent_url: _Url | None = None
    """Base URL of the agent's HTTP (of a router: of its admin side)."""
    state: MemberState = MemberState.STARTING
    detail: _Text = ""
    """Why the instance is in that state, in words."""
    load: Load = field(default_factory=Load)
    credits: _Count = 0
    """Legs that may be in flight at the instance, of all routers together."""
    grants: dict[_Name, _Count] = field(default_factory=dict)
    """Those legs by router (its name here), once the agent has heard of a router; the rule is in
    `engine.agent.grants`."""
    legs: dict[_Member, tuple[_Count, _Count, _Count]] = field(default_factory=dict)
    """Of a router: by instance, its legs in flight there, and the `order` of the heartbeat whose grant the router
    applies. One announcement may leave instances out; the last word about an instance holds."""
    demand: Annotated[tuple[TenantDemand, ...], msgspec.Meta(max_length=POOLS_MAX)] = ()
    """Of a router: what its tenants want of each pool."""
    counted: Annotated[tuple[FlowCounts, ...], msgspec.Meta(max_length=SERIES_MAX)] | None = None
    """Of a router: its counters since its start. None: it does not announce them."""
    backlog: Annotated[tuple[Backlog, ...], msgspec.Meta(max_length=SERIES_MAX)] = ()
    """Of a router: the requests that wait there."""
    quarantined: Annotated[
        dict[_Member, tuple[_Count, bool, _Text, _Name]], msgspec.Meta(max_length=QUARANTINED_MAX)
    ] = field(default_factory=dict)
    """Of a router: what it knows of instances in quarantine (`router.fleet.quarantine.Word`)."""
    holds: _Count = 0
    """Holds that the instance keeps for decode instances, as far as its agent knows."""
    shuns: Annotated[tuple[_Member, ...], msgspec.Meta(max_length=SHUNS_MAX)] = ()
    """Producers from which its engine can pull nothing now: not met yet, or pulls have failed (`decode.peers`). If
    `peers` is true, other instances of its models that share, of any role, are producers, too."""
    peers: bool = False
    """Whether its engine shares prompts' beginnings with instances of any role: pulls theirs, and holds its own."""
    evicted: tuple[_Count, _Count] = (0, 0)
    """Since the engine's start: tokens of KV that left the last tier block by block, and how often the whole
    cache was dropped."""
    kept: dict[Tier, _Count] = field(default_factory=dict)
    """Tokens in the tiers below its KV cache now, by tier (``host``, ``disk``); none: it has no tiers."""
    kept_gb_s: dict[Tier, _GbS] = field(default_factory=dict)
    """The rate at which the engine loads KV from each of these tiers, in GB/s (10⁹ bytes), as measured there; a tier
    that is not named was not measured."""
    kv_token_bytes: _Count = 0
    """Bytes of one token's KV, as an engine with tiers tells; 0: it does not."""
    revision: _Text = ""
    """What started the instance: a digest of its pool's specification, or a version; compared for equality only."""
    weights: _Text = ""
    """Which weights the engine serves (`engine.vllm.weights`); compared for equality only. Empty: unknown."""
    node: _Text = ""
    """Which machine the engine is on (`engine.agent.node`); compared for equality only. Empty: unknown."""
    tenants: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=TENANTS_MAX)] = ()
    """The only tenants whose requests the instance serves; none: all tenants."""
    pins: bool = False
    """Whether the engine can be told its answer's first token."""
    early: bool = False
    """Whether the engine takes decode legs before their prompt is computed."""
    dtype: _Text = ""
    """The number format in which the engine computes and keeps KV and states (`Instance.dtype`). Empty: unknown."""
    shape: dict[str, int] = field(default_factory=dict)
    """Ranks by kind of parallelism: tp, dp, ep, pp."""
    sent_at: float = 0.0
    """The sender's wall clock, Unix seconds. For information only: no decision depends on it."""

    @property
    def order(self) -> tuple[int, int]:
        """Orders the heartbeats of one agent."""
        return (self.epoch, self.seq)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which its models are served."""
        return tuple(str(entry["id"]) for entry in self.models if "id" in entry)

    @property
    def instance(self) -> Instance:
        """The instance as the rest of the fleet addresses it."""
        return Instance(
            id=self.id,
            role=self.role,
            url=self.url,
            epoch=self.epoch,
            pins=self.pins,
            early=self.early,
            dtype=self.dtype,
            weights=self.weights,
            node=self.node,
            tenants=frozenset(self.tenants),
        )

    @property
    def who(self) -> str:
        """The agent, for a message: ``agent 3f9a at host:pid``."""
        return f"agent {self.agent[:12]}" + (f" at {self.where}" if self.where else "")


_decoder = msgspec.json.Decoder(Heartbeat)


def encode(beat: Heartbeat, spare: int = 0) -> bytes:
    """One heartbeat as JSON. `spare`: bytes to leave for what is added to it.

    Raises:
        ValueError: `decode` would refuse it. The fault then shows at the sender and not at every reader.
    """
    payload = msgspec.json.encode(beat)
    _, fault = decode(payload)
    if len(payload) + spare > HEARTBEAT_BYTES_MAX:
        fault = f"{len(payload)} bytes and {spare} for its proof, and {HEARTBEAT_BYTES_MAX} is the most that is read"
    if fault:
        raise ValueError(f"a heartbeat of {beat.id!r} that no reader would take: {fault}")
    return payload


def decode(payload: bytes) -> tuple[Heartbeat | None, str]:
    """A heartbeat, or None and the fault. Unknown fields belong to a newer version and are ignored."""
    if len(payload) > HEARTBEAT_BYTES_MAX:
        return None, f"{len(payload)} bytes, and {HEARTBEAT_BYTES_MAX} is the most that is read"
    try:
        beat = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return None, "".join(char if char.isprintable() else "?" for char in str(error)[:200])
    return _checked(beat)


def _checked(beat: Heartbeat) -> tuple[Heartbeat | None, str]:
    load = beat.load
    counts = [load.running, load.waiting, load.deferred, load.external_kv_tokens, load.prompt_tokens]
    counts += [load.generation_tokens, load.kv_tokens, load.recomputed_tokens]
    if min(counts) < 0 or max(counts) > COUNT_MAX or not 0.0 <= load.kv_usage <= 1.0:
        return None, "its load has values that no engine reports"
    for name, url in (("url", beat.url), ("agent_url", beat.agent_url)):
        if url is not None and not _is_base(url):
            return None, f"`{name}` is not of the form http://HOST:PORT"
    if any(not 1 <= ranks <= 65536 for ranks in beat.shape.values()):
        return None, "its shape has a number of ranks below 1 or above 65536"
    texts = [
        ("where", beat.where),
        ("detail", beat.detail),
        ("revision", beat.revision),
        ("weights", beat.weights),
        ("node", beat.node),
        ("dtype", beat.dtype),
    ]
    said = [("demand", text) for each in beat.demand for text in (each.model, *each.tenants)]
    said += [("quarantined", because) for _, _, because, _ in beat.quarantined.values()]
    said += [("adapters", text) for pair in beat.adapters.items() for text in pair]
    for name, text in [*texts, *said, *(("models", model) for model in beat.model_names)]:
        if not text.isprintable():
            return None, f"control characters in `{name}`"
    return beat, ""


def _is_base(url: str) -> bool:
    """Whether `url` is a scheme, a host and perhaps a port and a path, as other programs connect to it."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")  # as getaddrinfo does
        return bool(parts.hostname) and parts.port != 0 and not (parts.username or parts.query or parts.fragment)
    except ValueError:  # no such port, brackets that hold no address, or a name that no host can have
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of the fleet: its last heartbeat, and when this reader heard it."""

    beat: Heartbeat
    heard_at: float
    """When that heartbeat was first heard, on the reader's monotonic clock, seconds."""
    joined_at: float
    """When this agent was first heard under this name."""
    skew_s: float | None = None
    """Seconds by which the agent's clock is ahead of the reader's (negative: behind), less the heartbeat's delay, which
    may be up to a ttl; None: unknown."""

    @property
    def id(self) -> InstanceId:
        """The member's name."""
        return self.beat.id

    @property
    def instance(self) -> Instance:
        """The instance as the rest of the fleet addresses it."""
        return self.beat.instance

    @property
    def takes_work(self) -> bool:
        """Whether new legs may be sent to the instance, as its agent says."""
        return self.beat.state is MemberState.READY


class ChangeKind(StrEnum):
    """What a fold changed, or why it did not."""

    JOINED = "joined"
    CHANGED = "changed"
    """More than load, credits and holds is new: epoch, state, role, addresses, models, revision, weights, node or
    shape."""
    LEFT = "left"
    EXPIRED = "expired"
    REFUSED = "refused"
    """The name belongs to another live agent; reported once for each refused agent, until it stops."""
    STALE = "stale"
    """The heartbeat is older than one that is known already."""
    SKEWED = "skewed"
    """The agent's clock is far off; reported once for each agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the fleet, or one reason for no change."""

    what: ChangeKind
    id: InstanceId
    because: str
    """A whole sentence for the log that names the agent and the reason."""
    member: Member | None = None
    """The member after a join or change, the last known one after a leave; None if the heartbeat did not count."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet at one moment, by name. Frozen: routers and `baton status` read it while the next fold runs."""

    members: tuple[Member, ...] = ()
    """Sorted by name."""
    refused: tuple[str, ...] = ()
    """Why names are contested right now, one line each."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def get(self, name: str) -> Member | None:
        """One member; None if no member has that name."""
        return next((member for member in self.members if member.id == name), None)


@dataclass(frozen=True, slots=True)
class _Parted:
    """The last heartbeat under a freed name, and how the name became free. Nothing at or below that heartbeat counts
    again.
    """

    beat: Heartbeat
    """Without what it said of loads and counters (`_bare`)."""
    how: str


class Membership:
    """Folds the heartbeats of one kind for one reader. All times are on that reader's monotonic clock, seconds."""

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self.ttl_s = ttl_s
        self._members: dict[InstanceId, Member] = {}
        self._parted: dict[InstanceId, _Parted] = {}
        self._deaf = False
        """Whether the last reading of the registry failed."""
        self._heard_again_at = -math.inf
        self._said: dict[tuple[InstanceId, str], tuple[ChangeKind, tuple[int, int], str]] = {}
        """By name and agent, the last fault that was reported: its kind, the heartbeat's order, the sentence."""
        self._skewed: set[tuple[InstanceId, str]] = set()
        """Name and agent of the members whose clocks were reported."""

    def fold(self, beats: Iterable[Heartbeat], now: float, wall: float | None = None) -> tuple[Change, ...]:
        """Take the heartbeats that were read from the registry at `now`. A successful read also ends deafness.

        The result does not depend on the order of `beats`. `wall` is the reader's own wall clock (Unix seconds), used
        only to report a clock that is off.
        """
        if self._deaf:
            self._deaf, self._heard_again_at = False, now
        newest = _newest(beats)
        owners = [beat for beat in newest if self._owns(beat)]
        others = [beat for beat in newest if not self._owns(beat)]
        changes = [change for beat in owners for change in self._renew(beat, now, wall)]
        changes += self._expire(now)
        changes += [change for beat in others for change in self._arrive(beat, now, wall)]
        heard = {(beat.id, beat.agent) for beat in newest}
        self._said = {sender: said for sender, said in self._said.items() if sender in heard}
        self._skewed &= {(member.id, member.beat.agent) for member in self._members.values()}
        return tuple(changes)

    def deaf(self) -> None:
        """Note that the registry could not be read, or takes no heartbeats. No member expires until the next `fold`;
        from there each has a full ttl.
        """
        self._deaf = True

    def snapshot(self) -> Snapshot:
        """All members of the fleet, by name."""
        members = tuple(self._members[name] for name in sorted(self._members))
        refused = tuple(sorted(line for what, _, line in self._said.values() if what is ChangeKind.REFUSED))
        return Snapshot(members, refused)

    # --- one heartbeat -----------------------------------------------------------------------------------------------

    def _owns(self, beat: Heartbeat) -> bool:
        member = self._members.get(beat.id)
        return member is not None and member.beat.agent == beat.agent

    def _renew(self, beat: Heartbeat, now: float, wall: float | None) -> Iterator[Change]:
        """Take another heartbeat of the agent that has the name."""
        member = self._members[beat.id]
        if beat.order < member.beat.order:
            yield from self._say_once(ChangeKind.STALE, beat, _stale(beat, member.beat, "has been heard"))
        if beat.order <= member.beat.order:
            return
        if beat.state is MemberState.GONE:
            yield self._part(member, ChangeKind.LEFT, f"{beat.id} left: {beat.who} said goodbye", beat)
            return
        self._members[beat.id] = renewed = Member(
            beat=beat, heard_at=now, joined_at=member.joined_at, skew_s=_skew(beat, wall)
        )
        differs = _differs(member.beat, beat)
        if differs:
            yield Change(what=ChangeKind.CHANGED, id=beat.id, because=f"{beat.id}: {differs}", member=renewed)
        yield from self._tell_skew(renewed)

    def _arrive(self, beat: Heartbeat, now: float, wall: float | None) -> Iterator[Change]:
        """Take a heartbeat of an agent that does not have the name."""
        member = self._members.get(beat.id)
        if beat.state is MemberState.GONE:  # the goodbye of an agent that was no member
            self._said.pop((beat.id, beat.agent), None)
            return
        if member is not None:
            if beat.epoch < member.beat.epoch:
                yield from self._say_once(ChangeKind.STALE, beat, _stale(beat, member.beat, "is in"))
            else:
                yield from self._say_once(ChangeKind.REFUSED, beat, _contested(beat, member))
            return
        parted = self._parted.get(beat.id)
        if parted is not None and not _follows(beat, parted.beat):
            if (beat.agent, beat.order) != (parted.beat.agent, parted.beat.order):
                yield from self._say_once(ChangeKind.STALE, beat, _stale(beat, parted.beat, parted.how))
            return
        self._said.pop((beat.id, beat.agent), None)
        self._parted.pop(beat.id, None)
        self._members[beat.id] = joined = Member(beat=beat, heard_at=now, joined_at=now, skew_s=_skew(beat, wall))
        yield Change(what=ChangeKind.JOINED, id=beat.id, because=_joined(beat, parted), member=joined)
        yield from self._tell_skew(joined)

    def _expire(self, now: float) -> Iterator[Change]:
        for member in tuple(self._members.values()):
            silent_s = now - max(member.heard_at, self._heard_again_at)
            if silent_s >= self.ttl_s:
                because = (
                    f"{member.id} expired: nothing new from {member.beat.who} for {silent_s:.1f} s; "
                    f"it was {member.beat.state.value} in epoch {member.beat.epoch}"
                )
                yield self._part(member, ChangeKind.EXPIRED, because, member.beat)

    def _part(self, member: Member, what: ChangeKind, because: str, last: Heartbeat) -> Change:
        del self._members[member.id]
        self._parted[member.id] = _Parted(_bare(last), what.value)
        if len(self._parted) > NAMES_REMEMBERED_MAX:
            del self._parted[next(iter(self._parted))]
        return Change(what=what, id=member.id, because=because, member=member)

    def _say_once(self, what: ChangeKind, beat: Heartbeat, because: str) -> Iterator[Change]:
        """Report a refused or stale agent once, not at every read: until it stops, or commits another fault."""
        said = self._said.get((beat.id, beat.agent))
        repeated = said is not None and said[0] is what and (what is ChangeKind.REFUSED or said[1] == beat.order)
        self._said[beat.id, beat.agent] = (what, beat.order, because)
        if not repeated:
            yield Change(what=what, id=beat.id, because=because)

    def _tell_skew(self, member: Member) -> Iterator[Change]:
        sender = (member.id, member.beat.agent)
        if member.skew_s is None or abs(member.skew_s) < SKEW_WORTH_SAYING_S or sender in self._skewed:
            return
        self._skewed.add(sender)
        where = "ahead of" if member.skew_s > 0 else "behind"
        because = (
            f"{member.id}: the clock of {member.beat.who} is {duration(abs(member.skew_s))} {where} this one; "
            "nothing is decided by it, but its logs will mislead"
        )
        yield Change(what=ChangeKind.SKEWED, id=member.id, because=because, member=member)


def next_epoch(stored: int | None, above: int, clock_s: float) -> int:
    """The epoch to give out: above all that the registry gave out (`stored`) and above the caller's own last one.

    The epoch also never falls behind the registry's clock (`clock_s`, Unix seconds; 0 for a registry without one),
    counted in seconds since 2026. Otherwise a registry that lost its data would begin at 1 again. Every reader that
    remembers a higher epoch would then take the new engine's heartbeat for an old one. An engine takes seconds to
    start, so a count of starts never outruns the clock for long, and stored epochs may be forgotten after a while. A
    stored number above `EPOCH_MAX` does not count.
    """
    if stored is None or stored > EPOCH_MAX:
        stored = 0
    return max(stored + 1, above + 1, int(clock_s) - EPOCH_ZERO_S if clock_s else 0)


def duration(seconds: float) -> str:
    """A length of time in words, to one unit: ``90 s``, ``2 min``, ``1.0 h``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"


def _bare(beat: Heartbeat) -> Heartbeat:
    """Who sent a heartbeat, and when. The whole one may take a few hundred kilobytes, and routers have new names at
    each start: the last heartbeats of months are remembered.
    """
    return Heartbeat(
        id=beat.id, agent=beat.agent, where=beat.where, kind=beat.kind, epoch=beat.epoch, seq=beat.seq, url=beat.url
    )


def _newest(beats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """The last heartbeat of each agent and name. A freed name goes to the highest epoch, then to the lower agent id."""
    newest: dict[tuple[InstanceId, str], Heartbeat] = {}
    for beat in beats:
        known = newest.get((beat.id, beat.agent))
        if known is None or beat.order > known.order:
            newest[beat.id, beat.agent] = beat
    return sorted(newest.values(), key=lambda beat: (beat.id, -beat.epoch, beat.agent))


def _follows(beat: Heartbeat, last: Heartbeat) -> bool:
    """Whether `beat` may take a name that is free since `last`: the same agent goes on, another agent needs a new
    epoch.
    """
    return beat.order > last.order if beat.agent == last.agent else beat.epoch > last.epoch


def _skew(beat: Heartbeat, wall: float | None) -> float | None:
    return beat.sent_at - wall if wall is not None and beat.sent_at else None


def _differs(old: Heartbeat, new: Heartbeat) -> str:
    """What is new beyond load, credits and holds, in words; empty if that is all."""
    parts = []
    if new.epoch != old.epoch:
        parts.append(f"its engine was started anew, epoch {old.epoch} → {new.epoch}")
    if new.state is not old.state:
        parts.append(f"{old.state.value} → {new.state.value}" + (f" ({new.detail})" if new.detail else ""))
    for name in ("role", "url", "agent_url", "revision", "weights", "node"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            parts.append(f"{name} {before or 'none'} → {after or 'none'}")
    if new.models != old.models:
        parts.append(f"models {', '.join(old.model_names) or 'none'} → {', '.join(new.model_names) or 'none'}")
    if new.shape != old.shape:
        parts.append(f"shape {old.shape} → {new.shape}")
    return "; ".join(parts)


def _joined(beat: Heartbeat, parted: _Parted | None) -> str:
    line = f"{beat.id} joined: {beat.role.value} at {beat.url}, {beat.state.value}, epoch {beat.epoch}, {beat.who}"
    if parted is None:
        return line
    if parted.beat.agent == beat.agent:
        return f"{line}; it is heard again, after it {parted.how}"
    return f"{line}; it takes the name over from {parted.beat.who}, which {parted.how}"


def _contested(beat: Heartbeat, member: Member) -> str:
    return (
        f"{beat.id}: {beat.who} is refused, the name belongs to {member.beat.who}, which is alive "
        f"({member.beat.state.value}, epoch {member.beat.epoch}): two agents with one name; give one another name"
    )


def _stale(beat: Heartbeat, last: Heartbeat, how: str) -> str:
    return (
        f"{beat.id}: a heartbeat from before is ignored: epoch {beat.epoch} seq {beat.seq} of {beat.who}, "
        f"where epoch {last.epoch} seq {last.seq} of {last.who} {how}"
    )
