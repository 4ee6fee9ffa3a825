"""Every KV block between prefill and decode: who holds it, until when, and who may read or write it.

A machine (law 2) for one instance, which may be producer, consumer or both at once. It decides by `kvtransfer.table`;
it moves no bytes, and knows no sockets, and time only as `now`. What it promises, whatever peers say in whatever order:

- a block that a transfer may still write into is never freed; no block is given out twice or freed twice;
- a request uses foreign bytes only after the producer's word that they were still held when the last of them had come;
- everything ends: no entry outlives its limit, its lease, or the end of the link it waits for;
- what comes late, twice, too early, or for another life of an instance changes nothing and is counted.

It raises `ImpossibleMove` where our own engine or endpoint contradicts itself, and then has changed nothing but what
time alone had brought about.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from kvtransfer.book import LATE, STALE, Book
from kvtransfer.consumer import Consumer
from kvtransfer.entries import Entry, Hold, Turn
from kvtransfer.events import (
    Abort,
    Allocated,
    Claimed,
    Effect,
    Event,
    Filled,
    LinkEnded,
    OpenHold,
    PeerLost,
    PeerSeen,
    ReadEnded,
    ReadStarted,
    Received,
    Registered,
    ReservePull,
    ReservePush,
    Tick,
    WritesEnded,
)
from kvtransfer.messages import AskConfirm, Heartbeat, Peer, Release, Withdraw
from kvtransfer.producer import Producer
from kvtransfer.table import Cause
from kvtransfer.terms import Statistics, Terms


class Ledger:
    """The ledger of one life of one instance. `epoch` counts its starts and is part of every id it holds under."""

    def __init__(self, epoch: int, terms: Terms | None = None) -> None:
        self.epoch: Final = epoch
        self._book = Book(terms or Terms())
        self._owed: list[Effect] = []
        self._producer = Producer(epoch, self._book)
        self._consumer = Consumer(epoch, self._book)
        self._handlers: Final[dict[type, Callable[[Any, float], list[Effect]]]] = {
            OpenHold: self._producer.open,
            Filled: self._producer.filled,
            WritesEnded: self._producer.writes_ended,
            Claimed: self._producer.claimed,
            Registered: self._producer.registered,
            ReservePull: self._consumer.reserve_pull,
            ReservePush: self._consumer.reserve_push,
            Allocated: self._consumer.allocated,
            ReadStarted: self._consumer.read_started,
            ReadEnded: self._consumer.read_ended,
            Received: self._received,
            Abort: self._abort,
            PeerLost: self._peer_lost,
            PeerSeen: self._peer_seen,
            LinkEnded: self._link_ended,
            Tick: lambda _event, _now: [],
        }

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold one event in. What time has brought about by `now` comes first, whatever the event is.

        Raises:
            ImpossibleMove: our own engine or endpoint reported what cannot be.
        """
        due = self._book.next_wakeup()
        if due is not None and due <= now:
            self._owed += self._book.due(now)  # an event that raises must not swallow what time has brought about
        if self._book.ended:
            self._producer.remember_ended(now)
        effects = [*self._owed, *self._handlers[type(event)](event, now)]
        self._owed.clear()
        if self._book.ended:
            self._producer.remember_ended(now)
        return tuple(effects)

    def next_wakeup(self) -> float | None:
        """When the next lease, limit or repetition is due; at once, if the last event raised and effects are owed."""
        return -math.inf if self._owed else self._book.next_wakeup()

    def statistics(self, now: float) -> Statistics:
        """What is held, and what became of everything before."""
        return self._book.statistics(now)

    def _received(self, event: Received, now: float) -> list[Effect]:
        if isinstance(event.message, AskConfirm | Heartbeat | Release | Withdraw):
            return self._producer.received(event.by, event.message, now)
        return self._consumer.received(event.by, event.message, now)

    def _abort(self, event: Abort, now: float) -> list[Effect]:
        """Give up whatever is here under this id, and what may still come under it."""
        entries = [book[event.id] for book in (self._book.holds, self._book.reservations) if event.id in book]
        if not entries:
            self._producer.give_up_early(event.id, now)
            return self._book.ignore(LATE)
        return [
            effect for entry in entries for effect in self._book.move(entry, Cause.ABORTED, Turn(now, event.because))
        ]

    def _peer_lost(self, event: PeerLost, now: float) -> list[Effect]:
        entries = self._book.with_peer(event.instance)
        return self._book.move_all(entries, Cause.PEER_LOST, Turn(now, f"{event.instance} does not answer"))

    def _peer_seen(self, event: PeerSeen, now: float) -> list[Effect]:
        """A peer that restarted has lost what its former life held, claimed or asked for."""
        peer = event.peer
        if not self._consumer.seen(peer):
            return self._book.ignore(STALE)
        former = [entry for entry in self._book.with_peer(peer.instance) if _life_of_peer(entry) < peer.epoch]
        return self._book.move_all(former, Cause.PEER_LOST, Turn(now, f"{peer.instance} restarted"))

    def _link_ended(self, event: LinkEnded, now: float) -> list[Effect]:
        entries = self._book.with_peer(event.instance)
        return self._book.move_all(entries, Cause.LINK_ENDED, Turn(now, f"the link with {event.instance} ended"))


def _life_of_peer(entry: Entry) -> int:
    """Which life of the peer an entry is about."""
    if isinstance(entry, Hold):
        peer: Peer | None = entry.reader
        return peer.epoch if peer is not None else 0
    return entry.id.producer_epoch
