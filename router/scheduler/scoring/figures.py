"""What one request comes to in numbers, before any place is looked at. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.answer_lengths import LENGTHS_UNKNOWN, MIDDLE, OUTPUT_UNKNOWN
from router.predict.inflight_load import SPREAD
from router.predict.prefix_cache import Match

LOOSE: Final = 5.0


class Saturation(ABC):
    """Where one more has room without breaking a promise (`router.scheduler.flow_control`)."""

    @property
    @abstractmethod
    def queue(self) -> int:
        """How many wait for places."""

    @abstractmethod
    def queue_ms(self, servers: int) -> float:
        """Until those who wait for places now have them, at so many instances."""

    @abstractmethod
    def opens_until_ms(self, wanted: Wanted) -> float:
        """A prompt would be computed at once, or nearly so, where the load in flight opens no later than this."""

    @abstractmethod
    def lanes(self, wanted: Wanted, servers: int) -> list[int] | None:
        """Rows where alone a late prompt may go; None: anywhere."""


class Figures:
    """Of one request, at one fleet, as it is in this turn."""

    def __init__(self, fleet: FleetSnapshot, wanted: Wanted, saturation: Saturation | None) -> None:
        self.fleet: Final = fleet
        self.saturation: Final = saturation
        self.wanted: Final = wanted
        self.turn: Final = fleet.inflight.turn
        self.tokens: Final = max(1, wanted.prompt_tokens)
        self.output: Final[float] = wanted.output_tokens or OUTPUT_UNKNOWN
        self.lengths: Final = wanted.output_lengths or LENGTHS_UNKNOWN
        self.middle: Final[float] = max(2.0, self.lengths[MIDDLE])
        """Tokens that a pause is spread over, in an answer in the middle."""
        self.ttft_ms: Final[float] = 0.0 if wanted.late else wanted.ttft_ms
        self.tpot_ms: Final[float] = wanted.tpot_ms
        self.promised: Final = bool(wanted.ttft_ms or wanted.tpot_ms)
        self.waited_ms: Final[float] = max(0.0, wanted.now - wanted.arrived) * 1000.0 if wanted.arrived else 0.0
        self.context: Final[float] = self.tokens + self.output / 2
        self.tpot_unit: Final[float] = wanted.tpot_ms or LOOSE * self._step_alone_ms()
        self.ttft_unit: float = wanted.ttft_ms
        """Milliseconds that count as a whole budget of its first token."""
        self.match: Final[Match | None] = (
            fleet.prefixes.match(wanted.prefix) if fleet.prefixes is not None and wanted.prefix else None
        )

    def _step_alone_ms(self) -> float:
        """An idle instance's step with nothing but this answer, on the fastest make there is."""
        makes = self.fleet.inflight.step_model.present()
        return min(make.decode.requests_ms(1) + make.decode.context_ms * self.context for make in makes)

    def tpot_limit_ms(self) -> float:
        """Up to which its predicted time per token has room; infinite where it has no target."""
        return self.fleet.inflight.margins.limit_ms(self.tpot_ms or math.inf)

    def held(self, chunks: int) -> int:
        """Tokens of it in so many chunks. Its last token is always computed."""
        return min(int(chunks * self.wanted.prefix_block_tokens), self.tokens - 1)

    def cached_at(self, row: int) -> int:
        """Tokens of it that this instance is taken to have."""
        return 0 if self.match is None else self.held(self.match.chunks_of(row))

    def own_tokens(self) -> float:
        """Of memory, for its prompt and answer, with `SPREAD` of room."""
        return self.wanted.prompt_tokens + self.output + SPREAD * math.sqrt(self.wanted.output_variance)
