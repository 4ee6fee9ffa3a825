"""Both sides of hand-overs between mocks: pulls from others, and holds for them. A shell: timers, peers.

When the transfer's time is over, the consumer reads the producer's blocks, whatever their content by then, and after
them the hold's slot. Until then it sends a heartbeat every few seconds. With digests, it also reads the producer's
digests. The two twins decide what may be used, what the producer is told, and when a hold ends. Their rules are those
of engines with Baton's connector (`prefill`, `decode`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.ids import InstanceId, RequestId, TransferId
from decode.peers import NOT_ITS_OWN
from decode.pulls import BEATS_PER_LEASE
from engine.mock.clock import Clock
from engine.mock.faults import ON_PULLS, FaultKind, FaultLeg, MockFaults, spoil
from engine.mock.metrics import Metrics
from engine.mock.settings import MockSettings
from engine.mock.transfer import ATTEMPT, Producer, Reference
from engine.twin.events import (
    Contents,
    GiveUpHold,
    Hold,
    HoldEnded,
    KvArrived,
    KvFailed,
    Notice,
    PullBlocks,
    ReadBlocks,
    ReadSlot,
    SlotSays,
)
from engine.twin.holds import TIME_UP
from engine.twin.request import HoldSource
from kvtransfer.early_notes import Ready
from kvtransfer.hold_marks import mark_of
from kvtransfer.notes import Beat
from kvtransfer.notes import ReadNote as HasRead

PRODUCERS_MAX = 4096
"""The most producers whose addresses are remembered."""

CONSUMER = InstanceId("consumer")
"""The sender in notices about holds: a notice is recognised by the hold's mark, not by its sender."""

Spawn = Callable[[Coroutine[Any, Any, None]], object]


@dataclass(frozen=True, slots=True)
class BlocksRead:
    """The result of reading blocks."""

    contents: tuple[int, ...]
    """One number for the content of each block."""
    vouched: tuple[int, ...] | None
    """By the producer's digests, the contents of these blocks when the hold began; None: it has none of them now."""
    said: bytes | None
    """The content of the hold's slot after that; None: it could not be read."""


class MockPeers(Protocol):
    """Other mocks, in this process or elsewhere. Unreachable ones answer None or False."""

    async def read(self, producer: Producer, source: HoldSource, blocks: tuple[int, ...]) -> BlocksRead | None:
        """What a pull reads: blocks, their digests under this hold, and after them the hold's slot."""

    async def notify(self, producer: Producer, what: str, words: list[str]) -> bool:
        """Send a notice about holds; returns whether it arrived. `what` is ``release`` (`words`: a request and its
        mark) or ``heartbeat`` (`words`: requests).
        """

    def near(self, producer: Producer) -> MockHandoffs | None:
        """The producer itself, if it runs in this process."""

    def wait_for(self, name: str, producer: str, told: Callable[[Ready], None], lost: Callable[[], None]) -> None:
        """An early leg waits for the hold of this name, at an instance of this process: `told` gets the hold, or `lost`
        is called some time after the producer, an instance, has died with the hold.
        """

    def wait_no_more(self, name: str) -> None:
        """The early leg that waited for this name is over."""

    def ready(self, hold: str, ready: Ready) -> bool:
        """A hold is there. `hold`: unique in this process. Returns whether an early leg was told."""

    def over(self, hold: str) -> None:
        """The hold is over."""

    def left(self, producer: str, holds: Sequence[str]) -> None:
        """The engine of this instance has died, and these holds with it."""


