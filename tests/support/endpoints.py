"""Instances with endpoints, real bytes and a small engine each, over loopback or over NIXL."""

from __future__ import annotations

import ctypes
import mmap
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.ids import InstanceId, RequestId, TransferId
from kvtransfer.carrier import Carrier
from kvtransfer.endpoint import Endpoint, EngineEffect, OurMemory
from kvtransfer.events import (
    Abort,
    Allocated,
    Filled,
    FreeBlocks,
    Offer,
    OpenHold,
    Proof,
    Recompute,
    Refused,
    ReservePull,
    ReservePush,
    Use,
)
from kvtransfer.layout import Shard, Tensor
from kvtransfer.ledger import Ledger
from kvtransfer.loopback import Loopbacks, Weather
from kvtransfer.messages import Blocks, Claim, Peer, Register
from kvtransfer.pacing import Limits
from kvtransfer.stamps import STAMP_BYTES, Stamp, StampTable
from kvtransfer.table import Side
from kvtransfer.terms import Terms

TENANT = "acme"
PAIR_KEY = bytes(range(32))
GARBAGE = 0xEE
SLOTS = 8


def admit(by: Peer, message: Claim | Register) -> Proof | str:
    """Tickets are another module's matter: this one is good unless it says so."""
    return "forged" if message.ticket.startswith("bad") else Proof(message.ticket, TENANT, left_s=60.0)


@dataclass(slots=True)
class Memory:
    """Address space of one instance: tensors, then the stamp table, then scratch."""

    view: memoryview
    address: int
    blocks: int
    block_bytes: int
    tensors: int
    keep: Any = None

    @classmethod
    def size(cls, blocks: int, block_bytes: int, tensors: int) -> int:
        return blocks * block_bytes * tensors + 2 * SLOTS * STAMP_BYTES

    def of(self, tensor: int, block: int) -> memoryview:
        """One block's bytes."""
        at = (tensor * self.blocks + block) * self.block_bytes
        return self.view[at : at + self.block_bytes]

    def described(self, shard: Shard) -> OurMemory:
        each = self.blocks * self.block_bytes
        stamps = each * self.tensors
        scratch = stamps + SLOTS * STAMP_BYTES
        return OurMemory(
            tensors=tuple(Tensor(self.address + each * n, self.block_bytes, self.blocks) for n in range(self.tensors)),
            shard=shard,
            stamps=self.address + stamps,
            slots=SLOTS,
            scratch=self.address + scratch,
            scratch_view=self.view[scratch : scratch + SLOTS * STAMP_BYTES],
        )

    def stamps(self) -> memoryview:
        at = self.blocks * self.block_bytes * self.tensors
        return self.view[at : at + SLOTS * STAMP_BYTES]


def host_memory(size: int) -> tuple[memoryview, int, Any]:
    """Pages of this process and their address."""
    pages = mmap.mmap(-1, size)
    return memoryview(pages), ctypes.addressof(ctypes.c_char.from_buffer(pages)), pages


@dataclass(slots=True)
class Pulled:
    """One reservation and what became of it."""

    id: TransferId
    count: int
    blocks: Blocks = ()
    outcome: str | None = None
    right: bool = True


