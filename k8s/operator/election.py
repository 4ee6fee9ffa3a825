"""Which operator acts: the holder of a Lease, by resourceVersion. `Candidate` has the rules, `Election` the requests.

The rules are those of client-go's leader election: a candidate may take a Lease over when it has not *seen* it change
for the lease's duration on its own clock, so that clocks of two machines are never compared. Every write carries the
resourceVersion that was read: of two writers one gets 409. A holder that could not renew for `RENEW_S` stops acting
before another candidate may begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from k8s.operator.client import ApiAway, ApiClient, ApiFailed

logger = logging.getLogger("baton.operator")

LEASE_S: Final = 15
"""Seconds without a change after which another candidate may take the Lease."""
RENEW_S: Final = 10.0
"""Seconds after its last renewal for which a holder may act."""
RETRY_S: Final = 2.0
"""Seconds between two tries to take or renew the Lease."""
API: Final = "coordination.k8s.io/v1"


@dataclass(slots=True)
class Candidate:
    """One candidate's view of the Lease. Times are of one monotonic clock, s."""

    me: str
    seen: tuple[str, str] = ("", "")
    """Holder and renewal time of the Lease when it last changed."""
    seen_at: float = 0.0
    """When that change was seen."""
    renewed_at: float | None = None
    """When this candidate renewed the Lease last; None: it does not hold it."""

    def look(self, lease: Mapping[str, Any] | None, now: float) -> bool:
        """Whether to write the Lease now, with this candidate as its holder."""
        if lease is None:
            return True
        spec = lease.get("spec") or {}
        state = (str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or ""))
        if state != self.seen:
            self.seen, self.seen_at = state, now
        holder = state[0]
        return holder in {"", self.me} or now - self.seen_at >= float(spec.get("leaseDurationSeconds") or LEASE_S)

    def holds(self, now: float) -> bool:
        """Whether it may act."""
        return self.renewed_at is not None and now - self.renewed_at < RENEW_S


class Election:
    """Takes and keeps one Lease."""

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        name: str,
        me: str,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """`clock` is monotonic; `wall` Unix time, for people who read the Lease."""
        self.candidate: Final = Candidate(me)
        self.leading = asyncio.Event()
        self._client: Final = client
        self._where: Final = (namespace, name)
        self._clock: Final = clock
        self._wall: Final = wall

    def holds(self) -> bool:
        """Whether this process may act now."""
        return self.candidate.holds(self._clock())

    async def run(self) -> None:
        """Take and renew the Lease until cancelled; then release it, so that another candidate need not wait."""
        try:
            while True:
                try:
                    await self._once()
                except ApiFailed as refusal:
                    if refusal.status != 409:
                        logger.warning("the Lease cannot be written: %s", refusal)
                except ApiAway as loss:
                    logger.info("the Lease cannot be renewed: %s", loss)
                self.leading.set() if self.holds() else self.leading.clear()
                await asyncio.sleep(RETRY_S)
        finally:
            self.leading.clear()
            await asyncio.shield(self._release())

    async def _once(self) -> None:
        namespace, name = self._where
        began = self._clock()
        lease = await self._client.get(API, "Lease", namespace, name)
        # Seen when the answer came, which may take as long as a lease; renewed when the request began, to be safe.
        if not self.candidate.look(lease, self._clock()):
            self.candidate.renewed_at = None
            return
        mine = self._lease(lease)
        await (self._client.create(mine) if lease is None else self._client.replace(mine))
        self.candidate.renewed_at = began
        self.candidate.seen = ("", "")

    def _lease(self, lease: Mapping[str, Any] | None) -> dict[str, Any]:
        namespace, name = self._where
        stamp = datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = (lease or {}).get("spec") or {}
        kept = before.get("holderIdentity") == self.candidate.me
        spec = {
            "holderIdentity": self.candidate.me,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": stamp,
            "acquireTime": before.get("acquireTime", stamp) if kept else stamp,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (0 if kept or lease is None else 1),
        }
        metadata = {"namespace": namespace, "name": name}
        if lease is not None:
            metadata["resourceVersion"] = lease["metadata"]["resourceVersion"]
        return {"apiVersion": API, "kind": "Lease", "metadata": metadata, "spec": spec}

    async def _release(self) -> None:
        """Release the Lease: its holder is empty and its duration 1 s."""
        if self.candidate.renewed_at is None:
            return
        self.candidate.renewed_at = None
        try:
            lease = await self._client.get(API, "Lease", *self._where)
            if lease is not None and lease.get("spec", {}).get("holderIdentity") == self.candidate.me:
                mine = self._lease(lease)
                mine["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await self._client.replace(mine)
        except (ApiFailed, ApiAway) as error:
            logger.info("the Lease was not given away: %s", error)
