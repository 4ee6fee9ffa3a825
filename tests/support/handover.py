"""Producers and consumers of pulls with the rules that engines run, real block contents, and an unreliable network.

Nothing here moves by itself. The test decides when an engine steps, which read copies its next block, which notice
arrives, is lost or comes twice, and what time it is.

Blocks contain stamps, so that a wrong block is detected when it is used, independently of the rules under test. Every
block has one owner at a time, so that a double free fails at once. A report of a request that the engine does not know
fails; it would end vLLM's engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decode.peers import ProducerPeers
from decode.pulls import Pulls
from decode.reads import Landings, PullOutcome, RankSource, Reads
from kvtransfer.hold_marks import SLOT_BYTES, Slot, Slots
from kvtransfer.notes import parse, with_proof
from prefill.holds import Holds
from prefill.leases import Leases, LeaseTerms
from prefill.orders import Orders

Stamp = tuple[object, ...]
GARBAGE: Stamp = ("garbage",)
TERMS = LeaseTerms(lease=30.0, extension=20.0, longest=300.0)
PLACES = 8
"""How many slots one rank of a consumer can read at a time."""


class Wrong(AssertionError):
    """A rule was broken that must always hold."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The description of a hold in a prefill leg's answer."""

    producer: str
    life: int
    request: str
    blocks: tuple[int, ...]
    slot: Slot | None

    @property
    def engine(self) -> str:
        return f"{self.producer}@{self.life}"