class Party:
    """One life of an instance: its endpoint, its memory, and an engine that does as it is told."""

    def __init__(self, world: World, name: str, epoch: int, carrier: Carrier, memory: Memory, *, shard: Shard) -> None:
        self.world, self.memory, self.carrier = world, memory, carrier
        self.me = Peer(InstanceId(name), epoch)
        table = StampTable(memory.stamps(), bytes(32)) if world.stamped else None
        key = world.key
        self.endpoint = Endpoint(
            self.me,
            Ledger(epoch, world.terms),
            carrier,
            memory.described(shard),
            key=lambda instance: key if instance != "stranger" else None,
            admit=admit,
            stamps=table,
            limits=world.limits,
        )
        self.table = table
        self.free: list[int] = []
        self.give(tuple(range(memory.blocks)))
        self.holds: dict[TransferId, Blocks] = {}
        self.offers: dict[TransferId, tuple[Offer, Stamp | None]] = {}
        self.pulls: dict[TransferId, Pulled] = {}
        self.past: list[Pulled] = []
        self.freed: list[FreeBlocks] = []
        self.dead = False

    # --- what the engine does ----------------------------------------------------------------------------------------

    def prefill(self, id_: TransferId, count: int) -> Offer | None:
        """Leg 1, whole: open, compute, offer."""
        if len(self.free) < count:
            return None
        if self._refused(self.tell(OpenHold(id_, TENANT)), Side.PRODUCER):
            return None
        blocks = self.take(count)
        self.compute(id_, blocks)
        self.holds[id_] = blocks
        self.tell(Filled(id_, blocks, tokens=count))
        return self.offers[id_][0] if id_ in self.offers else None

    def compute(self, id_: TransferId, blocks: Blocks) -> None:
        for place, block in enumerate(blocks):
            for tensor in range(self.memory.tensors):
                self.memory.of(tensor, block)[:] = self.world.pattern(id_, place, tensor)

    def take(self, count: int) -> Blocks:
        taken, self.free = tuple(self.free[:count]), self.free[count:]
        return taken

    def give(self, blocks: Blocks) -> None:
        """Back into the pool; somebody else's bytes are there at once."""
        for block in blocks:
            assert block not in self.free, "a block was freed twice"
            self.free.append(block)
            for tensor in range(self.memory.tensors):
                self.memory.of(tensor, block)[:] = bytes([GARBAGE]) * self.memory.block_bytes

    def check(self) -> None:
        """Nobody wrote into memory that is free."""
        for block in self.free:
            for tensor in range(self.memory.tensors):
                assert set(self.memory.of(tensor, block)) == {GARBAGE}, f"{self.me}: free block {block} was written"

    def pull(self, offer: Offer, producer: str, stamp: Stamp | None, *, ticket: str | None = None) -> Pulled | None:
        """Leg 2, to where the read is ordered."""
        count = len(offer.blocks)
        if len(self.free) < count or offer.id in self.pulls:
            return None
        ticket = ticket or self.world.ticket()
        pulled = Pulled(offer.id, count)
        self.pulls[offer.id] = pulled
        order = ReservePull(offer.id, InstanceId(producer), offer.blocks, offer.tokens, ticket)
        self.tell(order, stamp=stamp)
        if pulled.outcome is None:
            pulled.blocks = self.take(count)
            self.tell(Allocated(offer.id, pulled.blocks))
        return pulled

    def reserve(self, id_: TransferId, producer: str, count: int) -> Pulled:
        """Leg 2 of a push."""
        pulled = Pulled(id_, count, self.take(count))
        self.pulls[id_] = pulled
        link = self.endpoint.link(InstanceId(producer))
        self.tell(ReservePush(id_, InstanceId(producer), 0, pulled.blocks, count, link, self.world.ticket()))
        return pulled

    def abort(self, id_: TransferId) -> None:
        if id_ in self.pulls and self.pulls[id_].outcome is None:
            self.pulls[id_].outcome = "aborted"
        self.tell(Abort(id_, "the client left"))

    # --- the endpoint ------------------------------------------------------------------------------------------------

    def tell(self, event: Any, *, stamp: Stamp | None = None) -> list[EngineEffect]:
        effects = self.endpoint.tell(event, self.world.now, stamp=stamp)
        self.obey(effects)
        return effects

    def poll(self) -> None:
        if not self.dead:
            self.obey(self.endpoint.poll(self.world.now))

    def obey(self, effects: list[EngineEffect]) -> None:
        for effect in effects:
            match effect:
                case Offer(id_):
                    self.offers[id_] = effect, self.endpoint.stamp(id_)
                case FreeBlocks(side, id_, blocks):
                    self.freed.append(effect)
                    if side is Side.PRODUCER:
                        assert self.holds.pop(id_, blocks) == blocks
                    self.give(blocks)
                case Use(id_, blocks, _):
                    self._use(self.pulls[id_], blocks)
                case Recompute(id_):
                    self._outcome(self.pulls[id_], "recompute")
                case Refused(Side.CONSUMER, id_):
                    self._outcome(self.pulls[id_], "refused")

    def _use(self, pulled: Pulled, blocks: Blocks) -> None:
        for place, block in enumerate(blocks):
            for tensor in range(self.memory.tensors):
                pulled.right &= bytes(self.memory.of(tensor, block)) == self.world.pattern(pulled.id, place, tensor)
        self._outcome(pulled, "use")
        self.give(blocks)

    def _outcome(self, pulled: Pulled, outcome: str) -> None:
        if (pulled.outcome, outcome) == ("aborted", "recompute"):  # its time was up when it was aborted
            return
        assert pulled.outcome is None, f"{pulled.id} hears {outcome} after {pulled.outcome}"
        pulled.outcome = outcome
        self.past.append(pulled)
        del self.pulls[pulled.id]

    @staticmethod
    def _refused(effects: list[EngineEffect], side: Side) -> bool:
        return any(isinstance(effect, Refused) and effect.side is side for effect in effects)

    @property
    def idle(self) -> bool:
        held = self.endpoint.ledger.statistics(self.world.now)
        return held.idle and not self.endpoint.busy


