"""Who is in the fleet: heartbeats in, a snapshot and the reasons for every change out. Pure.

An agent writes its *heartbeat* into the registry about once a second. Every reader (each router, `baton status`) folds
what it reads by the rules below, on its own clock, so that readers need no agreement between them:

- **One owner per name.** The name of a live member is its agent's. Another agent's heartbeat under that name is
  *refused*, whatever its epoch: else two agents that are both alive would take the name from each other for ever, and
  the one that restarts more would win. Only goodbye or expiry frees a name.
- **Nothing goes back.** Of one agent only a higher (epoch, seq) counts; the same one again is nothing new, a lower one
  is *stale* and ignored. An agent that takes a freed name over must bring an epoch above all seen under it.
- **The reader's clock decides.** A member expires when no *new* heartbeat was heard for a ttl. What the agent's own
  clock says is only reported: one that is an hour off folds right and is told once, in words.
- **Deaf is not dead.** While the registry cannot be read nobody expires, and after it everyone gets one full ttl.

It does not know where heartbeats are kept, and trusts none of them: the codec is total and bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from cluster.credits import POOLS_MAX, Demand
from cluster.flow import SERIES_MAX, Backlog, Counted
from cluster.ids import InstanceId
from cluster.instance import TENANTS_MAX, Instance, Load, Role

TTL_S = 6.0
"""Seconds without a new heartbeat after which a member is gone: six lost in a row. A dead engine is noticed sooner by
those who talk to it; this only ends what nobody talks to, so it may be lenient with a machine that stalls."""

BEAT_EVERY_S = 1.0
"""Seconds between two heartbeats of one agent; changes of state are sent at once."""

HEARTBEAT_BYTES_MAX = 64 * 1024
"""Largest heartbeat read or written. A usual one has under 1 KB, most of it the models' entries."""

QUARANTINED_MAX = 32
"""Instances of which a router announces whether they are set aside."""

SHUNS_MAX = 1024
"""Producers of which an agent announces that its engine pulls nothing from them..."""

SHUNS_BYTES_MAX = 16 * 1024
"""... and bytes of their names, a quarter of a heartbeat."""

SKEW_WORTH_SAYING_S = 60.0
"""Difference of clocks that is reported. A heartbeat may be a ttl old when it is first read, so less says nothing."""

NAMES_REMEMBERED_MAX = 4096
"""Names that left and whose last epoch is kept, so that nothing from before comes back; the oldest go first."""

EPOCH_ZERO_S = 1_767_225_600
"""2026-01-01 00:00 UTC in Unix seconds: where epochs begin to count."""

EPOCH_MAX = 2**48
"""No instance is started so often. A larger number in the registry was put there to have no epoch above it."""


class Kind(StrEnum):
    """What announces itself; each kind has names of its own."""

    INSTANCE = "instance"
    ROUTER = "router"
    """Router replicas: agents learn from them how many share their credits, `baton status` where they are."""
    CONTROLLER = "controller"
    """What sizes the fleet. All of them want one name, so that one at a time acts (`goodput.actuate.lease`)."""


class State(StrEnum):
    """What an agent says about its instance."""

    STARTING = "starting"
    READY = "ready"
    """The only state in which new work may be sent."""
    RESTARTING = "restarting"
    DRAINING = "draining"
    """Alive, finishes what it has."""
    STOPPING = "stopping"
    FAILED = "failed"
    """The engine does not come up; the agent stays to say so."""
    GONE = "gone"
    """The goodbye: an agent's last heartbeat, written by `Registry.leave`."""


