"""One rank's end of every handoff: carries out what its ledger wants, over any carrier. No clock, no thread of its own.

Whoever owns it (the connector inside an engine, a test) calls `tell` with what the engine says and `poll` as often as
it can; both return what the engine has to do. In between nothing happens but bytes moving.

What it sees to, beside carrying bytes:

- notes are believed only with the pair's MAC (`kvtransfer.envelope`), claims and registrations only with a ticket;
- a read's parts are paced (`kvtransfer.pacing`); what is not wanted any more and not yet posted is not posted;
- a stamp is written before a hold is offered and wiped before its blocks are freed; and a consumer that knows a hold's
  stamp asks it instead of the producer (`kvtransfer.stamps`), and the producer where that fails;
- a link is cut by posting nothing more on it, waiting until all flights on it have *ended*, and only then forgetting
  the peer: no carrier takes back what is posted, and `LinkEnded` promises that nothing touches our memory any more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.ids import InstanceId, TransferId
from kvtransfer.carrier import Carrier, CarrierFailed, Flight, Grid, Memory, Prepared, Progress, Region, Way
from kvtransfer.envelope import Envelopes, Fault, PairKey
from kvtransfer.events import (
    Abort,
    Claimed,
    CutLink,
    Effect,
    Event,
    Filled,
    FreeBlocks,
    LinkEnded,
    Offer,
    PeerLost,
    PeerSeen,
    PostRead,
    PostWrite,
    Proof,
    ReadEnded,
    ReadStarted,
    Received,
    Recompute,
    Refused,
    Registered,
    Report,
    ReservePull,
    Send,
    Tick,
    Use,
    WritesEnded,
)
from kvtransfer.introduction import Introduction, read_introduction
from kvtransfer.layout import Shard, Tensor, block_bytes, grids, parts, pieces, sources
from kvtransfer.ledger import Ledger
from kvtransfer.messages import (
    AskConfirm,
    Blocks,
    Claim,
    ClaimRefused,
    Confirmation,
    Message,
    Peer,
    Register,
    Withdraw,
)
from kvtransfer.pacing import Limits, Pacer
from kvtransfer.stamps import STAMP_BYTES, Stamp, StampTable, stands
from kvtransfer.table import Side

EngineEffect = Offer | Use | FreeBlocks | Recompute | Refused | Report
"""What is left for the engine to do."""

Admit = Callable[[Peer, Claim | Register], Proof | str]
"""Checks a ticket: what the ledger needs of it, or why it is refused. Has keys and a clock, and never raises."""

Check = Callable[[Use], bool]
"""Whether these blocks hold what they should."""

LINK_SHIFT = 20
"""Links of one life: a million. Their numbers begin with the epoch, so no two lives share one."""
NOTES_A_POLL_MAX = 4096
"""Notes read in one `poll`; the rest are read in the next: a flood must not keep an engine from its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OurMemory:
    """What of this rank's memory takes part."""

    tensors: tuple[Tensor, ...]
    shard: Shard = field(default_factory=Shard)
    memory: Memory = Memory.DRAM
    stamps: int = 0
    """Address of the stamp table, in host memory; `slots` stamps."""
    slots: int = 0
    scratch: int = 0
    """Address of as much room as `scratch_view` has: what is read of other tables lands here."""
    scratch_view: memoryview | bytearray = field(default_factory=bytearray, repr=False)

    @property
    def regions(self) -> list[Region]:
        """All of it, to be registered."""
        found = [
            Region(each.address, each.block_bytes * each.blocks, each.device, self.memory) for each in self.tensors
        ]
        found += [Region(self.stamps, self.slots * STAMP_BYTES)] if self.slots else []
        found += [Region(self.scratch, len(self.scratch_view))] if len(self.scratch_view) else []
        return found


Key = tuple[Side, TransferId, int]
"""Of a transfer: ours as consumer or as producer, its id, its reservation's serial."""


