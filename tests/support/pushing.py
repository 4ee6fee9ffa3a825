"""Producers and consumers of pushes, real block contents between them, and an unreliable network.

Nothing here moves by itself. The test decides which message arrives, is lost or comes twice, which transfer copies its
next block, and what time it is.

Blocks contain stamps, so that a wrong block is detected when it is used, independently of the rules under test. Every
block has one owner at a time. So a double free, a block given out twice, and a write into another owner's block fail at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.ids import InstanceId, RequestId, TransferId
from decode import push as d
from kvtransfer.packing import Blocks
from kvtransfer.push import (
    AbortPush,
    CutLink,
    FreeBlocks,
    LinkEnded,
    Message,
    PeerLost,
    PeerSeen,
    Proof,
    PushRefused,
    PushTerms,
    PushTick,
    Received,
    Register,
    Send,
)
from kvtransfer.ticket import TicketPeer
from prefill import push as p

Stamp = tuple[object, ...]
Owner = tuple[object, ...]
GARBAGE: Stamp = ("garbage",)
TENANT = "acme"
PRODUCER, CONSUMER = "producer", "consumer"
OF_PRODUCERS = (p.OpenHold, p.Filled, p.WritesEnded, p.Registered)


class Wrong(AssertionError):
    """A rule was broken that must always hold."""


class Blockpool:
    """The KV memory of one life of an instance."""

    def __init__(self, size: int) -> None:
        self.stamps: list[Stamp] = [GARBAGE] * size
        self.owners: list[Owner | None] = [None] * size
        self.dead = False

    def take(self, count: int, owner: Owner) -> Blocks | None:
        """Take free blocks, the lowest first, so that freed blocks are soon used again; None: too few are free."""
        free = [block for block, whose in enumerate(self.owners) if whose is None][:count]
        if len(free) < count:
            return None
        for block in free:
            self.owners[block] = owner
        return tuple(free)

    def hand_over(self, blocks: Blocks, old: Owner, new: Owner | None) -> None:
        """Change the owner of blocks. `new` None: free them; their content is lost at once."""
        for block in blocks:
            if self.owners[block] != old:
                raise Wrong(f"block {block} is {self.owners[block]}'s, not {old}'s to give away")
            self.owners[block] = new
            if new is None:
                self.stamps[block] = GARBAGE

    def owned(self, kind: str) -> int:
        """How many blocks belong to owners of one kind."""
        return sum(owner is not None and owner[0] == kind for owner in self.owners)


@dataclass(slots=True)
class Transfer:
    """A write in progress. It has several parts, which end independently; each move copies one block."""

    order: p.PostWrite
    source: Blockpool
    target: Blockpool
    link: int
    parts: list[list[tuple[int, int]]] = field(default_factory=list)
    """The blocks that each part still has to copy, as (source block, target block)."""
    posted: bool = False
    over: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Prefill:
    """Leg 1 on a producer: its engine owns the blocks until it says `Filled`."""

    id: TransferId
    blocks: Blocks
    computed: int = 0


@dataclass(slots=True)
class Leg2:
    """One accepted reservation and its outcome."""

    id: TransferId
    outcome: str | None = None
    aborted: bool = False


class Site:
    """One life of an instance: its producer half and consumer half, its memory, its transfers."""

    def __init__(self, world: World, name: str, epoch: int, blocks: int) -> None:
        self.world = world
        self.me = TicketPeer(InstanceId(name), epoch)
        self.producer = p.Pushes(epoch, world.terms)
        self.consumer = d.Reservations(epoch, world.terms)
        self.pool = Blockpool(blocks)
        self.prefills: dict[TransferId, Prefill] = {}
        self.prompts: dict[TransferId, Blocks] = {}
        """The blocks into which the engine computed each prompt."""
        self.legs: dict[TransferId, Leg2] = {}
        """The newest accepted reservation of each transfer."""
        self.past: list[Leg2] = []
        self.transfers: list[Transfer] = []
        self.links: dict[InstanceId, int] = {}
        self.cuts: list[InstanceId] = []
        self.effects: list[Any] = []

    def tell(self, event: Any) -> list[Any]:
        """Pass an event to the half that handles it, or to both, and carry out the effects."""
        self.world.broken = True
        before = len(self.effects)
        if not isinstance(event, d.Reserve):
            self._carry_out_all(PRODUCER, self.producer.handle(event, self.world.now))
        if not isinstance(event, OF_PRODUCERS):
            self._carry_out_all(CONSUMER, self.consumer.handle(event, self.world.now))
        self.world.broken = False
        return self.effects[before:]

    def _carry_out_all(self, side: str, effects: list[Any]) -> None:
        for effect in effects:
            self._carry_out(side, effect)
        self.effects += effects

    @property
    def owned(self) -> int:
        """How many blocks the two halves own by their own records."""
        entries = (*self.producer.book.entries.values(), *self.consumer.book.entries.values())
        return sum(len(each.blocks) for each in entries)

    @property
    def leaked(self) -> int:
        return self.producer.book.leaked(self.world.now) + self.consumer.book.leaked(self.world.now)

    @property
    def idle(self) -> bool:
        return not self.producer.book.entries and not self.consumer.book.entries

    def link(self, peer: InstanceId) -> int:
        """The number of the current link with a peer. Two lives of an instance never have the same number."""
        return self.links.get(peer, self.me.epoch << 16)

    # --- the engine --------------------------------------------------------------------------------------------------

    def open(self, id_: TransferId, count: int) -> None:
        """Start leg 1: the engine takes blocks and begins to compute."""
        if id_ in self.prefills:
            self.tell(p.OpenHold(id_, TENANT))  # a repeated leg: its answer does not matter here
            return
        blocks = self.pool.take(count, ("engine", id_))
        if blocks is None:
            return
        effects = self.tell(p.OpenHold(id_, TENANT))
        if any(isinstance(effect, PushRefused) for effect in effects):
            self.pool.hand_over(blocks, ("engine", id_), None)  # a leg without a hold does not matter here
            return
        self.prefills[id_] = Prefill(id_, blocks)
        self.prompts[id_] = blocks

    def compute(self, id_: TransferId) -> None:
        """Compute one more block of the prompt."""
        prefill = self.prefills[id_]
        if prefill.computed < len(prefill.blocks):
            self.pool.stamps[prefill.blocks[prefill.computed]] = ("kv", id_, prefill.computed)
            prefill.computed += 1

    def fill(self, id_: TransferId) -> None:
        """Compute the rest of the prompt, and give its blocks to the producer half."""
        while self.prefills[id_].computed < len(self.prefills[id_].blocks):
            self.compute(id_)
        prefill = self.prefills.pop(id_)
        self.pool.hand_over(prefill.blocks, ("engine", id_), (PRODUCER, id_))
        self.tell(p.Filled(id_, prefill.blocks, tokens=len(prefill.blocks)))

    def reserve(self, id_: TransferId, producer: InstanceId, count: int) -> None:
        """Start leg 2: reserve `count` blocks. Here a block has one token."""
        live = id_ in self.legs and self.legs[id_].outcome is None
        blocks = self.pool.take(count, (CONSUMER, id_))
        if blocks is None or live:
            self.pool.hand_over(blocks or (), (CONSUMER, id_), None)
            return
        event = d.Reserve(id_, producer, 0, blocks, count, self.link(producer), self.world.ticket())
        if not any(isinstance(effect, PushRefused) for effect in self.tell(event)):
            self.past.append(Leg2(id_))
            self.legs[id_] = self.past[-1]

    def abort(self, id_: TransferId) -> None:
        """Abort the request at this instance."""
        if id_ in self.legs:
            self.legs[id_].aborted = True
        self.tell(AbortPush(id_, "the client left"))

    # --- the transfer endpoint ---------------------------------------------------------------------------------------

    def post(self, transfer: Transfer, parts: int) -> None:
        """Post a transfer that the producer half has ordered, in so many parts."""
        order = transfer.order
        source = order.local or self.prompts[order.id]
        pairs = list(zip(source[order.first :], order.remote, strict=False))
        parts = max(1, min(parts, len(pairs)))
        transfer.parts = [pairs[part::parts] for part in range(parts)]
        transfer.posted = True

    def step(self, transfer: Transfer, part: int, *, fail: bool = False) -> None:
        """Copy one block of one part. End the part if no block is left; `fail`: let the part fail."""
        part %= len(transfer.parts)
        if part in transfer.over:
            return
        todo = transfer.parts[part]
        severed = not self._link_holds(transfer)
        if todo and not fail and not severed:
            if self._computed(transfer, todo[0][0]):
                self._move(transfer, *todo.pop(0))
            return
        transfer.over.add(part)
        self._part_ended(transfer, ok=not fail and not severed)

    def _part_ended(self, transfer: Transfer, *, ok: bool) -> None:
        done = len(transfer.over) == len(transfer.parts)
        if done:
            self.transfers.remove(transfer)
        if not ok:
            transfer.link = -1  # one failed part fails the whole write
        if done:
            self.tell(p.WritesEnded(transfer.order.id, transfer.link >= 0))

    def _link_holds(self, transfer: Transfer) -> bool:
        """Whether the transfer's link still exists. A write uses the consumer's memory keys; they end with the link."""
        consumer = self.world.sites[transfer.order.consumer]
        return transfer.target is consumer.pool and consumer.link(self.me.instance) == transfer.link

    def _computed(self, transfer: Transfer, block: int) -> bool:
        prefill = self.prefills.get(transfer.order.id)
        return prefill is None or block in prefill.blocks[: prefill.computed]

    def _move(self, transfer: Transfer, source: int, target: int) -> None:
        owner = transfer.target.owners[target]
        if owner != (CONSUMER, transfer.order.id):
            raise Wrong(f"{transfer.order} wrote into block {target} of {owner}")
        transfer.target.stamps[target] = transfer.source.stamps[source]

    def cut(self, peer: InstanceId) -> None:
        """Tear a link down on this side."""
        self.cuts = [other for other in self.cuts if other != peer]
        self.links[peer] = self.link(peer) + 1
        self.transfers = [transfer for transfer in self.transfers if transfer.order.consumer != peer]
        self.tell(LinkEnded(peer))

    # --- effects of the halves ---------------------------------------------------------------------------------------

    def _carry_out(self, side: str, effect: Any) -> None:
        match effect:
            case Send(to, message):
                self.world.network.append((self.me, to, message))
            case p.PostWrite():
                target = self.world.sites[effect.consumer].pool
                self.transfers.append(Transfer(effect, self.pool, target, effect.link))
            case FreeBlocks(id_, blocks):
                self.pool.hand_over(blocks, (side, id_), None)
            case d.Use():
                self._use(effect)
            case d.Recompute(id_):
                self._outcome(id_, "recompute")
            case CutLink(instance):
                if instance not in self.cuts:
                    self.cuts.append(instance)

    def _use(self, use: d.Use) -> None:
        for place, block in enumerate(use.blocks):
            stamp = self.pool.stamps[block]
            if place < use.tokens and stamp != ("kv", use.id, place):
                raise Wrong(f"{use.id} uses {stamp} as its block {place}")
        self._outcome(use.id, "use")
        self.pool.hand_over(use.blocks, (CONSUMER, use.id), None)  # its answer ends at once

    def _outcome(self, id_: TransferId, outcome: str) -> None:
        leg = self.legs[id_]
        if leg.outcome is not None or (leg.aborted and outcome == "use"):
            raise Wrong(f"{id_} hears {outcome} after {leg.outcome or 'it was aborted'}")
        leg.outcome = outcome


class World:
    """Instances by name, messages in flight, and a clock."""

    def __init__(self, names: Sequence[str] = ("p", "d"), *, terms: PushTerms | None = None, blocks: int = 6) -> None:
        self.terms = terms or PushTerms()
        self.now = 100.0
        self.broken = False
        """Whether an event raised an error halfway: results of later checks do not count then."""
        self.network: list[tuple[TicketPeer, InstanceId, Message]] = []
        self._blocks = blocks
        self._requests = 0
        self._tickets = 0
        self.sites = {InstanceId(name): Site(self, name, 1, blocks) for name in names}

    def site(self, name: str) -> Site:
        """The current life of an instance."""
        return self.sites[InstanceId(name)]

    def new_id(self, producer: str) -> TransferId:
        """The id of a new transfer."""
        self._requests += 1
        return TransferId(RequestId(f"r{self._requests}"), 1, self.site(producer).me.epoch)

    def ticket(self) -> str:
        """A new ticket. It has no signature: this module does not check signatures."""
        self._tickets += 1
        return f"ticket-{self._tickets}"

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """Let a message arrive; `keep` leaves a copy in the network, which can arrive again."""
        by, to, message = self.network[index] if keep else self.network.pop(index)
        site = self.sites[to]
        match message:
            case Register():
                site.tell(p.Registered(by, message, Proof(message.ticket, TENANT, left_s=60.0)))
            case _:
                site.tell(Received(by, message))

    def deliver_all(self, *, but: Callable[[Message], bool] = lambda _message: False) -> None:
        """Let all messages arrive in order, and the messages that they cause. Messages that `but` selects are lost."""
        while self.network:
            if but(self.network[0][2]):
                self.network.pop(0)
            else:
                self.deliver(0)

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass. All timers fire on time, and links are cut when a half asks for it."""
        end = self.now + seconds
        self.tick()
        while (when := self.next_wakeup()) is not None and when <= end:
            self.now = max(self.now, when)
            self.tick()
        self.now = end

    def tick(self) -> None:
        """Fire all timers that are due, and cut the links that a half asks to cut."""
        for site in tuple(self.sites.values()):
            site.tell(PushTick())
            for peer in tuple(site.cuts):
                site.cut(peer)

    def next_wakeup(self) -> float | None:
        """When the earliest of all timers is due; None: no timer is set."""
        halves = [half for site in self.sites.values() for half in (site.producer, site.consumer)]
        times = [when for half in halves if (when := half.next_wakeup()) is not None]
        return min(times, default=None)

    def restart(self, name: str) -> None:
        """Let an instance die and start again. Its memory, its transfers and its records are gone."""
        old = self.site(name)
        old.pool.dead = True
        old.pool.stamps = [GARBAGE] * len(old.pool.stamps)
        self.sites[old.me.instance] = Site(self, name, old.me.epoch + 1, self._blocks)

    def notice(self, name: str, of: str, *, lost: bool) -> None:
        """Tell one instance that another does not answer (`lost`), or which life of it answers."""
        self.site(name).tell(PeerLost(self.site(of).me.instance) if lost else PeerSeen(self.site(of).me))

    def check(self, *, prompt: bool = True) -> None:
        """Fail unless the halves and the memory agree on the owners of blocks, and every record has a deadline.

        `prompt`: timers fired on time, so also fail if a record has outlived its deadline.
        """
        for site in self.sites.values():
            entries = (*site.producer.book.entries.values(), *site.consumer.book.entries.values())
            if not all(math.isfinite(entry.deadline) for entry in entries):
                raise Wrong(f"{site.me}: an entry would wait for ever")
            owned = site.pool.owned(PRODUCER) + site.pool.owned(CONSUMER)
            if site.owned != owned:
                raise Wrong(f"{site.me}: the halves know {site.owned} blocks, {owned} are taken")
            if prompt and site.leaked:
                raise Wrong(f"{site.me}: {site.leaked} entries leaked")

    def fall_silent(self) -> float:
        """Lose all further messages and let no transfer move; cut links when a half asks for it. Returns the seconds
        until all records are gone; fails if some stay.
        """
        self.network.clear()
        began = self.now
        self.tick()
        for _ in range(2000):
            when = self.next_wakeup()
            if when is None:
                break
            self.now = max(self.now, when)
            self.tick()
        self.network.clear()
        self._check_over()
        return self.now - began

    def _check_over(self) -> None:
        for site in self.sites.values():
            taken = site.pool.owned(PRODUCER) + site.pool.owned(CONSUMER)
            if not site.idle or taken:
                raise Wrong(f"{site.me}: entries, or {taken} blocks, are left")
            forgotten = [leg for leg in site.past if leg.outcome is None and not leg.aborted]
            if forgotten:
                raise Wrong(f"{site.me}: {forgotten} never heard what became of them")