@dataclass
class World:
    """Parties by name and a way to let time pass. Loopback unless `nixl` is asked for."""

    nixl: bool = False
    blocks: int = 16
    block_bytes: int = 256
    tensors: int = 2
    stamped: bool = True
    seed: int = 0
    weather: Weather = field(default_factory=Weather)
    terms: Terms = field(default_factory=Terms)
    limits: Limits | None = None
    key: bytes = PAIR_KEY
    now: float = 100.0
    parties: dict[str, Party] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.wire = Loopbacks(self.dice.random, self.weather)
        self.wire.now = self.now

    def party(self, name: str, *, epoch: int = 1, shard: Shard | None = None, block_bytes: int = 0) -> Party:
        """Another instance, or the next life of one."""
        each = block_bytes or self.block_bytes
        size = Memory.size(self.blocks, each, self.tensors)
        view, address, keep = host_memory(size)
        carrier: Carrier
        agent = f"{name}@{epoch}"
        if self.nixl:
            from kvtransfer.nixl import Nixl

            carrier = Nixl(agent)
        else:
            address = 4096 * (len(self.parties) + 1)
            carrier = self.wire.open(agent, view, address)
        memory = Memory(view, address, self.blocks, each, self.tensors, keep)
        party = Party(self, name, epoch, carrier, memory, shard=shard or Shard())
        self.parties[name] = party
        return party

    def introduce(self, *names: str) -> None:
        """Each to each."""
        for name in names:
            for other in names:
                if name != other:
                    said = self.parties[other].endpoint.introduction(InstanceId(name))
                    self.parties[name].obey(self.parties[name].endpoint.introduce(said, self.now))

    def pattern(self, id_: TransferId, place: int, tensor: int) -> bytes:
        return random.Random(f"{id_} {place} {tensor}").randbytes(self.block_bytes)

    def new_id(self, producer: str) -> TransferId:
        self._count += 1
        return TransferId(RequestId(f"r{self._count}"), 1, self.parties[producer].me.epoch)

    def ticket(self) -> str:
        self._count += 1
        return f"ticket-{self._count}"

    def step(self, *, without: tuple[str, ...] = ()) -> None:
        """Everybody but `without` gets a turn; then the next thing happens."""
        for name, party in self.parties.items():
            if name not in without:
                party.poll()
        if self.nixl:
            time.sleep(0.0002)
            self.now += 0.0002
            return
        due = [when for when in (self.wire.next_wakeup(),) if when is not None]
        for name, party in self.parties.items():
            wakeup = party.endpoint.next_wakeup() if name not in without and not party.dead else None
            due += [wakeup] if wakeup is not None else []
        self.now = max(self.now + 1e-6, min(due, default=self.now + 0.05))
        self.wire.advance(self.now)

    def until(self, done: Callable[[], bool], *, without: tuple[str, ...] = (), steps: int = 20_000) -> None:
        """Until it is so; fails after so many steps (4 s and more of them over NIXL)."""
        for _ in range(steps):
            if done():
                return
            self.step(without=without)
        raise AssertionError("it never came to that")

    def close(self) -> None:
        for party in self.parties.values():
            party.endpoint.close()
