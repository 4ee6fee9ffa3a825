"""Proofs of the heartbeats in the registry, made with the keys that sign tickets. Pure.

An instance's heartbeat carries a MAC by the instance's ticket key, a router's heartbeat one by the fleet's key. Routers
have the fleet's keys, from which the keys of all instances follow, so a router can check every heartbeat. An agent can
check heartbeats under its own name only. That is enough: the agent must notice when it loses that name.

A heartbeat names every key that its sender has, so readers believe it while keys are being replaced, whichever file is
changed first. A copied heartbeat is useless: it carries the time at which it was sent, readers refuse it after `AGE_S`,
and a reader takes the same heartbeat only once (`cluster.registry.membership`). The machines' clocks must therefore
differ by less than `AGE_S`; for tickets they must differ by even less.

A reader's clock that is set anew makes every heartbeat look old at once. So a sender that was believed by both clocks
stays believed while its heartbeats go on at the pace of the reader's steady clock, which is never set. Copies gain
nothing by it: they too must be within `AGE_S` of where the sender was last believed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection
from typing import Final

from cluster.ids import InstanceId, engine_of
from cluster.registry.membership import Heartbeat, MemberKind
from kvtransfer.keys import InstanceKeys, instance_key
from kvtransfer.ticket import SigningKey

AGE_S: Final = 30.0
"""The largest age of a heartbeat, and the largest distance into the future, by the reader's clock. It is five ttls: a
machine that paused is not lost for the pause alone, and a copy of a dead instance's last heartbeat brings the instance
back for no longer than this."""

INSTANCES_MAX: Final = 8192
"""The number of instances whose derived keys are cached."""

_DOMAIN: Final = b"baton-heartbeat\x00"
"""Separates heartbeat MACs from MACs made with the same key for another purpose."""


class InstanceProofs:
    """Proofs as an agent makes and checks them: for its engine, or for all ranks of it."""

    judges_all: Final = False
    accepts_unproven: Final = False

    def __init__(self, keys: Callable[[], InstanceKeys], clock: Callable[[], float]) -> None:
        """`keys` returns the instance's current keys, `clock` Unix time in seconds."""
        self._keys: Final = keys
        self._clock: Final = clock

    def prove(self, cluster: str, beat: Heartbeat, body: bytes) -> str:
        """See `cluster.registry.proofs.Proofs`."""
        mine = self._keys()
        return _proof(mine.keys, cluster, body) if _is(beat, mine.instance) else ""

    def fault(self, cluster: str, beat: Heartbeat, body: bytes, proof: str) -> str:
        """See `cluster.registry.proofs.Proofs`."""
        mine = self._keys()
        if not _is(beat, mine.instance):
            return ""
        return _unproven(mine.keys, cluster, body, proof) or _aged(beat, self._clock())


class FleetProofs:
    """Proofs as a router, or another program with the fleet's keys, makes and checks them."""

    judges_all: Final = True

    def __init__(
        self,
        keys: Callable[[], tuple[SigningKey, ...]],
        clock: Callable[[], float],
        *,
        accepts_unproven: bool = False,
        steady: Callable[[], float] | None = None,
    ) -> None:
        """`keys` returns the fleet's current keys, `clock` Unix time in seconds, `steady` seconds of a clock that is
        never set; None: a clock that is set anew loses the fleet until it is right.
        """
        self.accepts_unproven: Final = accepts_unproven
        self._keys: Final = keys
        self._clock: Final = clock
        self._steady: Final = steady
        self._believed: Final[dict[tuple[MemberKind, InstanceId, str], float]] = {}
        """By sender: when it last was believed by its age, its time less the steady clock's, seconds."""
        self._of: Final[dict[InstanceId, tuple[SigningKey, ...]]] = {}
        self._made_from: tuple[SigningKey, ...] = ()

    def prove(self, cluster: str, beat: Heartbeat, body: bytes) -> str:
        """See `cluster.registry.proofs.Proofs`."""
        return _proof(self._keys_of(beat), cluster, body)

    def fault(self, cluster: str, beat: Heartbeat, body: bytes, proof: str) -> str:
        """See `cluster.registry.proofs.Proofs`."""
        wrong = _unproven(self._keys_of(beat), cluster, body, proof)
        if wrong:
            return wrong
        aged = _aged(beat, self._clock())
        return "" if self._steady is not None and self._goes_on(beat, self._steady(), aged=bool(aged)) else aged

    def _goes_on(self, beat: Heartbeat, now: float, *, aged: bool) -> bool:
        """Whether a sender's heartbeats go on as when it was last believed by its age, at `now` of the steady clock."""
        sender, ahead_s = (beat.kind, beat.id, beat.agent), beat.sent_at - now
        if aged:
            before_s = self._believed.get(sender)
            return before_s is not None and abs(ahead_s - before_s) <= AGE_S
        if len(self._believed) > INSTANCES_MAX:
            self._believed.clear()
        self._believed[sender] = ahead_s
        return True

    def _keys_of(self, beat: Heartbeat) -> tuple[SigningKey, ...]:
        fleet = self._keys()
        if beat.kind is not MemberKind.INSTANCE:
            return fleet
        if fleet != self._made_from or len(self._of) > INSTANCES_MAX:
            self._of.clear()
            self._made_from = fleet
        found = self._of.get(beat.id)
        if found is None:
            found = self._of[beat.id] = tuple(instance_key(key, beat.id) for key in fleet)
        return found


def _is(beat: Heartbeat, instance: InstanceId) -> bool:
    return beat.kind is MemberKind.INSTANCE and engine_of(beat.id) == instance


def _proof(keys: Collection[SigningKey], cluster: str, body: bytes) -> str:
    return " ".join(f"{key.id}.{_mac(key, cluster, body)}" for key in keys)


def _unproven(keys: Collection[SigningKey], cluster: str, body: bytes, proof: str) -> str:
    """Why the proof is not that of `body`'s sender; empty: it is."""
    if not proof:
        return "it carries no proof: its program is older than this one, or has no --ticket-keys-file"
    said = dict(word.partition(".")[::2] for word in proof.split(" "))
    known = [key for key in keys if key.id in said]
    if not known:
        return "it is proven with keys that are not valid here"
    if not any(hmac.compare_digest(_mac(key, cluster, body), said[key.id]) for key in known):
        return "its proof is wrong: it was not made with this fleet's keys for this name, or was changed"
    return ""


def _aged(beat: Heartbeat, now: float) -> str:
    """Why a heartbeat is not of now; empty: it is."""
    age_s = now - beat.sent_at
    if abs(age_s) > AGE_S:
        what = f"{age_s:.0f} s old" if age_s > 0 else f"from {-age_s:.0f} s in the future"
        return f"it is {what} by this machine's clock: a copy of an old one, or the clocks differ"
    return ""


def _mac(key: SigningKey, cluster: str, body: bytes) -> str:
    return hmac.digest(key.secret, _DOMAIN + cluster.encode() + b"\x00" + body, hashlib.sha256).hex()
