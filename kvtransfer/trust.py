"""Whom a consumer pulls from: a producer whose blocks did not come, again and again, is set aside for a while. Pure.

Two instances may each be well and the way between them not: a cable, a switch, a route, memory that one of them reads
badly. Such a pair hands nothing over, and waits for it every time. Set aside, its prompts are computed by the consumer
at once; the others' go on as ever. From time to time one pull tries whether it is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FAILURES: Final = 3
"""In a row: one is a cut connection, which NIXL makes anew; two happen to who restarts."""
ASIDE_S: Final = 5.0
"""At first; twice as long after each try that fails."""
ASIDE_S_MAX: Final = 300.0

BROKEN: Final = frozenset({"a read failed", "the slot could not be read", "a block is not what was held"})
"""Ends of a pull (`kvtransfer.pulls`, `kvtransfer.vllm_digests`) that the way between two instances is to blame for. A
hold that has ended meanwhile says nothing of it."""


@dataclass(slots=True)
class Record:
    """What became of the pulls from one life of a producer."""

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


class Trust:
    """Of one consumer, by the producers' engine ids."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}

    def met(self, engine: str) -> None:
        """It was introduced."""
        self._records.setdefault(engine, Record())

    def forgotten(self, engine: str) -> None:
        """It is gone."""
        self._records.pop(engine, None)

    def of(self, engine: str) -> Record:
        """What is known of it; of who was not introduced, nothing is."""
        return self._records.get(engine, Record())

    def may_pull(self, engine: str, now: float) -> bool:
        """Whether to pull from it. Asking changes nothing. While this is false routers had better send nothing for
        which that pull would be needed; after a pause they may, and one request is the try.
        """
        record = self.of(engine)
        return not record.aside or now >= record.until

    def began(self, engine: str, now: float) -> None:
        """A pull from it begins. From one that was set aside it is the try, the only one for as long again."""
        record = self.of(engine)
        if record.aside:
            record.trying, record.until = True, now + record.aside_s

    def ended(self, engine: str, because: str, now: float) -> None:
        """A pull from it has ended: well (empty), or not, and why."""
        record = self.of(engine)
        if not because:
            record.pulled += 1
            record.in_a_row, record.aside_s, record.trying = 0, 0.0, False
        elif because in BROKEN:
            record.failed += 1
            record.in_a_row += 1
            if record.trying or (record.in_a_row >= FAILURES and not record.aside):
                record.aside_s = min(ASIDE_S_MAX, 2 * record.aside_s or ASIDE_S)
                record.until, record.trying = now + record.aside_s, False
