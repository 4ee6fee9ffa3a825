"""KV on its way from P to D: handshakes, flows over the NICs, the contents read, and the notices that end a hold.

A pull that ends reads the producer's blocks as they are at that moment, whichever request owns them, and then the
hold's slot: safety is the twins' task (`prefill`, `decode`), not this module's. A producer that died fails its pulls;
one that cannot be reached fails them after a timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cluster.ids import InstanceId, TransferId
from decode.peers import NOT_ITS_OWN
from decode.pulls import BEATS_PER_LEASE
from decode.table import BECAUSE, Reading
from engine.twin import events as ev
from engine.twin.request import HoldSource
from sim import link
from sim.fleet import pull_bytes, pull_limit_gb_s
from sim.instance import SimInstance
from sim.kernel import NS

if TYPE_CHECKING:
    from sim.world import World


class SimulatedPull:
    """One read of a hold."""

    __slots__ = ("by", "effect", "epoch", "producer")

    def __init__(self, by: SimInstance, effect: ev.PullBlocks, producer: SimInstance) -> None:
        self.by, self.effect, self.producer = by, effect, producer
        self.epoch = by.epoch
        """The life of D that reads."""

    @property
    def stands(self) -> bool:
        """Whether the producer still has the life that made the hold."""
        producer = self.producer
        return producer.ready and producer.epoch == self.effect.source.transfer.producer_epoch


class SimulatedPulls:
    """All pulls between instances."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._kernel: Final = world.kernel
        settings = world.settings
        self._handshake_ns: Final = round(settings.handshake_ms * 1e6)
        self._timeout_ns: Final = round(settings.pull_timeout_s * NS)
        self._met: set[tuple[int, int, int, int]] = set()
        self._limits: dict[tuple[int, int], float] = {}
        self.ended = self.failed = 0
        self.bytes_moved = 0
        self.spoil: Callable[[SimulatedPull, tuple[int, ...]], tuple[int, ...]] | None = None
        """A fault: replaces what is read."""
        self._vouched: dict[TransferId, dict[int, int]] = {}
        """With digests: the contents of each hold's blocks."""
        self.loses_notice: Callable[[InstanceId, TransferId], bool] | None = None
        """A fault: whether a notice gets lost."""

    def order(self, by: SimInstance, effect: ev.PullBlocks) -> None:
        """D's scheduler has room for the pull."""
        pull = SimulatedPull(by, effect, self._world.by_name[effect.source.producer])
        now_ns = self._kernel.now_ns
        if self._unreachable(pull):
            return
        wait_ns = pull.producer.member.latency_ns + self._world.rough.pull_wait_ns()
        if self._handshake_ns:
            pair = (by.index, by.epoch, pull.producer.index, pull.producer.epoch)
            if pair not in self._met:
                self._met.add(pair)
                wait_ns += self._handshake_ns
        self._kernel.at(now_ns + wait_ns, self._begin, pull)

    def _unreachable(self, pull: SimulatedPull) -> bool:
        """Whether one end is cut off: then the pull fails after its timeout."""
        if not (pull.producer.cut_off or pull.by.cut_off):
            return False
        self._kernel.at(self._kernel.now_ns + self._timeout_ns, self._fail, pull)
        return True

    def _begin(self, pull: SimulatedPull) -> None:
        if pull.by.epoch != pull.epoch or self._unreachable(pull):
            return
        if not pull.stands:
            self._fail(pull)
            return
        source, target = pull.producer, pull.by
        pair = (source.index, target.index)
        limit = self._limits.get(pair)
        if limit is None:
            limit = self._limits[pair] = pull_limit_gb_s(source.member, target.member)
        size = pull_bytes(target.member, len(pull.effect.remote))
        self.bytes_moved += size
        flow = link.Flow(source.nic, target.nic, size, limit, pull)
        self._schedule(link.join(flow, self._kernel.now_ns))

    def _schedule(self, changed: list[link.Flow]) -> None:
        for flow in changed:
            self._kernel.at(flow.end_ns, self._flow_over, flow)

    def _flow_over(self, flow: link.Flow) -> None:
        if flow.end_ns != self._kernel.now_ns:
            return  # its end has changed since
        self._schedule(link.leave(flow, self._kernel.now_ns))
        self._landed(flow.payload)

    def _landed(self, pull: SimulatedPull) -> None:
        """The last byte has arrived."""
        by = pull.by
        if by.epoch != pull.epoch or not by.ready:
            return
        read = self._read(pull) if pull.stands else None
        if read is None:
            self._fail(pull)
            return
        wrong = "" if self._vouched_for(pull, read) else NOT_ITS_OWN
        slot = pull.effect.source.slot
        assert slot is not None, "a hold without one is not pulled"
        self._world.tell(pull.producer, ev.ReadSlot(slot.index))
        by.pulling.pop(pull.effect.request, None)
        failed = self.failed
        self._world.tell(by, ev.KvArrived(pull.effect.request, read, pull.producer.slot_said, wrong))
        self.ended += self.failed == failed

    def not_used(self, _: SimInstance, effect: ev.NotUsed) -> None:
        """D computes the prompt itself."""
        self.failed += 1
        self._world.counts["pulls_refused"] += effect.because == NOT_ITS_OWN
        self._world.counts["pulls_unconfirmed"] += effect.because == BECAUSE[Reading.GONE]

    def _read(self, pull: SimulatedPull) -> tuple[int, ...] | None:
        """The current contents of P's memory; None: it cannot be read. If contents are not kept, the right ones."""
        producer, remote = pull.producer, pull.effect.remote
        if not self._world.keeps_contents:
            return remote
        self._world.tell(producer, ev.ReadBlocks(remote))
        read = producer.contents_said
        return read if read is None or self.spoil is None else self.spoil(pull, read)

    def _vouched_for(self, pull: SimulatedPull, read: tuple[int, ...]) -> bool:
        if not (self._world.settings.digests and self._world.keeps_contents):
            return True
        held = self._vouched.pop(pull.effect.source.transfer, {})
        return all(held.get(block) == content for block, content in zip(pull.effect.remote, read, strict=True))

    def vouch(self, word: tuple[SimInstance, ev.Hold]) -> None:
        """With digests: P records what it holds, when the hold begins."""
        producer, hold = word
        if not (self._world.keeps_contents and producer.ready and producer.epoch == hold.transfer.producer_epoch):
            return
        self._world.tell(producer, ev.ReadBlocks(hold.blocks))
        said = producer.contents_said
        if said is not None:
            self._vouched[hold.transfer] = dict(zip(hold.blocks, said, strict=True))

    def _fail(self, pull: SimulatedPull) -> None:
        by = pull.by
        if by.epoch != pull.epoch or not by.ready:
            return
        by.pulling.pop(pull.effect.request, None)
        self._world.tell(by, ev.KvFailed(pull.effect.request))

    def break_off(self, at: SimInstance, *, wait_ns: int) -> None:
        """Break off all flows to or from this instance; their readers are told after `wait_ns`."""
        for flow in [*at.nic.sending, *at.nic.receiving]:
            self._schedule(link.leave(flow, self._kernel.now_ns))
            self._kernel.at(self._kernel.now_ns + wait_ns, self._fail, flow.payload)

    def slow(self, at: SimInstance, gb_s: float) -> None:
        """The instance's NIC has another speed from now on."""
        self._schedule(link.slowed(at.nic, gb_s, self._kernel.now_ns))

    # --- notices to producers --------------------------------------------------------------------------------------

    def give_back(self, by: SimInstance, source: HoldSource) -> None:
        """D has read the hold, or will not: P's blocks are not needed any more."""
        lost = self.loses_notice is not None and self.loses_notice(source.producer, source.transfer)
        if lost or by.cut_off or self._world.by_name[source.producer].cut_off:
            return
        self._kernel.at(self._kernel.now_ns + self._world.hop_ns, self.given_back, (source, by))

    def given_back(self, word: tuple[HoldSource, SimInstance]) -> None:
        """That notice has arrived at the producer."""
        source, by = word
        producer = self._world.by_name[source.producer]
        if producer.ready:  # in any life: a former life's mark ends nothing
            self._world.tell(producer, ev.released(source, by.name))

    def give_up(self, source: HoldSource) -> None:
        """A router's request has arrived at the producer: the hold is given up by its name."""
        producer = self._world.by_name[source.producer]
        if producer.ready and not producer.cut_off:
            self._world.tell(producer, ev.GiveUpHold(str(source.transfer)))

    def keep_alive(self, by: SimInstance) -> None:
        """Heartbeats for the holds that D has not pulled yet, as often as a lease needs them."""
        now_ns = self._kernel.now_ns
        for request, (source, since_ns) in by.pulling.items():
            producer = self._world.by_name[source.producer]
            if now_ns - since_ns < producer.member.config.lease_s * NS / BEATS_PER_LEASE:
                continue
            by.pulling[request] = (source, now_ns)
            if not (by.cut_off or producer.cut_off) and producer.ready:
                word = (producer, ev.wanted(source, by.name))
                self._kernel.at(now_ns + self._world.hop_ns, self._heard, word)

    def _heard(self, word: tuple[SimInstance, ev.Notice]) -> None:
        producer, wanted = word
        if producer.ready:
            self._world.tell(producer, wanted)