class Producer:
    """One life of an engine that holds blocks: the connector's half in its scheduler, its ranks, its memory."""

    def __init__(self, world: World, name: str, life: int, blocks: int, ranks: int) -> None:
        self.world, self.name, self.life = world, name, life
        self.holds = Holds(Slots(4, life.to_bytes(4, "big") * 4))
        self.stamps: list[Stamp] = [GARBAGE] * blocks
        self.owners: list[str | None] = [None] * blocks
        self.tables = [bytearray(4 * SLOT_BYTES) for _ in range(ranks)]
        self.ranks = [Leases(TERMS, self._writer(table)) for table in self.tables]
        self.orders: list[list[Orders]] = [[] for _ in range(ranks)]
        """By rank: orders that the scheduler has given and the rank has not read yet."""
        self.said: list[set[str]] = [set() for _ in range(ranks)]
        """By rank: requests that it has reported and other ranks have not."""
        self.told: dict[bytes, str] = {}
        """Marks that a consumer may know, and the request of each."""
        self.running: dict[str, tuple[int, ...]] = {}
        self.kept: dict[str, tuple[int, ...]] = {}

    @staticmethod
    def _writer(table: bytearray) -> Callable[[int, bytes], None]:
        def write(index: int, content: bytes) -> None:
            table[index * SLOT_BYTES : (index + 1) * SLOT_BYTES] = content

        return write

    def open(self, request: str, count: int, name: str | None = None) -> bool:
        """Start a prefill leg of `count` blocks. False: too few blocks are free."""
        free = [block for block, owner in enumerate(self.owners) if owner is None][:count]
        if len(free) < count:
            return False
        for block in free:
            self.owners[block] = request
        self.running[request] = tuple(free)
        self.holds.begin(request, name, self.world.now)
        return True

    def fill(self, request: str, *, aborted: bool = False) -> Offer | None:
        """End a prefill leg. Returns its hold; None: the leg was aborted or its hold is not wanted."""
        blocks = self.running.pop(request)
        for place, block in enumerate(blocks):
            self.stamps[block] = ("kv", request, place)
        if aborted or not self.holds.wanted(request):
            self.holds.dropped(request)
            self._free(request, blocks)
            return None
        self.kept[request] = blocks
        slot = self.holds.filled(request)
        if slot is not None:
            self.told[slot.mark] = request
        return Offer(self.name, self.life, request, blocks, slot)

    def release(self, name: str) -> None:
        self.holds.release(name, self.world.now)

    def _free(self, request: str, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            if self.owners[block] != request:
                raise Wrong(f"block {block} is {self.owners[block]}'s, not {request}'s to give back")
            self.owners[block], self.stamps[block] = None, GARBAGE

    def step(self) -> None:
        """Let the whole engine make a step: the scheduler's half, then every rank's."""
        self.decide()
        for rank in range(len(self.ranks)):
            self.rank_steps(rank)

    def decide(self) -> None:
        """Do the scheduler's half of a step: give orders to the ranks."""
        orders = self.holds.take_orders()
        for each in self.orders:
            each.append(orders)

    def rank_steps(self, rank: int) -> None:
        """Do one rank's half of a step: its orders, then its leases. A report counts once all ranks have made it."""
        leases = self.ranks[rank]
        for orders in self.orders[rank]:
            leases.step(orders, self.world.now)
        self.orders[rank].clear()
        leases.expire(self.world.now)
        for request in leases.take_reports():
            if request in self.said[rank]:
                raise Wrong(f"{request} is reported twice by rank {rank}")
            self.said[rank].add(request)
        for request in set.intersection(*self.said):
            if request not in self.kept:
                raise Wrong(f"{request} is reported, and the engine does not hold it")
            self.holds.reported(request)
            self._free(request, self.kept.pop(request))
            for said in self.said:
                said.discard(request)

    def heard(self, rank: int, reader: str, raw: bytes) -> None:
        self.ranks[rank].heard(reader, parse(raw), self.world.now)

    @property
    def idle(self) -> bool:
        return not self.holds.held and not self.holds.open_legs

    @property
    def taken(self) -> int:
        return sum(owner is not None for owner in self.owners)


@dataclass(slots=True, eq=False)
class Read:
    """A read in progress; each move copies one block, or one byte of a slot."""

    moves: list[Callable[[], None]]
    failed: bool = False
    released: bool = False
    slot: bool = False

    def state(self) -> str:
        return "ERR" if self.failed else "PROC" if self.moves else "DONE"


@dataclass(slots=True, eq=False)
class Leg:
    """A decode leg."""

    request: str
    offer: Offer
    local: tuple[int, ...]
    outcome: str = ""
    because: str = ""
    left: bool = False
    ranks: dict[int, PullOutcome] = field(default_factory=dict)


class Consumer:
    """One life of an engine that pulls: the connector's half in its scheduler, its ranks with their NIXL agents, its
    memory.
    """

    def __init__(self, world: World, name: str, life: int, blocks: int, ranks: int) -> None:
        self.world, self.name, self.life = world, name, life
        self.pulls = Pulls(ProducerPeers())
        self.owners: list[str | None] = [None] * blocks
        self.stamps: list[list[Stamp]] = [[GARBAGE] * blocks for _ in range(ranks)]
        self.landing = [bytearray(PLACES * SLOT_BYTES) for _ in range(ranks)]
        self.reads = [
            Reads(_Agent(self, rank), Landings(memoryview(self.landing[rank]), 0), self._look(rank))
            for rank in range(ranks)
        ]
        self.legs: list[Leg] = []
        self.under_way: list[Read] = []
        self.blind = False
        """Whether every read of a slot fails."""

    def meet(self, name: str) -> None:
        producer = self.world.producers[name]
        self.pulls.peers.met(f"{name}@{producer.life}", name, self.world.now)

    def pull(self, offer: Offer, *, tells: bool = True) -> Leg:
        """Start a decode leg. It pulls the hold's blocks, or recomputes them if it may not pull or has no room.
        `tells`: its ranks give the hold back.
        """
        leg = Leg(f"{self.name}{self.life}-{len(self.legs)}", offer, ())
        self.legs.append(leg)
        because = "nothing vouches for it"
        if offer.slot is not None:
            because = self.pulls.judge(leg.request, offer.engine, self.world.now)
        free = [block for block, owner in enumerate(self.owners) if owner is None][: len(offer.blocks)]
        if because or len(free) < len(offer.blocks):
            self.pulls.local(leg.request, len(offer.blocks))
            self.pulls.allocated(leg.request, "", 0, self.world.now)
            leg.outcome, leg.because = "recompute", because or "no room"
            self.reject(offer)
            return leg
        leg.local = tuple(free)
        for block in free:
            self.owners[block] = leg.request
        self.pulls.allocated(leg.request, offer.engine, len(free), self.world.now)
        for rank in range(len(self.reads)):
            self._post(leg, rank, tells=tells)
        return leg

    def _post(self, leg: Leg, rank: int, *, tells: bool) -> None:
        offer, slot = leg.offer, leg.offer.slot
        assert slot is not None
        source = self.world.life_of(offer)
        parts = [Read([]), Read([])]
        for place, (there, here) in enumerate(zip(offer.blocks, leg.local, strict=True)):
            parts[place % 2].moves.append(self._copy(leg, source, rank, there, here))
        self.under_way += parts
        note = with_proof(f"{offer.request}:1".encode(), slot.proof)
        source_rank = RankSource(f"{offer.engine}/{rank}", slot.index, note)
        self.reads[rank].add(leg.request, parts, [source_rank], slot.mark, tells=tells)

    def _copy(self, leg: Leg, source: Producer | None, rank: int, there: int, here: int) -> Callable[[], None]:
        def move() -> None:
            if self.owners[here] != leg.request:
                raise Wrong(f"{leg.request} writes into block {here} of {self.owners[here]}")
            self.stamps[rank][here] = source.stamps[there] if source is not None else GARBAGE

        return move

    def _look(self, rank: int) -> Callable[[str, int, int], Read]:
        def look(agent: str, index: int, landing: int) -> Read:
            if self.blind:
                raise RuntimeError("NIXL_ERR_NOT_FOUND")
            engine, _, theirs = agent.partition("/")
            moves = [self._copy_byte(engine, int(theirs), index, rank, landing, at) for at in range(SLOT_BYTES)]
            return Read(moves, slot=True)

        return look

    def _copy_byte(self, engine: str, theirs: int, index: int, rank: int, landing: int, at: int) -> Callable[[], None]:
        def move() -> None:
            producer = self.world.engine(engine)
            if producer is not None:
                self.landing[rank][landing + at] = producer.tables[theirs][index * SLOT_BYTES + at]

        return move

    def reject(self, offer: Offer) -> None:
        """Tell the producer that this leg will not pull the hold, e.g. because the leg failed validation."""
        if offer.slot is not None:
            for rank in range(len(self.reads)):
                self.say(offer.engine, rank, with_proof(f"{offer.request}:1".encode(), offer.slot.proof))

    def beat(self, offer: Offer) -> None:
        for rank in range(len(self.reads)):
            self.say(offer.engine, rank, f"HB:{offer.request}".encode())

    def say(self, engine: str, rank: int, note: bytes) -> None:
        self.world.network.append((engine, rank, f"{self.name}{self.life}/{rank}", note))

    def step(self) -> None:
        """Let every rank's thread check its reads, and the engine take the reads that have ended."""
        for rank, reads in enumerate(self.reads):
            reads.step()
            for leg in self.legs:
                outcome = reads.take(leg.request)
                if outcome is not None:
                    leg.ranks[rank] = outcome
                    self.pulls.said(leg.request, outcome.because)
        for leg in self.legs:
            if leg.local and not leg.outcome and len(leg.ranks) == len(self.reads):
                self._end(leg)

    def _end(self, leg: Leg) -> None:
        before = self.pulls.recomputed_tokens
        self.pulls.ended(leg.request, self.world.now)
        used = self.pulls.recomputed_tokens == before
        leg.because = next((each.because for each in leg.ranks.values() if each.because), "")
        leg.outcome = "use" if used else "recompute"
        for stamps in self.stamps if used else ():
            for place, block in enumerate(leg.local):
                if stamps[block] != ("kv", leg.offer.request, place):
                    raise Wrong(f"{leg.request} uses {stamps[block]} as block {place} of {leg.offer}")
        for block in leg.local:
            self.owners[block] = None

    def move(self, read: Read, *, fail: bool = False) -> None:
        """Copy one block of a read (one byte of a slot), or let the read fail."""
        if fail:
            read.failed, read.moves = True, []
        elif read.moves:
            read.moves.pop(0)()

    def finish(self, *, fail: bool = False) -> None:
        """Complete all reads in progress. `fail`: let reads of blocks fail."""
        for _ in range(4):
            for read in [each for each in self.under_way if not each.released]:
                while read.moves:
                    self.move(read, fail=fail and not read.slot)
            self.step()

    @property
    def idle(self) -> bool:
        return not self.pulls.under_way and not any(len(each) for each in self.reads)

    @property
    def taken(self) -> int:
        return sum(owner is not None for owner in self.owners)


class _Agent:
    """One rank's NIXL agent."""

    def __init__(self, consumer: Consumer, rank: int) -> None:
        self._consumer, self._rank = consumer, rank

    def check_xfer_state(self, handle: Any) -> str:
        if handle.released:
            raise Wrong("a handle is used after it was given back")
        state: str = handle.state()
        return state

    def get_xfer_telemetry(self, handle: Any) -> Any:
        return None

    def release_xfer_handle(self, handle: Any) -> None:
        if handle.moves:
            raise Wrong("a read that is under way is given back")
        handle.released = True
        self._consumer.under_way.remove(handle)

    def transfer(self, handle: Any) -> str:
        self._consumer.under_way.append(handle)
        return "PROC"

    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        self._consumer.say(agent_name.partition("/")[0], self._rank, notif_msg)


class World:
    """Engines by name, notices in flight, and a clock."""

    def __init__(self, *, blocks: int = 8, ranks: int = 1, consumers: tuple[str, ...] = ("d",)) -> None:
        self.now = 100.0
        self.network: list[tuple[str, int, str, bytes]] = []
        self._blocks, self._ranks = blocks, ranks
        self._made = 0
        self.producers = {"p": Producer(self, "p", 1, blocks, ranks)}
        self.dead: dict[str, Producer] = {}
        self.consumers = {name: Consumer(self, name, 1, blocks, ranks) for name in consumers}
        for each in self.consumers.values():
            each.meet("p")

    @property
    def p(self) -> Producer:
        return self.producers["p"]

    @property
    def d(self) -> Consumer:
        return self.consumers["d"]

    def name(self) -> str:
        self._made += 1
        return f"r{self._made}"

    def held(self, blocks: int = 2, name: str | None = None) -> Offer:
        """Let P compute a prompt of so many blocks and hold it."""
        request = self.name()
        assert self.p.open(request, blocks, name)
        self.p.step()
        offer = self.p.fill(request)
        assert offer is not None
        self.p.step()
        return offer

    def engine(self, engine: str) -> Producer | None:
        """The producer with this engine id; None: that life of it has ended."""
        name, _, life = engine.partition("@")
        producer = self.producers[name]
        return producer if producer.life == int(life) else None

    def life_of(self, offer: Offer) -> Producer | None:
        """The producer whose memory a read of this hold reads; None: its process is dead."""
        return self.engine(offer.engine)

    def deliver(self, index: int = 0, *, keep: bool = False) -> None:
        """Let a notice arrive; `keep` leaves a copy in the network, which can arrive again."""
        engine, rank, reader, note = self.network[index] if keep else self.network.pop(index)
        producer = self.engine(engine)
        if producer is not None:
            producer.heard(rank, reader, note)

    def deliver_all(self) -> None:
        while self.network:
            self.deliver()
        for producer in self.producers.values():
            producer.step()

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass; all engines make a step each second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for producer in self.producers.values():
                producer.step()
            for consumer in self.consumers.values():
                consumer.step()

    def restart_p(self) -> None:
        """Let P die and start again. Its old memory is gone: reads of it give garbage."""
        old = self.p
        for stamp in range(len(old.stamps)):
            old.stamps[stamp] = GARBAGE
        self.producers["p"] = Producer(self, "p", old.life + 1, self._blocks, self._ranks)
        self.dead["p"] = old

    def restart_d(self, name: str = "d") -> None:
        self.consumers[name] = Consumer(self, name, self.consumers[name].life + 1, self._blocks, self._ranks)
        self.consumers[name].meet("p")

    def check(self) -> None:
        """Fail if a rank's table still has a mark that a consumer may know and whose hold has lost its blocks."""
        for producer in self.producers.values():
            for table in producer.tables:
                for at in range(0, len(table), SLOT_BYTES):
                    request = producer.told.get(bytes(table[at : at + SLOT_BYTES]))
                    if request is not None and request not in producer.kept:
                        raise Wrong(f"a mark stands for {request}, whose blocks are free")

    def fall_silent(self) -> None:
        """Lose all further notices. Fail unless every request and hold ends within the longest life of a hold."""
        self.network.clear()
        for consumer in self.consumers.values():
            consumer.finish()
        for request in list(self.p.running):
            self.p.fill(request, aborted=True)
        self.network.clear()
        self.pass_time(2.0)
        self.now += TERMS.longest
        self.pass_time(2.0)
        self.network.clear()
        for name, engine in [*self.producers.items(), *self.consumers.items()]:
            if not engine.idle or engine.taken:
                raise Wrong(f"{name}: {engine.taken} blocks are left")