COUNT_MAX = 2**53
"""Above any count that is one: the largest number that every reader of JSON takes as it is."""

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\Z"  # no colon: names stand between colons in the registry's keys
_Name = Annotated[str, msgspec.Meta(pattern=_NAME)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Url = Annotated[str, msgspec.Meta(pattern=r"^https?://[!-~]+\Z", max_length=512)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one agent says of its instance (or a router of itself), once.

    Text is the sender's own and goes to logs and terminals: control characters do not pass the codec.
    """

    id: Annotated[InstanceId, msgspec.Meta(pattern=_NAME)]
    """The name, unique in the fleet among its kind, e.g. ``prefill-0``."""
    agent: _Name
    """Random id of the agent's process: tells two processes with one name apart."""
    where: _Text = ""
    """``host:pid`` of the agent, for messages only."""
    kind: Kind = Kind.INSTANCE
    epoch: _Count = 1
    """Which start of the engine this is about (`Registry.next_epoch`): grows with every start, also of the agent."""
    seq: _Count = 0
    """Grows with every heartbeat of this agent."""
    role: Role = Role.BOTH
    models: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(max_length=64)] = ()
    """The engine's own ``/v1/models`` entries."""
    adapters: Annotated[dict[_Text, _Text], msgspec.Meta(max_length=64)] = field(default_factory=dict)
    """Of the LoRA adapters among them, digests of their files: told apart by equality only; empty: unknown."""
    url: _Url
    """Base URL of the engine's HTTP server (of a router: of its endpoint), no trailing slash."""
    agent_url: _Url | None = None
    """Base URL of the agent's HTTP (of a router: of its admin side)."""
    state: State = State.STARTING
    detail: _Text = ""
    """Why it is in that state, in words."""
    load: Load = field(default_factory=Load)
    credits: _Count = 0
    """Legs that may be in flight there in all, of all routers together."""
    grants: dict[_Name, _Count] = field(default_factory=dict)
    """Those legs by router (its name here), once the agent has heard of one; how: `engine.agent.grants`."""
    legs: dict[_Name, tuple[_Count, _Count, _Count]] = field(default_factory=dict)
    """Of a router: by instance, its legs in flight there, and the `order` of the heartbeat whose grant it goes by. Not
    each announcement names every instance; the last word about one holds."""
    demand: Annotated[tuple[Demand, ...], msgspec.Meta(max_length=POOLS_MAX)] = ()
    """Of a router: what its tenants want of each pool."""
    counted: Annotated[tuple[Counted, ...], msgspec.Meta(max_length=SERIES_MAX)] | None = None
    """Of a router: what it has counted of its requests since it began. None: it does not say."""
    backlog: Annotated[tuple[Backlog, ...], msgspec.Meta(max_length=SERIES_MAX)] = ()
    """Of a router: what stands in line there."""
    quarantined: Annotated[dict[_Name, tuple[_Count, bool, _Text, _Name]], msgspec.Meta(max_length=QUARANTINED_MAX)] = (
        field(default_factory=dict)
    )
    """Of a router: what it has heard of instances that operators set aside (`router.quarantine.Word`)."""
    holds: _Count = 0
    """Holds it keeps for decode instances, as far as its agent knows."""
    shuns: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=SHUNS_MAX)] = ()
    """Producers from which its engine can pull nothing now: not met yet, or pulls have failed (`decode.peers`)."""
    evicted: tuple[_Count, _Count] = (0, 0)
    """Since its engine's start: tokens whose KV was thrown out of its cache block by block, and how often all of it
    was."""
    revision: _Text = ""
    """What started it: a digest of its pool's specification, or a version; told apart by equality only."""
    weights: _Text = ""
    """Which weights it serves (`engine.agent.weights`), and..."""
    node: _Text = ""
    """... on which machine (`engine.agent.node`): told apart by equality only; empty: it does not say."""
    tenants: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=TENANTS_MAX)] = ()
    """Whose requests alone it serves; none: everybody's."""
    pins: bool = False
    """Whether the engine can be told its answer's first token."""
    shape: dict[str, int] = field(default_factory=dict)
    """Ranks by kind of parallelism: tp, dp, ep, pp."""
    sent_at: float = 0.0
    """The sender's wall clock, Unix seconds. Informative: nothing is decided by it."""

    @property
    def order(self) -> tuple[int, int]:
        """By this the heartbeats of one agent are ordered."""
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
            weights=self.weights,
            node=self.node,
            tenants=frozenset(self.tenants),
        )

    @property
    def who(self) -> str:
        """The agent, for a message: ``agent 3f9a (host:pid)``."""
        return f"agent {self.agent[:12]}" + (f" at {self.where}" if self.where else "")


