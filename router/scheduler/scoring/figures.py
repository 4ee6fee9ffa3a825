"""The figures of one request, before any place is considered. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Final

from router.core.arrays import Floats
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.answer_lengths import LENGTHS_UNKNOWN, MIDDLE, OUTPUT_UNKNOWN
from router.predict.inflight_load import SPREAD
from router.predict.prefix_cache import Match

LOOSE: Final = 5.0

_ONE_BY_ONE: Final = 64
"""More rows are read by a column."""


class Saturation(ABC):
    """Saturation: where one more request has room without breaking a promise (`router.scheduler.flow_control`)."""

    @property
    @abstractmethod
    def queue(self) -> int:
        """The number of requests that wait for places."""

    @abstractmethod
    def queue_ms(self, servers: int) -> float:
        """The time until the requests that wait for places now have them, with `servers` instances."""

    @abstractmethod
    def opens_until_ms(self, wanted: Wanted) -> float:
        """A prompt would be computed at once, or nearly so, at rows where the load in flight opens no later
        than this.
        """

    @abstractmethod
    def lanes(self, wanted: Wanted, servers: int, prefills: int) -> list[int] | None:
        """The only rows that may take a late prompt; None: all rows may. `servers`, `prefills`: instances in all, and
        those that are ready to compute its prompt.
        """


class Figures:
    """The figures of one request, in one fleet, at the current turn."""

    def __init__(self, fleet: FleetSnapshot, wanted: Wanted, saturation: Saturation | None) -> None:
        self.fleet: Final = fleet
        self.saturation: Final = saturation
        self.wanted: Final = wanted
        self.turn: Final = fleet.inflight.turn
        self.tokens: Final = max(1, wanted.prompt_tokens)
        self.output: Final[float] = wanted.output_tokens or OUTPUT_UNKNOWN
        self.lengths: Final = wanted.output_lengths or LENGTHS_UNKNOWN
        self.middle: Final[float] = max(2.0, self.lengths[MIDDLE])
        """The tokens of a median answer, over which a pause is spread."""
        self.ttft_ms: Final[float] = 0.0 if wanted.late else wanted.ttft_ms
        self.tpot_ms: Final[float] = wanted.tpot_ms
        self.promised: Final = bool(wanted.ttft_ms or wanted.tpot_ms)
        self.waited_ms: Final[float] = max(0.0, wanted.now - wanted.arrived) * 1000.0 if wanted.arrived else 0.0
        self.context: Final[float] = self.tokens + self.output / 2
        self.tpot_unit: Final[float] = wanted.tpot_ms or LOOSE * self._step_alone_ms()
        self.ttft_unit: float = wanted.ttft_ms
        """Milliseconds that count as the whole budget of the first token."""
        self.match: Final[Match | None] = (
            fleet.prefixes.match(wanted.prefix) if fleet.prefixes is not None and wanted.prefix else None
        )

    def _step_alone_ms(self) -> float:
        """The step of the fastest instance, as its legs have shown it, with nothing but this answer."""
        found, step_model = self.fleet.ready_for(self.wanted), self.fleet.inflight.step_model
        rows = found.decodes if len(found.decodes) else found.any
        if not len(rows):
            makes = step_model.present()
            return min([make.decode.requests_ms(1) + make.decode.context_ms * self.context for make in makes])
        if len(rows) > _ONE_BY_ONE:
            alone: Floats = step_model.column("context")[rows] * self.context
            alone += step_model.column("request")[rows]
            alone += step_model.column("floor")[rows]
            return float(alone.min())
        among: list[int] = rows.tolist()
        speeds = [step_model.rows[row] for row in among]
        return min([speed.context * self.context + speed.request + speed.floor for speed in speeds])

    def tpot_limit_ms(self) -> float:
        """Up to which its predicted time per token has room; infinite where it has no target. At instances where it
        would miss its target alone (`hopeless_ms`) nothing is gained by waiting: there it has no limit.
        """
        return self.fleet.inflight.margins.limit_ms(self.tpot_ms or math.inf)

    @property
    def hopeless_ms(self) -> float:
        """A target that a step with its answer alone exceeds is missed in any case; infinite for a class that refuses:
        what it lets in is to be kept.
        """
        return math.inf if self.wanted.sheds or not self.tpot_ms else self.tpot_ms

    def held(self, chunks: int) -> int:
        """The prompt's tokens in `chunks` chunks. Its last token is always computed."""
        return min(int(chunks * self.wanted.prefix_block_tokens), self.tokens - 1)

    def cached_at(self, row: int) -> int:
        """The prompt's tokens that this instance is predicted to have cached."""
        return 0 if self.match is None else self.held(self.match.chunks_of(row))

    def own_tokens(self) -> float:
        """The memory for its prompt and answer, in tokens, with `SPREAD` of margin."""
        return self.wanted.prompt_tokens + self.output + SPREAD * math.sqrt(self.wanted.output_variance)
