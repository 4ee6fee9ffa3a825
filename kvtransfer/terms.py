"""The numbers a ledger lives by, and what it says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvtransfer.table import Side, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Leases, limits and intervals. Both sides of a fleet should have the same ones; nothing is unsafe if not."""

    lease_s: float = 30.0
    """A filled hold lives so long unless somebody says that it is still wanted. vLLM's own lease: operators know it."""
    extend_s: float = 20.0
    """A claim, an ask or a heartbeat lets a hold live at least so much longer. vLLM's own extension."""
    hold_s_max: float = 300.0
    """No hold lives longer, whatever its consumer says: a consumer that is stuck must not starve a producer."""
    fill_s_max: float = 600.0
    """A prompt that is not computed by then never will be: the longest at the slowest rate take minutes."""
    heartbeat_s: float = 5.0
    """How often a consumer says that it still wants a hold: four may be lost within one extension."""
    wait_s_max: float = 120.0
    """A reservation without blocks gives up after this; the router's own deadline mostly ends it earlier."""
    read_s_max: float = 30.0
    """A read takes milliseconds; one that takes longer than this hangs, and its request is recomputed meanwhile."""
    ask_again_s: float = 0.25
    """An unanswered question is repeated this often. A busy producer answers between two of its steps."""
    confirm_s_max: float = 5.0
    """A producer that has not confirmed by then is not going to: recomputing costs about as much as waiting on."""
    reserve_s_max: float = 120.0
    """A pushed reservation that is not written by then is given up. As long as a pull may wait."""
    cut_s: float = 10.0
    """How long an unwanted transfer may stay under way before the link is cut, and how often that is asked for."""
    remember_s: float = 180.0
    """How long a producer knows that a transfer is over and its id is used up: longer than a pull can live."""
    entries_max: int = 4096
    """Holds and reservations together. When full, new ones are refused and their requests computed in one place."""
    remembered_max: int = 262_144
    """Ended transfers, and spent tickets, a producer can remember: 1,400 a second. When full, it refuses new ones."""
    peers_max: int = 4096
    """Peers whose epoch is known, the longest unseen forgotten first. It spares reads that would only be refused."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be positive")
        if self.hold_s_max < self.lease_s:
            raise ValueError("hold_s_max must be at least lease_s, or no lease ever runs its length")
        if self.extend_s < 2 * self.heartbeat_s:
            raise ValueError("extend_s must cover two heartbeat_s, or one lost message ends a hold in use")
        if self.remember_s < self.wait_s_max + self.read_s_max + self.confirm_s_max:
            raise ValueError("remember_s must cover the life of a pull: wait_s_max + read_s_max + confirm_s_max")

    def limit_s(self, side: Side, state: State) -> float | None:
        """How long an entry may stay in a state; None: as long as was left to it when it entered."""
        name = _LIMITS.get((side, state))
        return getattr(self, name) if name else None

    def interval_s(self, side: Side, state: State) -> float | None:
        """How often a state repeats itself; None: it does not."""
        name = _INTERVALS.get((side, state))
        return getattr(self, name) if name else None


_LIMITS = {
    (Side.PRODUCER, State.FILLING): "fill_s_max",  # a filled hold's end is its lease, set by the rows of the table
    (Side.PRODUCER, State.DRAINING): "cut_s",
    (Side.CONSUMER, State.WAITING): "wait_s_max",
    (Side.CONSUMER, State.ALLOCATED): "read_s_max",  # and goes on in PULLING
    (Side.CONSUMER, State.LANDED): "confirm_s_max",
    (Side.CONSUMER, State.CANCELLING): "cut_s",
    (Side.CONSUMER, State.RESERVED): "reserve_s_max",  # and goes on in WRITING
    (Side.CONSUMER, State.QUARANTINED): "cut_s",
}

_INTERVALS = {
    (Side.CONSUMER, State.WAITING): "heartbeat_s",
    (Side.CONSUMER, State.ALLOCATED): "heartbeat_s",
    (Side.CONSUMER, State.PULLING): "heartbeat_s",
    (Side.CONSUMER, State.LANDED): "ask_again_s",
    (Side.CONSUMER, State.RESERVED): "heartbeat_s",
    (Side.CONSUMER, State.QUARANTINED): "ask_again_s",
}

OVERDUE_S = 1.0
"""An entry that outlives its limit by more than this is a leak: nothing outlives its deadline by more than a second."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """A ledger at one moment. `leaked` must read zero, always."""

    states: Mapping[Side, Mapping[State, int]]
    """Live entries."""
    blocks: int
    """Blocks that the ledger owns."""
    leaked: int
    """Entries past their limit or their lease, and entries whose link was asked to be cut and never was."""
    counts: Mapping[str, int]
    """What was done since the start: entries by side and end, blocks freed and used, reads and writes ordered."""
    ignored: Mapping[str, int]
    """What changed nothing since the start, by why: late, stale, unknown, repeated, not theirs to say."""

    @property
    def idle(self) -> bool:
        """Nothing is held or reserved: a drained instance may go."""
        return not any(count for states in self.states.values() for count in states.values())