_decoder = msgspec.json.Decoder(Heartbeat)


def encode(beat: Heartbeat) -> bytes:
    """One heartbeat as JSON.

    Raises:
        ValueError: what `decode` would not read, so that a fault shows at its author and not at every reader.
    """
    payload = msgspec.json.encode(beat)
    _, fault = decode(payload)
    if fault:
        raise ValueError(f"a heartbeat of {beat.id!r} that nobody would read: {fault}")
    return payload


def decode(payload: bytes) -> tuple[Heartbeat | None, str]:
    """A heartbeat, or None and what is wrong with it. Fields it does not know are a newer version's and ignored."""
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
    ]
    said = [("demand", text) for each in beat.demand for text in (each.model, *each.tenants)]
    said += [("quarantined", because) for _, _, because, _ in beat.quarantined.values()]
    said += [("adapters", text) for pair in beat.adapters.items() for text in pair]
    for name, text in [*texts, *said, *(("models", model) for model in beat.model_names)]:
        if not text.isprintable():
            return None, f"control characters in `{name}`"
    return beat, ""


def _is_base(url: str) -> bool:
    """Whether it is scheme, host and perhaps port and path, as others connect to it."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and not (parts.username or parts.query or parts.fragment)
    except ValueError:  # no such port, or brackets that hold no address
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One that is in the fleet: its last heartbeat, and when this reader heard it."""

    beat: Heartbeat
    heard_at: float
    """When that heartbeat was first heard, on the reader's monotonic clock, seconds."""
    joined_at: float
    """When this agent was first heard under this name."""
    skew_s: float | None = None
    """How far the agent's clock is ahead of the reader's (behind: negative), seconds; up to a ttl of it is delay."""

    @property
    def id(self) -> InstanceId:
        """Its name."""
        return self.beat.id

    @property
    def instance(self) -> Instance:
        """The instance as the rest of the fleet addresses it."""
        return self.beat.instance

    @property
    def takes_work(self) -> bool:
        """Whether new legs may be sent there, by its own word."""
        return self.beat.state is State.READY


