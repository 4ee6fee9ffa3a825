"""Signs the legs and releases that the router sends to guarded engines, a ticket for each. A shell: it reads the clock.

A ticket is valid for one instance, once, for a minute, and for exactly the transfer fields it travels with. Without
keys, legs go without tickets, as to engines without a guard.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from cluster import wire
from cluster.ids import InstanceId, TransferId, engine_of
from kvtransfer.keys import instance_key
from kvtransfer.screen import LIFE_S
from kvtransfer.ticket import SigningKey, Ticket, sign

_UNIX_TIME: Final = time.time  # noqa: TID251 - router and engine share this clock alone
_NONCE_BITS: Final = 62


class Tickets:
    """The signing side of one router."""

    def __init__(
        self, keys: Callable[[], tuple[SigningKey, ...]] | None, clock: Callable[[], float] = _UNIX_TIME
    ) -> None:
        """`keys` returns the fleet's current keys, the first one signs; None: no tickets. `clock`: Unix seconds."""
        self._keys = keys
        self._clock = clock
        self._instance_keys: dict[InstanceId, SigningKey] = {}
        self._made_from: SigningKey | None = None

    @property
    def signs(self) -> bool:
        """Whether there are keys."""
        return self._keys is not None

    def stamp(
        self, body: Mapping[str, Any], to: InstanceId, transfer: TransferId, *, producer: InstanceId
    ) -> Mapping[str, Any]:
        """The leg `body` with a ticket for `to`; unchanged if it has no transfer fields, or if there are no keys.

        `producer` is the instance whose blocks the leg pulls or releases; for a leg that makes a hold, `to` itself.
        """
        if self._keys is None:
            return body
        key = self._key_of(to, self._keys()[0])

        def ticket(digest: str) -> str:
            made = Ticket(
                id=transfer,
                tenant="",
                producer=producer,
                host="",
                port=0,
                consumer=engine_of(to),  # the guard is the engine's, for all of its ranks
                groups=(),
                tokens=0,
                expires_ms=int((self._clock() + LIFE_S) * 1000),
                nonce=secrets.randbits(_NONCE_BITS),
                fields=digest,
            )
            return sign(made, key)

        return wire.ticketed(body, ticket)

    def _key_of(self, instance: InstanceId, fleet: SigningKey) -> SigningKey:
        if fleet != self._made_from:
            self._instance_keys.clear()
            self._made_from = fleet
        key = self._instance_keys.get(instance)
        if key is None:
            key = self._instance_keys[instance] = instance_key(fleet, instance)
        return key