@dataclass(slots=True)
class _Rank:
    """One rank of a peer."""

    said: Introduction
    ours: Prepared
    theirs: Prepared
    grids: tuple[Grid, ...]
    their_grids: tuple[Grid, ...]
    stamps: Prepared | None


@dataclass(slots=True)
class _Link:
    """The connection with one life of a peer."""

    peer: Peer
    number: int
    tp: int
    ranks: dict[int, _Rank] = field(default_factory=dict)
    flights: int = 0
    registered: bool = False
    """A registration of ours went over it: the peer may write into our memory."""
    cutting: bool = False


@dataclass(slots=True)
class _Part:
    rank: int
    first: int
    end: int


@dataclass(slots=True)
class _Move:
    """One read or write of the ledger, cut into parts."""

    key: Key
    way: Way
    instance: InstanceId
    ours: Blocks
    theirs: Blocks
    parts: list[_Part]
    ended: set[int] = field(default_factory=set)
    ok: bool = True
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class _StampRead:
    """A look at a producer's slot."""

    to: InstanceId
    asked: AskConfirm
    expected: Stamp
    scratch: int


@dataclass(slots=True)
class Counts:
    """What an endpoint did since its start."""

    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    writes: int = 0
    read_s: float = 0.0
    """Sum over reads, from the ledger's order to the last part's end: waiting for a turn included."""
    queued_s: float = 0.0
    """Sum over parts, from the order to posting: the waiting alone. Time on the wire is the carrier's to tell."""
    stamps_stood: int = 0
    stamps_gone: int = 0
    stamps_failed: int = 0
    """Looks at a stamp that failed: the producer was asked instead."""
    links_cut: int = 0
    unsent: int = 0
    """Messages to peers that we have no link or no key with."""
    refused: Counter[str] = field(default_factory=Counter)
    """What came and was not believed, by why."""