class What(StrEnum):
    """What a fold changed, or why it did not."""

    JOINED = "joined"
    CHANGED = "changed"
    """Epoch, state, role, addresses, models, revision or shape are new: more than load, credits, holds."""
    LEFT = "left"
    EXPIRED = "expired"
    REFUSED = "refused"
    """The name belongs to another agent that is alive; said once for each refused agent, until it stops."""
    STALE = "stale"
    """A heartbeat from before what is known already."""
    SKEWED = "skewed"
    """The agent's clock is far off; said once for each agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One line of news."""

    what: What
    id: InstanceId
    because: str
    """A whole sentence for the log, naming who and why."""
    member: Member | None = None
    """The member after a join or change, the last known one after it left; None where nothing was taken."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet at one moment, by name. Frozen: routers and `baton status` read it while the next fold runs."""

    members: tuple[Member, ...] = ()
    """Sorted by name."""
    deaf_since: float | None = None
    """Since when the registry cannot be read, reader's clock; None while it can."""
    refused: tuple[str, ...] = ()
    """Why names are contested right now, one line each."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def get(self, name: str) -> Member | None:
        """One member; None if nobody has that name."""
        return next((member for member in self.members if member.id == name), None)


@dataclass(frozen=True, slots=True)
class _Parted:
    """The last heartbeat under a name that is free now, and how it became free: nothing at or below it counts again."""

    beat: Heartbeat
    how: str


class Membership:
    """Folds the heartbeats of one kind for one reader. All times are on that reader's monotonic clock, seconds."""

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self.ttl_s = ttl_s
        self._members: dict[InstanceId, Member] = {}
        self._parted: dict[InstanceId, _Parted] = {}
        self._deaf_since: float | None = None
        self._heard_again_at = -math.inf
        self._said: dict[tuple[InstanceId, str], tuple[What, tuple[int, int], str]] = {}
        self._skewed: set[tuple[InstanceId, str]] = set()

    def fold(self, beats: Iterable[Heartbeat], now: float, wall: float | None = None) -> tuple[Change, ...]:
        """Take what was read from the registry at `now`; a read that succeeded also ends deafness.

        The result does not depend on the order of `beats`. `wall` is the reader's own wall clock (Unix seconds), used
        for nothing but to say whose clock is off.
        """
        if self._deaf_since is not None:
            self._deaf_since, self._heard_again_at = None, now
        newest = _newest(beats)
        owners = [beat for beat in newest if self._owns(beat)]
        others = [beat for beat in newest if not self._owns(beat)]
        changes = [change for beat in owners for change in self._renew(beat, now, wall)]
        changes += self._expire(now)
        changes += [change for beat in others for change in self._arrive(beat, now, wall)]
        heard = {(beat.id, beat.agent) for beat in newest}
        self._said = {who: said for who, said in self._said.items() if who in heard}
        self._skewed &= {(member.id, member.beat.agent) for member in self._members.values()}
        return tuple(changes)

    def deaf(self, now: float) -> None:
        """The registry could not be read. Nobody expires until a `fold` says that it can be again."""
        if self._deaf_since is None:
            self._deaf_since = now

    def snapshot(self) -> Snapshot:
        """Everyone who is in the fleet, by name."""
        members = tuple(self._members[name] for name in sorted(self._members))
        refused = tuple(sorted(line for what, _, line in self._said.values() if what is What.REFUSED))
        return Snapshot(members, self._deaf_since, refused)

    # --- one heartbeat -----------------------------------------------------------------------------------------------

    def _owns(self, beat: Heartbeat) -> bool:
        member = self._members.get(beat.id)
        return member is not None and member.beat.agent == beat.agent

    def _renew(self, beat: Heartbeat, now: float, wall: float | None) -> Iterator[Change]:
        """Another heartbeat of the agent that has the name."""
        member = self._members[beat.id]
        if beat.order < member.beat.order:
            yield from self._say_once(What.STALE, beat, _stale(beat, member.beat, "has been heard"))
        if beat.order <= member.beat.order:
            return
        if beat.state is State.GONE:
            yield self._part(member, What.LEFT, f"{beat.id} left: {beat.who} said goodbye", beat)
            return
        self._members[beat.id] = renewed = Member(
            beat=beat, heard_at=now, joined_at=member.joined_at, skew_s=_skew(beat, wall)
        )
        differs = _differs(member.beat, beat)
        if differs:
            yield Change(what=What.CHANGED, id=beat.id, because=f"{beat.id}: {differs}", member=renewed)
        yield from self._tell_skew(renewed)

    def _arrive(self, beat: Heartbeat, now: float, wall: float | None) -> Iterator[Change]:
        """A heartbeat of an agent that does not have the name."""
        member = self._members.get(beat.id)
        if beat.state is State.GONE:  # the goodbye of one that was not in
            self._said.pop((beat.id, beat.agent), None)
            return
        if member is not None:
            if beat.epoch < member.beat.epoch:
                yield from self._say_once(What.STALE, beat, _stale(beat, member.beat, "is in"))
            else:
                yield from self._say_once(What.REFUSED, beat, _contested(beat, member))
            return
        parted = self._parted.get(beat.id)
        if parted is not None and not _follows(beat, parted.beat):
            if (beat.agent, beat.order) != (parted.beat.agent, parted.beat.order):
                yield from self._say_once(What.STALE, beat, _stale(beat, parted.beat, parted.how))
            return
        self._said.pop((beat.id, beat.agent), None)
        self._parted.pop(beat.id, None)
        self._members[beat.id] = joined = Member(beat=beat, heard_at=now, joined_at=now, skew_s=_skew(beat, wall))
        yield Change(what=What.JOINED, id=beat.id, because=_joined(beat, parted), member=joined)
        yield from self._tell_skew(joined)

    def _expire(self, now: float) -> Iterator[Change]:
        for member in tuple(self._members.values()):
            silent_s = now - max(member.heard_at, self._heard_again_at)
            if silent_s >= self.ttl_s:
                because = (
                    f"{member.id} expired: nothing new from {member.beat.who} for {silent_s:.1f} s; "
                    f"it was {member.beat.state.value} in epoch {member.beat.epoch}"
                )
                yield self._part(member, What.EXPIRED, because, member.beat)

    def _part(self, member: Member, what: What, because: str, last: Heartbeat) -> Change:
        del self._members[member.id]
        self._parted[member.id] = _Parted(last, what.value)
        if len(self._parted) > NAMES_REMEMBERED_MAX:
            del self._parted[next(iter(self._parted))]
        return Change(what=what, id=member.id, because=because, member=member)

    def _say_once(self, what: What, beat: Heartbeat, because: str) -> Iterator[Change]:
        """A refused or stale agent is news once, not at every read: until it stops, or is at fault in another way."""
        said = self._said.get((beat.id, beat.agent))
        repeated = said is not None and said[0] is what and (what is What.REFUSED or said[1] == beat.order)
        self._said[beat.id, beat.agent] = (what, beat.order, because)
        if not repeated:
            yield Change(what=what, id=beat.id, because=because)

    def _tell_skew(self, member: Member) -> Iterator[Change]:
        who = (member.id, member.beat.agent)
        if member.skew_s is None or abs(member.skew_s) < SKEW_WORTH_SAYING_S or who in self._skewed:
            return
        self._skewed.add(who)
        where = "ahead of" if member.skew_s > 0 else "behind"
        because = (
            f"{member.id}: the clock of {member.beat.who} is {duration(abs(member.skew_s))} {where} this one; "
            "nothing is decided by it, but its logs will mislead"
        )
        yield Change(what=What.SKEWED, id=member.id, because=because, member=member)


