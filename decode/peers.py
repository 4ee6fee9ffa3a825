"""Peer health: producers that a consumer may pull from, and those that it sets aside for a while. Pure.

Two instances may both be healthy while the connection between them is not: a cable, a switch, a route, memory that one
of them reads badly. Such a pair hands nothing over, and each request waits for the failure. So the consumer sets the
producer aside: it computes that producer's prompts itself at once, and still pulls from others. From time to time one
pull tests whether the connection works again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from decode.table import BECAUSE, Reading

MET: Final = "met"
"""The state of a link over which this engine can read the other one's memory."""
FAILURES: Final = 3
"""A producer is set aside after so many failures in a row. One may be a cut connection, which NIXL renews; two happen
when an engine restarts."""
ASIDE_S: Final = 5.0
"""Seconds of the first pause; the pause doubles after each failed test."""
ASIDE_S_MAX: Final = 300.0
"""Seconds of the longest pause."""
MEETING_S: Final = 15.0
"""Seconds for which an engine without requests keeps stepping, so that a handshake can end."""
PEERS_MAX: Final = 4096
"""The number of engines that may be introduced at one time."""

NOT_ITS_OWN: Final = "a block is not what was held"
"""Why blocks whose digests differ are not used (`kvtransfer.block_digests`)."""
BROKEN: Final = frozenset({BECAUSE[Reading.SPOILT], BECAUSE[Reading.UNSEEN], NOT_ITS_OWN})
"""Endings of a pull that count against the connection between two instances. A hold that has ended does not."""


@dataclass(slots=True)
class ProducerLife:
    """One life of a producer, and the results of the pulls from it."""

    instance: str = ""
    link: str = "introduced"
    """The state of its link with the ranks here: introduced, met, or why not."""
    meeting_until: float = 0.0
    """An idle engine steps until then so that the ranks can report the handshake's end; 0: they have, or need not."""
    pulled: int = 0
    failed: int = 0
    in_a_row: int = 0
    """Failures since the last good pull."""
    aside_s: float = 0.0
    """Seconds of its last pause; 0: none since a pull was good."""
    until: float = 0.0
    """The end of the pause, on the caller's clock. From then on one pull may test the connection."""
    trying: bool = False
    """The pull that tests the connection is under way."""

    @property
    def aside(self) -> bool:
        """Whether the producer is set aside: only an occasional test is pulled from it."""
        return self.aside_s > 0


class ProducerPeers:
    """The producers of one consumer, by their engine ids. `now` in seconds times `unit`."""

    def __init__(self, unit: float = 1.0) -> None:
        """`unit`: ticks of the caller's clock in a second."""
        self._unit: Final = unit
        self._peers: Final[dict[str, ProducerLife]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, engine: str) -> bool:
        return engine in self._peers

    def met(self, engine: str, instance: str, now: float, *, shakes_hands: bool = False) -> None:
        """The producer was introduced; earlier lives of the same instance are removed. `shakes_hands`: the ranks will
        report the result.
        """
        for former in self.lives(instance, but=engine):
            del self._peers[former]
        peer = self._peers.setdefault(engine, ProducerLife(instance))
        if shakes_hands:
            peer.meeting_until = now + MEETING_S * self._unit

    def lives(self, instance: str, *, but: str = "") -> list[str]:
        """The known lives of an instance, without the one that has the engine id `but`."""
        return [each for each, peer in self._peers.items() if peer.instance == instance and each != but]

    def forgotten(self, engine: str) -> None:
        """The producer is gone."""
        self._peers.pop(engine, None)

    def stands(self, engine: str, link: str) -> None:
        """The ranks report the state of their link with the producer."""
        peer = self._peers.get(engine)
        if peer is not None:
            peer.link, peer.meeting_until = link, 0.0

    def meeting(self, now: float) -> bool:
        """Whether a handshake is under way for which the engine must keep stepping."""
        return any(peer.meeting_until > now for peer in self._peers.values())

    def of(self, engine: str) -> ProducerLife:
        """What is known of this producer; the default if it was not introduced."""
        return self._peers.get(engine) or ProducerLife()

    def items(self) -> list[tuple[str, ProducerLife]]:
        """All producers; may be called from another thread."""
        return list(self._peers.items())

    def may_pull(self, engine: str, now: float) -> bool:
        """Whether to pull from this producer. The call changes nothing. While it is false, routers should send no
        request that needs such a pull; after the pause they may, and one request is the test.
        """
        peer = self.of(engine)
        return not peer.aside or now >= peer.until

    def may_wait(self, engine: str, now: float) -> bool:
        """Whether a request may wait for a hold of this producer: one pull that tests the connection is no reason to
        give the wait up.
        """
        return engine in self._peers and (self.of(engine).trying or self.may_pull(engine, now))

    def shunned(self, now: float) -> tuple[str, ...]:
        """The instances that this consumer pulls nothing from now."""
        return tuple(peer.instance for peer in self._peers.values() if peer.aside_s and now < peer.until)

    def began(self, engine: str, now: float) -> bool:
        """A pull from the producer begins. If the producer was set aside, this pull is the test, the only one for
        another pause. Returns whether it is.
        """
        peer = self.of(engine)
        if peer.aside:
            peer.trying, peer.until = True, now + peer.aside_s * self._unit
        return peer.aside

    def tested(self, engine: str) -> None:
        """The pull that tests the connection has ended, also one without a result: its hold had ended, or nothing was
        read. No request waits for it any more.
        """
        self.of(engine).trying = False

    def ended(self, engine: str, because: str, now: float) -> None:
        """A pull from the producer has ended: well (empty `because`), or not, and why."""
        peer = self.of(engine)
        if not because:
            peer.pulled += 1
            peer.in_a_row, peer.aside_s, peer.trying = 0, 0.0, False
        elif because in BROKEN:
            peer.failed += 1
            peer.in_a_row += 1
            if peer.trying or (peer.in_a_row >= FAILURES and not peer.aside):
                peer.aside_s = min(ASIDE_S_MAX, 2 * peer.aside_s or ASIDE_S)
                peer.until, peer.trying = now + peer.aside_s * self._unit, False
