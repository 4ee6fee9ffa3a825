"""Producers that a consumer may pull from, and which of them it sets aside for a while (peer health). Pure.

Two instances may each be well and the way between them not: a cable, a switch, a route, memory that one of them reads
badly. Such a pair hands nothing over, and waits for it every time. Set aside, its prompts are computed by the consumer
at once; pulls from others go on as ever. From time to time one pull tries whether it is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from decode.table import BECAUSE, Reading

FAILURES: Final = 3
"""In a row: one is a cut connection, which NIXL makes anew; two happen to an engine that restarts."""
ASIDE_S: Final = 5.0
"""At first; twice as long after each try that fails."""
ASIDE_S_MAX: Final = 300.0
MEETING_S: Final = 15.0
"""So long an engine without requests steps for a handshake to end."""
PEERS_MAX: Final = 4096
"""Engines that may be introduced at one time."""

NOT_ITS_OWN: Final = "a block is not what was held"
"""Why blocks whose digests differ are not used (`kvtransfer.vouchers`)."""
BROKEN: Final = frozenset({BECAUSE[Reading.SPOILT], BECAUSE[Reading.UNSEEN], NOT_ITS_OWN})
"""Ends of a pull that the way between two instances is to blame for. A hold that has ended says nothing of it."""


@dataclass(slots=True)
class Peer:
    """One life of a producer, and what became of the pulls from it."""

    instance: str = ""
    link: str = "introduced"
    """How it stands with the ranks here: introduced, met, or why not."""
    meeting_until: float = 0.0
    """An idle engine steps until then for the ranks to say how the handshake has ended; 0: they have, or need not."""
    pulled: int = 0
    failed: int = 0
    in_a_row: int = 0
    """Failures since the last that was good."""
    aside_s: float = 0.0
    """For how long it was set aside last; 0: it was not, since a pull was good."""
    until: float = 0.0
    trying: bool = False

    @property
    def aside(self) -> bool:
        """Whether it is not to be relied on: nothing but a try now and then is pulled from it."""
        return self.aside_s > 0


class Peers:
    """Of one consumer, by the producers' engine ids. `now` in seconds times `unit`."""

    def __init__(self, unit: float = 1.0) -> None:
        """`unit`: ticks of the caller's clock in a second."""
        self._unit: Final = unit
        self._peers: Final[dict[str, Peer]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, engine: str) -> bool:
        return engine in self._peers

    def met(self, engine: str, instance: str, now: float, *, shakes_hands: bool = False) -> None:
        """It was introduced; earlier lives of the same instance are gone. `shakes_hands`: the ranks will say how it
        went.
        """
        for former in [each for each, peer in self._peers.items() if peer.instance == instance and each != engine]:
            del self._peers[former]
        peer = self._peers.setdefault(engine, Peer(instance))
        if shakes_hands:
            peer.meeting_until = now + MEETING_S * self._unit

    def forgotten(self, engine: str) -> None:
        """It is gone."""
        self._peers.pop(engine, None)

    def stands(self, engine: str, link: str) -> None:
        """The ranks say how it stands."""
        peer = self._peers.get(engine)
        if peer is not None:
            peer.link, peer.meeting_until = link, 0.0

    def meeting(self, now: float) -> bool:
        """Whether a handshake is under way that somebody has to step for."""
        return any(peer.meeting_until > now for peer in self._peers.values())

    def of(self, engine: str) -> Peer:
        """What is known of it; of one that was not introduced, nothing is."""
        return self._peers.get(engine) or Peer()

    def items(self) -> list[tuple[str, Peer]]:
        """All of them; may be asked from another thread."""
        return list(self._peers.items())

    def may_pull(self, engine: str, now: float) -> bool:
        """Whether to pull from it. Asking changes nothing. While this is false routers had better send nothing for
        which that pull would be needed; after a pause they may, and one request is the try.
        """
        peer = self.of(engine)
        return not peer.aside or now >= peer.until

    def shunned(self, now: float) -> tuple[str, ...]:
        """Instances that nothing is pulled from now."""
        return tuple(peer.instance for peer in self._peers.values() if peer.aside_s and now < peer.until)

    def began(self, engine: str, now: float) -> None:
        """A pull from it begins. From one that was set aside it is the try, the only one for as long again."""
        peer = self.of(engine)
        if peer.aside:
            peer.trying, peer.until = True, now + peer.aside_s * self._unit

    def ended(self, engine: str, because: str, now: float) -> None:
        """A pull from it has ended: well (empty), or not, and why."""
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