def next_epoch(stored: int | None, above: int, clock_s: float) -> int:
    """The epoch to give out: above all that the registry gave out (`stored`) and above the caller's own last one.

    It also never falls behind the registry's clock (`clock_s`, Unix seconds; 0 for a registry without one), counted in
    seconds since 2026: a registry that lost its data would otherwise begin at 1 again, and every reader that remembers
    more would take the newcomer for a heartbeat from before. An engine takes seconds to start, so a count of starts
    never outruns it for long, and what has been stored may be forgotten after a while. A stored number above
    `EPOCH_MAX` counts as none.
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


def _newest(beats: Iterable[Heartbeat]) -> list[Heartbeat]:
    """The last of each agent and name; a freed name goes to the highest epoch, between equals to the lower agent id."""
    newest: dict[tuple[InstanceId, str], Heartbeat] = {}
    for beat in beats:
        known = newest.get((beat.id, beat.agent))
        if known is None or beat.order > known.order:
            newest[beat.id, beat.agent] = beat
    return sorted(newest.values(), key=lambda beat: (beat.id, -beat.epoch, beat.agent))


def _follows(beat: Heartbeat, last: Heartbeat) -> bool:
    """Whether it may take up a name that was free since `last`: the same agent goes on, another begins a new epoch."""
    return beat.order > last.order if beat.agent == last.agent else beat.epoch > last.epoch


def _skew(beat: Heartbeat, wall: float | None) -> float | None:
    return beat.sent_at - wall if wall is not None and beat.sent_at else None


def _differs(old: Heartbeat, new: Heartbeat) -> str:
    """What is new beyond load, credits and holds, in words; empty if nothing is."""
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
