"""The twin's holds: `kvtransfer.ledger` on a clock of whole nanoseconds.

All rules (leases, who may release, what comes late) are the ledger's. This file turns times, and sorts the ledger's
effects into what the engine does with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.ids import TransferId
from engine.twin.events import FromPeer, Hold, Tell
from kvtransfer import events as said
from kvtransfer.ledger import Ledger
from kvtransfer.table import Side
from kvtransfer.terms import Terms

NS = 1_000_000_000


@dataclass(slots=True)
class Outcome:
    """What the ledger wants done."""

    freed: list[tuple[int, ...]] = field(default_factory=list)
    tell: list[Tell] = field(default_factory=list)
    offered: Hold | None = None


class Holds:
    """The holds of one life of an engine."""

    def __init__(self, epoch: int, lease_s: float) -> None:
        self._ledger = Ledger(epoch, Terms(lease_s=lease_s, hold_s_max=max(300.0, lease_s)))
        self._wakeup_ns: int | None = None

    def next_wakeup(self) -> int | None:
        """When the next lease or limit ends."""
        return self._wakeup_ns

    def expect(self, transfer: TransferId, tenant: str, now_ns: int) -> bool:
        """A request with a hold has come. False: the ledger takes none under this id."""
        effects = self._ledger.handle(said.OpenHold(transfer, tenant), now_ns / NS)
        self._look()
        assert not _sorted(effects, now_ns).freed, "what was due is ticked before a request comes"
        return not any(isinstance(effect, said.Refused) for effect in effects)

    def filled(self, transfer: TransferId, blocks: tuple[int, ...], tokens: int, now_ns: int) -> Outcome:
        """The prompt is computed; the blocks are the ledger's until it frees them."""
        return self._tell(said.Filled(transfer, blocks, tokens), now_ns)

    def abort(self, transfer: TransferId, now_ns: int) -> Outcome:
        """The request will not fill its hold."""
        return self._tell(said.Abort(transfer, "aborted"), now_ns)

    def heard(self, event: FromPeer, now_ns: int) -> Outcome:
        """A peer has spoken."""
        return self._tell(event.event, now_ns)

    def tick(self, now_ns: int) -> Outcome:
        """A lease or a limit has ended."""
        return self._tell(said.Tick(), now_ns)

    def _tell(self, event: said.Event, now_ns: int) -> Outcome:
        effects = self._ledger.handle(event, now_ns / NS)
        self._look()
        return _sorted(effects, now_ns)

    def _look(self) -> None:
        """The first nanosecond at which the ledger's clock, which counts in floating seconds, has come so far."""
        due_s = self._ledger.next_wakeup()
        if due_s is None or math.isinf(due_s):
            self._wakeup_ns = None if due_s is None else 0
            return
        wakeup = math.floor(due_s * NS)
        while wakeup / NS < due_s:
            wakeup += 1
        self._wakeup_ns = wakeup


def _sorted(effects: Iterable[said.Effect], now_ns: int) -> Outcome:
    outcome = Outcome()
    for effect in effects:
        match effect:
            case said.FreeBlocks(side=Side.PRODUCER, blocks=blocks):
                outcome.freed.append(blocks)
            case said.Send(to=to, message=message):
                outcome.tell.append(Tell(now_ns, to, message))
            case said.Offer(id=id_, blocks=blocks, tokens=tokens):
                outcome.offered = Hold(id_, blocks, tokens)
            case _:
                pass  # reports are for logs; writes and link cuts belong to push, which the twin has not
    return outcome