class MockHandoffs:
    """The hand-overs of one instance.

    It has many attributes: those of a consumer, those of a producer, and what both use (twin's clock, peers, faults).
    """

    def __init__(
        self, settings: MockSettings, clock: Clock, faults: MockFaults, metrics: Metrics, peers: MockPeers, spawn: Spawn
    ) -> None:
        self.engine_id = ""
        self.epoch = 0
        self._settings = settings
        self._clock = clock
        self._faults = faults
        self.metrics = metrics
        self._peers = peers
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._producers: OrderedDict[str, Producer] = OrderedDict()
        self._wanted: dict[TransferId, Producer] = {}
        """Other instances' holds that requests here wait for, and their producers."""
        self._beating: asyncio.TimerHandle | None = None
        self._under_way = 0
        """The number of transfers to this instance now."""
        self._hung: list[PullBlocks] = []
        """Pulls that stand still, by a fault."""
        self._last: tuple[int, ...] = ()
        """The contents of the last pull."""
        self._holds: dict[str, dict[int, int]] = {}
        """This instance's holds by request. With digests: by block, its content when the hold began."""

    def begin_life(self, epoch: int, engine_id: str) -> None:
        """A life of the engine begins, or with an empty `engine_id` none: drop everything from the former life."""
        if self.engine_id:
            self._peers.left(self._settings.name, [f"{self.engine_id}/{request}" for request in self._holds])
        self.epoch, self.engine_id = epoch, engine_id
        self._wanted.clear()
        self._holds.clear()
        self._hung.clear()

    # -- as a consumer --

    def want(self, reference: Reference) -> None:
        """A request has arrived that will pull this hold: send the producer heartbeats for it."""
        producer = reference.producer
        self._producers[producer.engine_id] = producer
        self._producers.move_to_end(producer.engine_id)
        if len(self._producers) > PRODUCERS_MAX:
            self._producers.popitem(last=False)
        self._wanted[reference.source.transfer] = producer
        self._keep_beating()

    def pull(self, order: PullBlocks) -> None:
        """The engine orders the read of these blocks: read them when the transfer's time is over."""
        bytes_ = len(order.remote) * self._settings.config.block_size * self._settings.kv_bytes_per_token
        self._under_way += 1
        delay_s = self._clock.real_s(self._settings.transfer_ms(bytes_, self._under_way))
        self.metrics.observe("nixl_bytes_transferred", bytes_)
        self.metrics.observe("nixl_xfer_time_seconds", delay_s)
        self._loop.call_later(delay_s, self._read, order)

    def _read(self, order: PullBlocks) -> None:
        self._under_way -= 1
        fault = self._faults.strike(ON_PULLS - {FaultKind.DROP_NOTICE}, FaultLeg.DECODE, order.request)
        kind = fault.fault if fault is not None else None
        producer = self._producers.get(order.source.producer)
        if kind is FaultKind.HANG_PULL:
            self._hung.append(order)
        elif producer is None or kind is FaultKind.FAIL_PULL:
            self._landed(order, None, None)
        elif (near := self._peers.near(producer)) is not None:
            self._landed(order, near.read(producer.engine_id, order.source, order.remote), kind)
        else:
            self._spawn(self._read_far(order, producer, kind))

    def fail_hung(self) -> None:
        """The transport notices which pulls stand still: they fail."""
        hung, self._hung = self._hung, []
        for order in hung:
            self._landed(order, None, None)

    async def _read_far(self, order: PullBlocks, producer: Producer, kind: FaultKind | None) -> None:
        self._landed(order, await self._peers.read(producer, order.source, order.remote), kind)

    def _landed(self, order: PullBlocks, read: BlocksRead | None, kind: FaultKind | None) -> None:
        if read is None:
            self.metrics.counts["nixl_num_failed_transfers"] += 1
            self._clock.tell(KvFailed(order.request))
            return
        before, self._last = self._last, read.contents
        contents = read.contents if kind is None else spoil(kind, read.contents, before)
        wrong = NOT_ITS_OWN if self._settings.digests and contents != read.vouched else ""
        self._clock.tell(KvArrived(order.request, contents, read.said, wrong))

    def give_back(self, source: HoldSource, leg: FaultLeg = FaultLeg.DECODE) -> None:
        """Tell the producer that its hold is not wanted any more. `leg`: which faults may lose this notice."""
        self._wanted.pop(source.transfer, None)
        request_id = source.transfer.request
        if self._faults.strike(frozenset({FaultKind.DROP_NOTICE}), leg, request_id) is not None:
            return
        producer = self._producers.get(source.producer)
        if producer is None:
            return
        words = [source.request, "" if source.slot is None else source.slot.proof]
        if (near := self._peers.near(producer)) is not None:
            near.heard("release", producer.engine_id, words)
        else:
            self._spawn(self._notify(producer, "release", words))

    async def _notify(self, producer: Producer, what: str, words: list[str]) -> None:
        if not await self._peers.notify(producer, what, words):
            self.metrics.counts["nixl_num_failed_notifications"] += 1

    def _keep_beating(self) -> None:
        if self._wanted and self._beating is None:
            every_s = self._settings.config.lease_s / BEATS_PER_LEASE
            self._beating = self._loop.call_later(self._clock.real_s(every_s * 1000), self._beat)

    def _beat(self) -> None:
        self._beating = None
        by_producer: dict[Producer, list[str]] = {}
        for transfer, producer in self._wanted.items():
            by_producer.setdefault(producer, []).append(transfer.request)
        for producer, request_ids in by_producer.items():
            if (near := self._peers.near(producer)) is not None:
                near.heard("heartbeat", producer.engine_id, request_ids)
            else:
                self._spawn(self._notify(producer, "heartbeat", request_ids))
        self._keep_beating()

    def stop(self) -> None:
        """Send no more heartbeats."""
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    def forget(self, source: HoldSource) -> None:
        """The request is over: send no more heartbeats for its hold."""
        self._wanted.pop(source.transfer, None)

    def early(self, name: str, producer: str, told: Callable[[Ready], None], lost: Callable[[], None]) -> None:
        """An early leg waits for the hold of this name, without blocks (`MockPeers.wait_for`)."""
        self._peers.wait_for(name, producer, told, lost)

    def early_over(self, name: str) -> None:
        """The early leg waits no more."""
        self._peers.wait_no_more(name)

    # -- as a producer --

    def ready(self, request: RequestId, ready: Ready) -> bool:
        """A request has left a hold: tell the early leg that waits for it, if any. Returns whether one was told."""
        return self._peers.ready(f"{self.engine_id}/{request}", ready)

    def hold_id(self, request: RequestId) -> TransferId:
        """The id under which a request's blocks are held."""
        return TransferId(request, ATTEMPT, self.epoch)

    def held(self, hold: Hold) -> None:
        """These blocks are held from now on."""
        self._holds[hold.request] = {}
        if self._settings.digests:
            self._loop.call_soon(self._vouch, hold)  # after the twin's effects; no consumer knows the hold yet

    def _vouch(self, hold: Hold) -> None:
        if hold.request not in self._holds:
            return
        contents = self.contents(self.engine_id, hold.blocks)
        if contents is not None:
            self._holds[hold.request] = dict(zip(hold.blocks, contents, strict=True))

    def ended(self, effect: HoldEnded) -> None:
        """A hold of this instance has ended."""
        self._holds.pop(effect.request, None)
        self._peers.over(f"{self.engine_id}/{effect.request}")
        self.metrics.counts["nixl_num_kv_expired_reqs"] += effect.because == TIME_UP

    def holds(self) -> int:
        """The number of holds that stand."""
        return len(self._holds)

    def read(self, engine_id: str, source: HoldSource, blocks: tuple[int, ...]) -> BlocksRead | None:
        """What a consumer reads here now; None: `engine_id` is of a former life."""
        contents = self.contents(engine_id, blocks)
        if contents is None:
            return None
        held = self._holds.get(source.request, {})
        vouched = tuple(held[each] for each in blocks) if held.keys() >= set(blocks) else None
        said = self._clock.read(ReadSlot(source.slot.index)) if source.slot is not None else None
        return BlocksRead(contents, vouched, said.said if isinstance(said, SlotSays) else None)

    def contents(self, engine_id: str, blocks: tuple[int, ...]) -> tuple[int, ...] | None:
        """The contents of these blocks now; None: `engine_id` is of a former life."""
        if engine_id != self.engine_id:
            return None
        answer = self._clock.read(ReadBlocks(blocks))
        return answer.contents if isinstance(answer, Contents) else None

    def heard(self, what: str, engine_id: str, words: Sequence[str]) -> bool:
        """Take a consumer's notice about holds. False: it is for a former life."""
        if engine_id != self.engine_id:
            return False
        if what == "heartbeat":
            self._clock.tell(Notice(CONSUMER, Beat(tuple(words))))
        elif len(words) == 2:
            request, proof = words
            self.metrics.counts["nixl_num_notifications_after_expiry"] += request not in self._holds
            self._clock.tell(Notice(CONSUMER, HasRead(request, 1, mark_of(proof))))
        return True

    def give_up(self, name: str) -> None:
        """A router gives up the hold of this name, made already or not."""
        self._clock.tell(GiveUpHold(name))
