"""Proofs of the heartbeats in the registry, made with the keys that sign tickets. Pure.

An instance's heartbeat carries a MAC by the instance's ticket key, a router's heartbeat one by the fleet's key. Routers
have the fleet's keys, from which the keys of all instances follow, so a router can check every heartbeat. An agent can
check heartbeats under its own name only. That is enough: the agent must notice when it loses that name.

A heartbeat names every key that its sender has, so readers believe it while keys are being replaced, whichever file is
changed first. A copied heartbeat is useless: it carries the time at which it was sent, readers refuse it after `AGE_S`,
and a reader takes the same heartbeat only once (`cluster.registry.membership`). The machines' clocks must therefore
differ by less than `AGE_S`; for tickets they must differ by even less.
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
        return _fault(mine.keys, cluster, beat, body, proof, self._clock()) if _is(beat, mine.instance) else ""


class FleetProofs:
    """Proofs as a router, or another program with the fleet's keys, makes and checks them."""

    judges_all: Final = True

    def __init__(
        self,
        keys: Callable[[], tuple[SigningKey, ...]],
        clock: Callable[[], float],
        *,
        accepts_unproven: bool = False,
    ) -> None:
        """`keys` returns the fleet's current keys, `clock` Unix time in seconds."""
        self.accepts_unproven: Final = accepts_unproven
        self._keys: Final = keys
        self._clock: Final = clock
        self._of: Final[dict[InstanceId, tuple[SigningKey, ...]]] = {}
        self._made_from: tuple[SigningKey, ...] = ()

    def prove(self, cluster: str, beat: Heartbeat, body: bytes) -> str:
        """See `cluster.registry.proofs.Proofs`."""
        return _proof(self._keys_of(beat), cluster, body)

    def fault(self, cluster: str, beat: Heartbeat, body: bytes, proof: str) -> str:
        """See `cluster.registry.proofs.Proofs`."""
        return _fault(self._keys_of(beat), cluster, beat, body, proof, self._clock())

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


def _fault(keys: Collection[SigningKey], cluster: str, beat: Heartbeat, body: bytes, proof: str, now: float) -> str:
    if not proof:
        return "it carries no proof: its program is older than this one, or has no --ticket-keys-file"
    said = dict(word.partition(".")[::2] for word in proof.split(" "))
    known = [key for key in keys if key.id in said]
    if not known:
        return "it is proven with keys that are not valid here"
    if not any(hmac.compare_digest(_mac(key, cluster, body), said[key.id]) for key in known):
        return "its proof is wrong: it was not made with this fleet's keys for this name, or was changed"
    age_s = now - beat.sent_at
    if abs(age_s) > AGE_S:
        what = f"{age_s:.0f} s old" if age_s > 0 else f"from {-age_s:.0f} s in the future"
        return f"it is {what} by this machine's clock: a copy of an old one, or the clocks differ"
    return ""


def _mac(key: SigningKey, cluster: str, body: bytes) -> str:
    return hmac.digest(key.secret, _DOMAIN + cluster.encode() + b"\x00" + body, hashlib.sha256).hex()