class Endpoint:
    """See the module. `me` names this life; `ledger` must be of the same epoch.

    Long, as it carries out each effect that a ledger has and hears each event that a carrier tells: two tables of
    short methods on one set of flights.
    """

    def __init__(
        self,
        me: Peer,
        ledger: Ledger,
        carrier: Carrier,
        memory: OurMemory,
        *,
        key: PairKey,
        admit: Admit,
        stamps: StampTable | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Register the memory.

        Raises:
            CarrierFailed: it cannot be registered.
            ValueError: the ledger is of another life.
        """
        if ledger.epoch != me.epoch:
            raise ValueError(f"a ledger of epoch {ledger.epoch} for {me}")
        self.me: Final = me
        self.ledger: Final = ledger
        self.carrier: Final = carrier
        self.counts = Counts()
        self.envelopes = Envelopes(me, key)
        self.check: Check | None = None
        """Looks at what came before it is used, where the engine wants that (`kvtransfer.digests`)."""
        self._memory = memory
        self._admit = admit
        self._stamps = stamps
        self._pacer: Pacer[InstanceId, Key] = Pacer(limits)
        self._links: dict[InstanceId, _Link] = {}
        self._next: dict[InstanceId, dict[int, Introduction]] = {}
        """Introductions that wait for the former link with that peer to end."""
        self._lives: dict[InstanceId, int] = {}
        self._cuts: Counter[InstanceId] = Counter()
        """Links with each peer that ended: no number is used again."""
        self._moves: dict[Key, _Move] = {}
        self._writes: dict[TransferId, PostWrite] = {}
        """Ordered before the prompt was computed."""
        self._flights: dict[Flight, tuple[_Link, _Move | _StampRead, int]] = {}
        self._offered: dict[TransferId, Stamp] = {}
        self._expected: dict[TransferId, Stamp] = {}
        self._asking: set[tuple[TransferId, int]] = set()
        self._events: deque[Event] = deque()
        self._out: list[EngineEffect] = []
        self._inbox: deque[bytes] = deque()
        self._now = 0.0
        self._draining = False
        carrier.register(memory.regions)
        self._free_scratch = list(range(len(memory.scratch_view) // STAMP_BYTES))
        self._scratch: Prepared | None = None
        if self._free_scratch:
            slots = len(self._free_scratch)
            self._scratch = carrier.prepare(None, [Grid(memory.scratch, STAMP_BYTES, STAMP_BYTES, slots)])

    # --- peers -------------------------------------------------------------------------------------------------------

    def link(self, instance: InstanceId) -> int:
        """The number under which this peer may write to us now: what `ReservePush` names."""
        return (self.me.epoch << LINK_SHIFT) + self._cuts[instance]

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Who can be reached: all ranks introduced, and the link is not being cut."""
        links = self._links.values()
        return tuple(link.peer for link in links if not link.cutting and len(link.ranks) == link.tp)

    def introduction(self, to: InstanceId | None = None) -> bytes:
        """What others need to reach us; for a peer whose link was cut before, made for it.

        Raises:
            CarrierFailed: the carrier has no metadata.
        """
        memory = self._memory
        stamped = self._stamps is not None
        return Introduction(
            peer=self.me,
            link=self.link(to) if to is not None else self.me.epoch << LINK_SHIFT,
            agent=self.carrier.name,
            metadata=self.carrier.metadata(),
            shard=memory.shard,
            tensors=memory.tensors,
            memory=memory.memory,
            stamps=memory.stamps if stamped else 0,
            slots=memory.slots if stamped else 0,
        ).pack()

    def introduce(self, data: object, now: float) -> list[EngineEffect]:
        """Learn one rank of a peer, in this life of it. What is no introduction changes nothing and is counted."""
        self._now = now
        said = read_introduction(data)
        if said is None or said.peer.instance == self.me.instance:
            return self._refuse("no introduction")
        if said.peer.epoch < self._lives.get(said.peer.instance, 0):
            return self._refuse("an introduction of a former life")
        link = self._links.get(said.peer.instance)
        if link is not None and not link.cutting and (link.peer, link.number) == (said.peer, said.link):
            known = link.ranks.get(said.shard.rank)
            if known is None:
                self._add_rank(link, said)
            elif known.said != said:
                self._refuse("two introductions of one rank")
        elif link is not None:  # another life or another link of it: the former has to end first
            self._next.setdefault(said.peer.instance, {})[said.shard.rank] = said
            self._cut(said.peer.instance)
        else:
            link = _Link(said.peer, said.link, said.shard.tp)
            if self._add_rank(link, said):
                self._links[said.peer.instance] = link
                self._seen(said.peer)
        return self._settle()

    def forget(self, instance: InstanceId, now: float) -> list[EngineEffect]:
        """The peer has left: end the link with it, as soon as nothing is under way on it."""
        self._now = now
        self._next.pop(instance, None)
        self._events.append(PeerLost(instance))
        self._cut(instance)
        return self._settle()

    def _refuse(self, why: str) -> list[EngineEffect]:
        self.counts.refused[why] += 1
        return []

    def _seen(self, peer: Peer) -> None:
        if peer.epoch > self._lives.get(peer.instance, -1):
            self._lives[peer.instance] = peer.epoch
            self._events.append(PeerSeen(peer))

    def _add_rank(self, link: _Link, said: Introduction) -> bool:
        """Prepare what we share with one rank."""
        if said.agent == self.carrier.name or self._known_agent(said.agent):
            self._refuse("an introduction under another's name")
            return False
        try:
            ours, theirs = grids(self._memory.tensors, said.tensors, self._memory.shard, said.shard)
        except ValueError:
            if said.shard.rank in sources(self._memory.shard, said.shard.tp):
                self._refuse("an introduction of memory of another shape")
                return False
            ours = theirs = ()  # a rank that has none of our heads: reached by notes only
        try:
            agent = self.carrier.introduce(said.metadata)
        except CarrierFailed:
            self._refuse("metadata that the carrier refuses")
            return False
        if agent != said.agent:
            if not self._known_agent(agent):
                self._forget(agent)
            self._refuse("an introduction under another's name")
            return False
        return self._prepare(link, said, ours, theirs)

    def _prepare(self, link: _Link, said: Introduction, ours: tuple[Grid, ...], theirs: tuple[Grid, ...]) -> bool:
        made: list[Prepared] = []

        def prepare(peer: str | None, of: Sequence[Grid], memory: Memory) -> Prepared:
            made.append(self.carrier.prepare(peer, of, memory))
            return made[-1]

        try:
            here = prepare(None, ours, self._memory.memory) if ours else Prepared(-1)
            there = prepare(said.agent, theirs, said.memory) if theirs else Prepared(-1)
            table = [Grid(said.stamps, STAMP_BYTES, STAMP_BYTES, said.slots)]
            stamps = prepare(said.agent, table, Memory.DRAM) if said.slots else None
        except CarrierFailed:
            for each in made:
                self.carrier.drop(each)
            self._forget(said.agent)
            self._refuse("memory that the carrier cannot reach")
            return False
        link.ranks[said.shard.rank] = _Rank(said, here, there, ours, theirs, stamps)
        return True

    def _known_agent(self, agent: str) -> bool:
        return any(rank.said.agent == agent for link in self._links.values() for rank in link.ranks.values())

    def _forget(self, agent: str) -> None:
        try:
            self.carrier.forget(agent)
        except CarrierFailed:
            self._refuse("a peer that cannot be forgotten yet")

    # --- the engine --------------------------------------------------------------------------------------------------

    def tell(self, event: Event, now: float, *, stamp: Stamp | None = None) -> list[EngineEffect]:
        """What our engine says; `stamp` is the hold's, of a `ReservePull` whose offer had one.

        Raises:
            ImpossibleMove: our engine contradicts itself.
        """
        self._now = now
        if isinstance(event, ReservePull) and stamp is not None and event.remote and event.id not in self._expected:
            self._expected[event.id] = stamp
            found = self._tell(event)
            if any(isinstance(each, Refused) and each.side is Side.CONSUMER for each in found):
                self._expected.pop(event.id, None)
            return found
        return self._tell(event)

    def _tell(self, event: Event) -> list[EngineEffect]:
        self._events.append(event)
        if isinstance(event, Abort):
            self._unwanted(event.id)
        elif isinstance(event, PeerLost):
            self._nothing_more_to(event.instance)
        return self._settle()

    def stamp(self, id_: TransferId) -> Stamp | None:
        """The stamp of a hold that was offered, to be sent along with the offer."""
        return self._offered.get(id_)

    def poll(self, now: float) -> list[EngineEffect]:
        """Read notes, look at flights, let time pass, post what has its turn."""
        self._now = now
        self._inbox.extend(note for _, note in self.carrier.notes())
        for _ in range(min(len(self._inbox), NOTES_A_POLL_MAX)):
            self._hear(self._inbox.popleft())
        self._drain()
        for flight in list(self._flights):
            progress = self.carrier.look(flight)
            if progress is not Progress.UNDER_WAY:
                self._landed(flight, ok=progress is Progress.DONE)
        due = self.ledger.next_wakeup()
        if due is not None and due <= now:
            self._events.append(Tick())
        return self._settle()

    def next_wakeup(self) -> float | None:
        """When `poll` must be called at the latest, for the ledger's sake. While `busy`, call it all the time."""
        return self.ledger.next_wakeup()

    @property
    def busy(self) -> bool:
        """Whether flights are under way, parts wait for their turn, or notes wait to be read."""
        return bool(self._flights or self._inbox or len(self._pacer))

    def close(self) -> None:
        """End everything; the carrier is closed, and touches no memory any more."""
        self.carrier.close()
        self._flights.clear()
        self._links.clear()

    # --- events and effects ------------------------------------------------------------------------------------------

    def _settle(self) -> list[EngineEffect]:
        """Until nothing is left to do at this moment; what the engine has to do."""
        self._drain()
        self._pump()
        self._end_cut_links()
        found, self._out = self._out, []
        return found

    def _drain(self) -> None:
        while self._events:
            event = self._events.popleft()
            for effect in self.ledger.handle(event, self._now):
                self._carry_out(effect)
            if isinstance(event, Filled) and event.id in self._writes:
                self._begin_write(self._writes.pop(event.id), event.blocks)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case PostRead():
                self._begin_read(effect)
            case PostWrite():
                if effect.local:
                    self._begin_write(effect, effect.local)
                else:
                    self._writes[effect.id] = effect
            case Send(to, message):
                self._send(to, message)
            case CutLink(instance):
                self._cut(instance)
            case Use() if self.check is not None and not self.check(effect):
                self._expected.pop(effect.id, None)
                self.counts.refused["blocks that are not what was offered"] += 1
                because = "what came is not what was offered"
                self._out.append(FreeBlocks(Side.CONSUMER, effect.id, effect.blocks, because))
                self._out.append(Recompute(effect.id, because))
            case _:
                self._before_the_engine(effect)
                self._out.append(effect)

    def _before_the_engine(self, effect: EngineEffect) -> None:
        """Stamps stand before an offer is made and are wiped before blocks are freed: this is where."""
        match effect:
            case Offer(id_) if self._stamps is not None:
                stamp = self._stamps.offer(id_)
                if stamp is not None:
                    self._offered[id_] = stamp
            case FreeBlocks(Side.PRODUCER, id_):
                if self._stamps is not None:
                    self._stamps.wipe(id_)
                self._offered.pop(id_, None)
            case Recompute(id_) | Report(Side.PRODUCER, id_):
                self._unwanted(id_, consumer=isinstance(effect, Recompute))
            case Use(id_):
                self._expected.pop(id_, None)

    def _unwanted(self, id_: TransferId, *, consumer: bool | None = None) -> None:
        """Post nothing more of this transfer. `consumer` limits it to one side."""
        if consumer is not False:
            self._expected.pop(id_, None)
        if consumer is not True and self._writes.pop(id_, None) is not None:
            self._events.append(WritesEnded(id_, ok=False))
        for key, move in list(self._moves.items()):
            if key[1] == id_ and consumer in {None, key[0] is Side.CONSUMER}:
                self._cancel(move)

    # --- bytes -------------------------------------------------------------------------------------------------------

    def _begin_read(self, order: PostRead) -> None:
        link = self._links.get(order.producer)
        key = (Side.CONSUMER, order.id, order.serial)
        usable = link is not None and link.peer.epoch == order.id.producer_epoch
        move = self._cut_into_parts(key, Way.READ, order.producer, order.local, order.remote) if usable else None
        if move is None:
            self.counts.refused["a read without a link"] += 1
            self._events.append(ReadStarted(order.id, order.serial, parts=1))
            self._events.append(ReadEnded(order.id, order.serial, part=0, ok=False))
            return
        self.counts.reads += 1
        self._events.append(ReadStarted(order.id, order.serial, len(move.parts)))

    def _begin_write(self, order: PostWrite, local: Blocks) -> None:
        link = self._links.get(order.consumer)
        key = (Side.PRODUCER, order.id, order.serial)
        ours = local[order.first : order.first + len(order.remote)]
        usable = link is not None and link.number == order.link and len(ours) == len(order.remote) and len(ours) > 0
        move = self._cut_into_parts(key, Way.WRITE, order.consumer, ours, order.remote) if usable else None
        if move is None:
            self.counts.refused["a write without its link"] += 1
            self._events.append(WritesEnded(order.id, ok=False))
            return
        self.counts.writes += 1

    def _cut_into_parts(self, key: Key, way: Way, instance: InstanceId, ours: Blocks, theirs: Blocks) -> _Move | None:
        """A transfer's parts, by rank, queued; None where the link does not reach all of it."""
        link = self._links[instance]
        wanted = sources(self._memory.shard, link.tp) if way is Way.READ else tuple(link.ranks)
        if link.cutting or not all(rank in link.ranks for rank in wanted):
            return None
        move = _Move(key, way, instance, ours, theirs, [], since=self._now)
        sizes: list[int] = []
        for number in wanted:
            rank = link.ranks[number]
            if not rank.grids:
                continue
            if not (_within(ours, rank.grids) and _within(theirs, rank.their_grids)):
                return None
            each = block_bytes(rank.grids)
            for first, end in parts(len(ours), each, self._pacer.limits.part_bytes):
                move.parts.append(_Part(number, first, end))
                sizes.append((end - first) * each)
        if not sizes or key in self._moves:
            return None
        self._moves[key] = move
        self._pacer.add(instance, key, sizes)
        return move

    def _pump(self) -> None:
        """Post the parts whose turn it is."""
        for instance, key, number, _size in self._pacer.take():
            move, link = self._moves[key], self._links.get(instance)
            if link is None or link.cutting or not self._post(link, move, number):
                self._part_ended(move, number, ok=False)
        if self._events:
            self._drain()

    def _post(self, link: _Link, move: _Move, number: int) -> bool:
        part = move.parts[number]
        rank = link.ranks[part.rank]
        some = slice(part.first, part.end)
        mine, others = pieces(rank.grids, move.ours[some]), pieces(rank.their_grids, move.theirs[some])
        try:
            flight = self.carrier.post(move.way, rank.ours, mine, rank.theirs, others)
        except CarrierFailed:
            return False
        self.counts.queued_s += self._now - move.since
        self._fly(flight, link, move, number)
        return True

    def _fly(self, flight: Flight, link: _Link, what: _Move | _StampRead, number: int) -> None:
        link.flights += 1
        self._flights[flight] = (link, what, number)

    def _landed(self, flight: Flight, *, ok: bool) -> None:
        link, what, number = self._flights.pop(flight)
        link.flights -= 1
        self.carrier.release(flight)
        if isinstance(what, _StampRead):
            self._stamp_read(what, ok=ok)
        else:
            self._part_ended(what, number, ok=ok)

    def _part_ended(self, move: _Move, number: int, *, ok: bool) -> None:
        if number in move.ended:
            return
        move.ended.add(number)
        move.ok &= ok
        self._pacer.ended(move.instance, move.key, number)
        if ok:
            self._count_bytes(move, move.parts[number])
        side, id_, serial = move.key
        over = len(move.ended) == len(move.parts)
        if over:
            del self._moves[move.key]
        if side is Side.CONSUMER:
            self.counts.read_s += self._now - move.since if over else 0.0
            self._events.append(ReadEnded(id_, serial, number, ok))
        elif over:
            self._events.append(WritesEnded(id_, move.ok))

    def _count_bytes(self, move: _Move, part: _Part) -> None:
        link = self._links.get(move.instance)
        if link is None or part.rank not in link.ranks:
            return
        size = (part.end - part.first) * block_bytes(link.ranks[part.rank].grids)
        if move.way is Way.READ:
            self.counts.bytes_read += size
        else:
            self.counts.bytes_written += size

    def _cancel(self, move: _Move) -> None:
        """What was not posted will not be; what was posted is waited for."""
        for number in self._pacer.drop(move.instance, move.key):
            self._part_ended(move, number, ok=False)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _send(self, to: InstanceId, message: Message) -> None:
        if isinstance(message, AskConfirm) and self._look_at_stamp(to, message):
            return
        link = self._links.get(to)
        if isinstance(message, Register) and link is not None:
            link.registered = True
        self._say(to, message)

    def _say(self, to: InstanceId, message: Message) -> None:
        link = self._links.get(to)
        rank = next(iter(link.ranks.values()), None) if link is not None else None
        note = self.envelopes.close(message, link.peer) if link is not None and rank is not None else None
        if note is None or rank is None or not self.carrier.notify(rank.said.agent, note):
            self.counts.unsent += 1

    def _hear(self, note: bytes) -> None:
        opened = self.envelopes.read(note)
        if isinstance(opened, Fault):
            self.counts.refused[opened.value] += 1
            return
        by, message = opened
        if by.epoch < self._lives.get(by.instance, 0):
            self.counts.refused["a note of a former life"] += 1
            return
        self._seen(by)
        if isinstance(message, Claim | Register):
            self._hear_with_ticket(by, message)
            return
        if isinstance(message, Withdraw):
            self._withdrawn(by, message)
        self._events.append(Received(by, message))

    def _hear_with_ticket(self, by: Peer, message: Claim | Register) -> None:
        proof = self._admit(by, message)
        if isinstance(proof, Proof):
            event = Claimed(by, message, proof) if isinstance(message, Claim) else Registered(by, message, proof)
            self._events.append(event)
            return
        self.counts.refused[f"a ticket: {proof}"] += 1
        if isinstance(message, Claim):  # a registration is not answered: its consumer would take that for our last word
            self._say(by.instance, ClaimRefused(message.id, message.serial, proof))

    def _withdrawn(self, by: Peer, message: Withdraw) -> None:
        order = self._writes.get(message.id)
        if order is not None and order.consumer == by.instance and message.serial >= order.serial:
            del self._writes[message.id]
            self._events.append(Received(by, message))  # first, so that the hold drains when its writes end
            self._events.append(WritesEnded(message.id, ok=False))
        for key, move in list(self._moves.items()):
            if key[:2] == (Side.PRODUCER, message.id) and move.instance == by.instance and message.serial >= key[2]:
                self._cancel(move)

    # --- stamps ------------------------------------------------------------------------------------------------------

    def _look_at_stamp(self, to: InstanceId, asked: AskConfirm) -> bool:
        """Read the hold's stamp. False: it cannot be, or a look has taken so long that the ledger asks again.

        The ledger asks only after all parts of the read have *ended*, so this read is posted after them.
        """
        expected, link = self._expected.get(asked.id), self._links.get(to)
        if expected is None or link is None or link.cutting or link.peer.epoch != asked.id.producer_epoch:
            return False
        rank = next((rank for rank in link.ranks.values() if expected.slot < rank.said.slots), None)
        known = (asked.id, asked.serial) in self._asking
        if rank is None or rank.stamps is None or self._scratch is None or not self._free_scratch or known:
            return False
        scratch = self._free_scratch.pop()
        at = slice(scratch * STAMP_BYTES, (scratch + 1) * STAMP_BYTES)
        self._memory.scratch_view[at] = bytes(STAMP_BYTES)  # a read that brings nothing must not find an old one
        try:
            flight = self.carrier.post(Way.READ, self._scratch, [scratch], rank.stamps, [expected.slot])
        except CarrierFailed:
            self._free_scratch.append(scratch)
            return False
        self._asking.add((asked.id, asked.serial))
        self._fly(flight, link, _StampRead(to, asked, expected, scratch), 0)
        if self.carrier.look(flight) is not Progress.UNDER_WAY:  # shared memory: it is here already
            self._landed(flight, ok=self.carrier.look(flight) is Progress.DONE)
        return True

    def _stamp_read(self, look: _StampRead, *, ok: bool) -> None:
        at = slice(look.scratch * STAMP_BYTES, (look.scratch + 1) * STAMP_BYTES)
        found = bytes(self._memory.scratch_view[at])
        self._free_scratch.append(look.scratch)
        asked = look.asked
        self._asking.discard((asked.id, asked.serial))
        if not ok:
            self.counts.stamps_failed += 1
            self._say(look.to, asked)
            return
        alive = stands(look.expected, found)
        if alive:
            self.counts.stamps_stood += 1
        else:
            self.counts.stamps_gone += 1
        because = "its stamp stood after the read" if alive else "its stamp was gone after the read"
        word = Confirmation(asked.id, asked.serial, alive=alive, because=because)
        self._events.append(Received(Peer(look.to, asked.id.producer_epoch), word))

    # --- links -------------------------------------------------------------------------------------------------------

    def _cut(self, instance: InstanceId) -> None:
        """Post nothing more on a link; it ends when everything on it has."""
        link = self._links.get(instance)
        if link is None:
            if instance not in self._next:
                self._events.append(LinkEnded(instance))
            return
        link.cutting = True
        self._nothing_more_to(instance)

    def _nothing_more_to(self, instance: InstanceId) -> None:
        """Post nothing more with this peer."""
        for move in [move for move in self._moves.values() if move.instance == instance]:
            self._cancel(move)
        for id_ in [id_ for id_, order in self._writes.items() if order.consumer == instance]:
            del self._writes[id_]
            self._events.append(WritesEnded(id_, ok=False))

    def _end_cut_links(self) -> None:
        """Links with nothing under way any more."""
        for link in [link for link in self._links.values() if link.cutting and not link.flights]:
            instance = link.peer.instance
            if link.registered and not self.carrier.ends_writes:
                continue  # the peer may still write: its word is the only one there is
            for rank in link.ranks.values():
                for prepared in (rank.ours, rank.theirs, rank.stamps):
                    if prepared is not None and prepared >= 0:
                        self.carrier.drop(prepared)
                self._forget(rank.said.agent)
            del self._links[instance]
            self._cuts[instance] += 1
            self.counts.links_cut += 1
            self._events.append(LinkEnded(instance))
            self._drain()
            self._take_up(instance)
        if self._events:
            self._drain()

    def _take_up(self, instance: InstanceId) -> None:
        """The next link with this peer, if it introduced itself meanwhile."""
        waiting = self._next.pop(instance, {})
        newest = max((said.peer.epoch for said in waiting.values()), default=0)
        for said in waiting.values():
            if said.peer.epoch < newest:
                continue
            link = self._links.setdefault(instance, _Link(said.peer, said.link, said.shard.tp))
            if (link.peer, link.number) == (said.peer, said.link) and not self._add_rank(link, said):
                self._refuse("a link that could not be renewed")
        if instance in self._links:
            if self._links[instance].ranks:
                self._seen(self._links[instance].peer)
            else:
                del self._links[instance]

    # --- what is known -----------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Any]:
        """For metrics and for the door's `state`: plain values."""
        held = self.ledger.statistics(self._now)
        traffic = self.carrier.traffic
        return {
            "peers": len(self.peers),
            "flights": len(self._flights),
            "bytes_under_way": self._pacer.under_way,
            "bytes_read": self.counts.bytes_read,
            "bytes_written": self.counts.bytes_written,
            "reads": self.counts.reads,
            "writes": self.counts.writes,
            "read_s": self.counts.read_s,
            "queued_s": self.counts.queued_s,
            "wire_s": traffic.wire_s,
            "transfers_failed": traffic.failed,
            "stamps": len(self._stamps) if self._stamps is not None else 0,
            "stamps_stood": self.counts.stamps_stood,
            "stamps_gone": self.counts.stamps_gone,
            "stamps_failed": self.counts.stamps_failed,
            "links_cut": self.counts.links_cut,
            "unsent": self.counts.unsent,
            "refused": dict(self.counts.refused),
            "holds": sum(held.states[Side.PRODUCER].values()),
            "reservations": sum(held.states[Side.CONSUMER].values()),
            "leaked": held.leaked,
        }


def _within(blocks: Blocks, of: Sequence[Grid]) -> bool:
    return bool(blocks) and min(blocks) >= 0 and max(blocks) < min(grid.count for grid in of)
