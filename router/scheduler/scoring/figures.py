"""The figures of one request: before any place is considered, and what it takes at each row. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

from router.core.arrays import Floats, Ints
from router.core.events import PrefixSource
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.predict.answer_lengths import LENGTHS_UNKNOWN, MIDDLE, OUTPUT_UNKNOWN
from router.predict.inflight_load import IDLE_MIN, SPREAD
from router.predict.margins import Margins
from router.predict.prefix_cache import Match
from router.predict.prefix_uses import WITHIN_S
from router.predict.shared_beginnings import beginnings, lengths_within
from router.predict.step_model import UNKNOWN
from router.scheduler.scoring.budget import MISS

LOOSE: Final = 5.0
"""Without a target, so many times an idle instance's latency counts as the budget."""

_ONE_BY_ONE: Final = 64
"""Up to this number of rows, each is read by itself; more are read as a column."""

PULL_MS, PULL_STEPS = 3.0, 3.0
"""A pause for blocks from elsewhere, besides their bytes: milliseconds for the front end and the messages, and three
steps of the pulling engine. These are the step under way when the leg comes, the one after which the blocks are there
(steps are decided ahead), and the one that makes the seeded token once more. (Seen on the twin: 24.7 ms where a step
takes 7.2.)"""

CLEAR, LEAST_MS = 0.3, 10.0
"""A prompt's beginning is pulled from a peer if that saves this share of its time, and so many milliseconds: a failed
pull costs its time, and no model knows all that two more messages cost. Chosen, not measured."""

SOURCE_S_MIN, SOURCE_S_MAX = 0.05, 2.0
"""Bounds of the wait for a source. Between them it is the time that the prompt takes without one: a source that does
not answer at most doubles it."""


COPY_MS_MAX: Final = 1000.0 * WITHIN_S
"""A copy that takes longer is not charged to others: the uses that were counted are over by then."""


ONE_STEP_TOKENS: Final = 600
"""Prompts of so many tokens together are computed in one step or two, which take little longer than for one of them: a
step reads all weights, and the contexts of the answers there, in any case (`costs.step.KNEE_TOKENS`). So such a
prompt has room beside the others, and leaves hardly any order to decide on. 600 and 1,024 were tried (docs/policy.md).
Not for engines of unknown costs: for some each token counts (a CPU). Nor for instances that only decode: there the
price of the answers' wait is too low for so many (0.3 points of 100 less, tests/sim/test_prompts_beside_answers.py).
Nor for classes that refuse: predicted times are of one step after the other, so they would refuse what now waits."""


def step_room(fleet: FleetSnapshot, row: int) -> float:
    """The most tokens of a prompt that one step of this row computes together with the prompts that wait there; 0: the
    rule is not for this row (`ONE_STEP_TOKENS`).
    """
    inflight = fleet.inflight
    if inflight.step_model.rows[row].make is UNKNOWN or not fleet.columns.prefills.item(row):
        return 0.0
    return ONE_STEP_TOKENS - inflight.rows[row].uncomputed


def step_rooms(fleet: FleetSnapshot) -> Floats:
    """`step_room` of every row."""
    inflight = fleet.inflight
    room: Floats = ONE_STEP_TOKENS - inflight.column("uncomputed")
    room *= inflight.step_model.column("kind") > 0
    room *= fleet.columns.prefills[: len(room)]
    return room


def any_step_room(fleet: FleetSnapshot, rows: Ints) -> bool:
    """Whether one of these rows has room for a short prompt (`step_room`)."""
    if len(rows) > _ONE_BY_ONE:
        return bool((step_rooms(fleet)[rows] > 0.0).any())
    return any(step_room(fleet, row) > 0.0 for row in rows.tolist())


class Saturation(ABC):
    """Saturation: where one more request has room without breaking a promise (`router.scheduler.flow_control`)."""

    @property
    @abstractmethod
    def queue(self) -> int:
        """The number of requests that wait for places."""

    @abstractmethod
    def queue_ms(self, wanted: Wanted, fleet: FleetSnapshot) -> float:
        """The time, in ms, until the requests that wait for the same instances as this one now have places."""

    @abstractmethod
    def opens_until_ms(self, wanted: Wanted) -> float:
        """The time in ms up to which a row may open (`RowLoad.opens`) so that the prompt would be computed there at
        once, or nearly so.
        """

    @abstractmethod
    def lanes(self, wanted: Wanted, fleet: FleetSnapshot) -> list[int] | None:
        """The only rows that may take a late prompt; None: all rows may."""


ILL: Final = 4.0
"""An A100 takes 2.3 to 3.0 times as long for a prompt as an H100 (256 to 16,384 tokens, shipped costs of an 8B model).
More than four times as long is taken to be an engine that is not well. Chosen; no other value was tried."""
UNLIKE: Final = 1.5
"""Two instances are taken to be alike if their times for a prompt differ by less: learned times of equal instances
differ as well. Chosen; no other value was tried."""


class Figures:
    """The figures of one request, in one fleet, at the current turn. It has many attributes: each figure is read once,
    and used for each row's price.
    """

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
        self.answers: Final = wanted.answers
        self.context: Final[float] = self.tokens + self.answers * self.output / 2
        """The mean number of tokens that a step reads for its answers; several answers read their prompt once."""
        self.tpot_unit: Final[float] = wanted.tpot_ms or LOOSE * self._step_alone_ms()
        self.ttft_unit: float = wanted.ttft_ms
        """Milliseconds that count as the whole budget of the first token."""
        self.match: Final[Match | None] = (
            fleet.prefixes.match(wanted.prefix) if fleet.prefixes is not None and wanted.prefix else None
        )
        self.shared: Final[list[tuple[int, float]]] = (
            fleet.prefix_uses.shared(wanted.prefix, self.match, wanted.now, wanted.routers)
            if self.match is not None
            else []
        )
        """Beginnings of the prompt that are worth one more copy (`PrefixUses.shared`)."""
        self._beginnings: tuple[int, ...] | None = None

    def _step_alone_ms(self) -> float:
        """The time of a step with its answers alone on the fastest instance, in ms; speeds are as learned."""
        found, step_model = self.fleet.ready_for(self.wanted), self.fleet.inflight.step_model
        rows = found.decodes if len(found.decodes) else found.any
        if not len(rows):
            makes = step_model.present()
            each = self.answers
            return min([make.decode.requests_ms(each) + make.decode.context_ms * self.context for make in makes])
        if len(rows) > _ONE_BY_ONE:
            alone: Floats = step_model.column("context")[rows] * self.context
            alone += step_model.column("request")[rows] * self.answers
            alone += step_model.column("floor")[rows]
            return float(alone.min())
        among: list[int] = rows.tolist()
        speeds = [step_model.rows[row] for row in among]
        return min([speed.context * self.context + speed.request * self.answers + speed.floor for speed in speeds])

    def tpot_limit_ms(self) -> float:
        """The predicted TPOT, in ms, up to which the answer has room; infinite without a target. Callers set no limit
        at instances where the answer alone would certainly miss its target (`hopeless_ms`, `Speed.floor_least`):
        waiting would gain nothing there.
        """
        return self.margins.limit_ms(self.tpot_ms or math.inf)

    @property
    def margins(self) -> Margins:
        """The margins of its class's TPOT targets."""
        return self.fleet.inflight.margins.of_class(sheds=self.wanted.sheds)

    @property
    def hopeless_ms(self) -> float:
        """The target, in ms: where a step with the answer alone takes longer, it is missed in any case. Infinite
        without a target, and for a class that refuses: what that class lets in is to be kept.
        """
        return math.inf if self.wanted.sheds or not self.tpot_ms else self.tpot_ms

    def delay_price(self) -> float:
        """The cost of each millisecond of an instance's work for the requests that wait in the router: those that wait
        for this instance begin later, and some miss their target for it (`Wanted.urgency`). In an overload this is what
        counts: at a queue that lasts, it comes to `MISS` for each request that the work displaces. A class that bounds
        what prompts of one length may lose (`lengths_within`) pays nothing: the price falls on long prompts. What an
        answer adds to prompts beside it is not charged: it lost on long contexts (docs/policy.md).
        """
        if not self.wanted.urgency or self.wanted.lengths_within < 1.0:
            return 0.0
        found = self.fleet.ready_for(self.wanted)
        return MISS * self.wanted.urgency / max(1, len(found.prefills) or len(found.any))

    def answers_dearer(self) -> float:
        """How much dearer a millisecond is to requests that wait where answers are made as well: as much as the slowest
        instance that only computes prompts is slower than the quickest. Otherwise a quick instance that decodes would
        come before a slow one that has nothing else to do.
        """
        step_model, able = self.fleet.inflight.step_model, self.fleet.ready_for(self.wanted).any
        rows = able[~self.fleet.columns.decodes[able]]
        if len(rows) > _ONE_BY_ONE:
            whole: Floats = step_model.column("prefill_factor") * step_model.of_prompt(self.tokens)[0]
            return slowest_over_quickest(whole[rows].tolist())
        by_kind, among = step_model.of_prompt_by_make(self.tokens), rows.tolist()
        speeds = [step_model.rows[row] for row in among]
        return slowest_over_quickest([speed.prefill_factor * by_kind[speed.kind][0] for speed in speeds])

    def held(self, chunks: int) -> int:
        """The prompt's tokens in `chunks` chunks. Its last token is always computed."""
        return min(int(chunks * self.wanted.prefix_block_tokens), self.tokens - 1)

    def cached_at(self, row: int) -> int:
        """The prompt's tokens that this instance is predicted to have cached."""
        return 0 if self.match is None else self.held(self.match.chunks_of(row))

    def in_cache_at(self, row: int) -> int:
        """Those in its KV cache: a pull leaves what lower tiers have unused."""
        return 0 if self.match is None else self.held(self._chunks_in_cache(row))

    def _chunks_in_cache(self, row: int) -> int:
        if self.match is None:
            return 0
        chunks, prefixes = self.match.chunks_of(row), self.fleet.prefixes
        if chunks and prefixes is not None:
            chunks = prefixes.in_cache(row, self.wanted.prefix, chunks)
        return chunks

    @property
    def beginnings(self) -> tuple[int, ...]:
        """The names of its prompt's beginnings that answers may share (`router.predict.shared_beginnings`)."""
        if self._beginnings is None:
            self._beginnings = beginnings(self.wanted.prefix)
        return self._beginnings

    def beginnings_in_cache(self, row: int) -> int:
        """How many of them this instance's KV cache is predicted to have."""
        return lengths_within(self._chunks_in_cache(row))

    def fits_shared(self, row: int, own: float) -> bool:
        """Whether there is memory for it where it shares its beginning with answers that are there. `own`: tokens."""
        load, tokens = self.fleet.inflight.rows[row], self.wanted.prompt_tokens
        if self.match is None or load.kv_free + tokens < own:
            return False
        each, cached = self.wanted.prefix_block_tokens, self.beginnings_in_cache(row)
        return load.kv_free + load.shared.among(self.beginnings, cached, each, tokens) >= own

    def goes_beyond(self, row: int) -> bool:
        """Whether it may go there although there is no memory for it (`Wanted.beyond_memory`)."""
        full = self.wanted.beyond_memory
        return full is not None and row not in full

    def own_tokens(self) -> float:
        """The memory for its prompt and answers, in tokens, with `SPREAD` of margin. `InflightLoad.count` books the
        same once it is placed; a function for both would be four calls more on a request's path.
        """
        answers = self.answers
        margin = SPREAD * math.sqrt(answers * self.wanted.output_variance)
        return self.wanted.prompt_tokens + answers * self.output + margin


def slowest_over_quickest(whole_ms: Sequence[float]) -> float:
    """How many times longer the slowest of these instances takes for a prompt than the quickest; 1: they are alike, as
    far as is known. Those that take `ILL` times as long are left out: one that is slow for a while says nothing of the
    others.
    """
    least_ms = min(whole_ms, default=0.0)
    found = max([ms for ms in whole_ms if ms < ILL * least_ms]) / least_ms if least_ms > 0.0 else 1.0
    return found if found > UNLIKE else 1.0


class RowTimes:
    """What one request takes at some rows: milliseconds, and shares of a target. Lists are by position: in a small
    fleet that is the row, in a large one the order in which rows were added.
    """

    __slots__ = ("alone", "before", "copy", "longer", "more", "prompt", "sources", "stall", "ttft", "used")

    def __init__(self) -> None:
        self.prompt: Final[list[float]] = []
        """Its prompt: less what is cached there, and with what answers that decode there add."""
        self.copy: Final[list[float]] = []
        """The part of its prompt's time that other requests are charged for, as they use what it computes there; empty:
        none at any row."""
        self.stall: Final[list[float]] = []
        """How long answers there would wait for the prompt."""
        self.alone: Final[list[float]] = []
        """The time from its arrival to its first token, without other prompts."""
        self.ttft: Final[list[float]] = []
        """The time from its arrival to its first token, with all other prompts."""
        self.longer: Final[list[float]] = []
        """By how much its answer makes a step longer."""
        self.before: Final[list[float]] = []
        """The TPOT there without its answer, as a share of `tpot_unit`."""
        self.more: Final[list[float]] = []
        """What its answer adds to that."""
        self.used: Final[list[float]] = []
        """`before` and `more` together."""
        self.sources: dict[int, PrefixSource] | None = None
        """By row: the instance from which it would pull the prompt's beginning."""

    def add(
        self, of: Figures, rows: Sequence[int], opened: Sequence[bool], places: Mapping[int, int] | None = None
    ) -> None:
        """Time these rows as well.

        Args:
            of: the request's figures. If nothing is promised, this sets the unit of its first token.
            rows: no row twice.
            opened: by position, these rows included: whether the prompt would be computed at once, or nearly so.
            places: positions by row, in a large fleet.
        """
        self._add_prompts(of, rows, places)
        self._add_firsts(of, rows, opened)
        self._add_steps(of, rows)

    def _add_prompts(self, of: Figures, rows: Sequence[int], places: Mapping[int, int] | None) -> None:
        step_model, first = of.fleet.inflight.step_model, len(self.prompt)
        by_kind, speeds = step_model.of_prompt_by_make(of.tokens), step_model.rows
        prompt, stall, loads = self.prompt, self.stall, of.fleet.inflight.rows
        for row in rows:
            speed = speeds[row]
            ms, stall_ms, steps = by_kind[speed.kind]
            prompt.append(speed.prefill_factor * ms + loads[row].beside * steps)
            stall.append(speed.prefill_factor * stall_ms)
        if of.match is not None:
            mask = -1 if places is None else sum([1 << row for row in rows])
            for chunks, bits in of.match.levels:
                left = bits & mask
                cached = step_model.of_prompt_by_make(of.tokens, of.held(chunks)) if left else by_kind
                while left:
                    row = left.bit_length() - 1
                    left ^= 1 << row
                    place, speed = row if places is None else places[row], speeds[row]
                    ms, stall_ms, steps = cached[speed.kind]
                    prompt[place] = speed.prefill_factor * ms + loads[row].beside * steps
                    stall[place] = speed.prefill_factor * stall_ms
            if of.fleet.sharing and of.wanted.one_prompt:
                self._find_sources(of, rows, first)
            if of.shared:
                self._add_copies(of, rows, first)

    def _add_copies(self, of: Figures, rows: Sequence[int], first: int) -> None:
        """Charge each row's request for its share of a copy (`router.predict.prefix_uses`)."""
        step_model, match, loads = of.fleet.inflight.step_model, of.match, of.fleet.inflight.rows
        prefixes = of.fleet.prefixes
        assert match is not None and prefixes is not None
        shared = [
            (depth, 1.0 - 1.0 / uses, step_model.of_prompt_by_make(of.tokens, of.held(depth)))
            for depth, uses in of.shared
        ]
        for at, row in enumerate(rows, first):
            own, speed, worth = match.chunks_of(row), step_model.rows[row], 0.0
            for depth, others, cached in shared:
                if depth <= own:
                    break
                ms, _, steps = cached[speed.kind]
                saved = self.prompt[at] - speed.prefill_factor * ms - loads[row].beside * steps
                if saved <= COPY_MS_MAX and depth <= prefixes.room(row):
                    worth = max(worth, saved * others)
            self.copy.append(worth)

    def _find_sources(self, of: Figures, rows: Sequence[int], first: int) -> None:
        """Find the rows that would do better with the prompt's beginning from another instance, so that `CLEAR` of
        their time and `LEAST_MS` are saved. Of the instances that have more of it, those with the most are compared.
        """
        fleet, match, now = of.fleet, of.match, of.wanted.now
        assert match is not None
        sources = fleet.sources(match, of.wanted)
        if not sources:
            return
        if self.sources is None:
            self.sources = {}
        step_model, speeds = fleet.inflight.step_model, fleet.inflight.step_model.rows
        for at, row in enumerate(rows, first):
            own, own_ms = match.chunks_of(row), self.prompt[at]
            for chunks, source, loads in sources:
                if chunks <= own:
                    break
                cached = of.held(chunks)
                ms, stall_ms, steps = step_model.of_prompt_by_make(of.tokens, cached)[speeds[row].kind]
                ms = speeds[row].prefill_factor * ms + fleet.inflight.rows[row].beside * steps
                if ms > own_ms * (1.0 - CLEAR) or ms > own_ms - LEAST_MS or not fleet.shares(source, row, of.wanted):
                    continue
                leg_ms = _source_ms(fleet, source, now) + _load_ms(of, source, loads)
                pull_ms = _pull_ms(fleet, source, row, cached - of.held(own), now)
                ms += leg_ms + fleet.inflight.source_delay.ms(now) + pull_ms
                if ms <= own_ms * (1.0 - CLEAR) and ms <= own_ms - LEAST_MS:
                    self.prompt[at], self.stall[at] = ms, speeds[row].prefill_factor * stall_ms
                    wait_s = min(SOURCE_S_MAX, max(SOURCE_S_MIN, own_ms / 1000.0))
                    cold_s = (own_ms + speeds[row].lead + _before_ms(fleet, row, now)) / 1000.0
                    self.sources[row] = PrefixSource(fleet.at(source).id, cached, wait_s, leg_ms, cold_s)
                    break

    def _add_firsts(self, of: Figures, rows: Sequence[int], opened: Sequence[bool]) -> None:
        loads, speeds = of.fleet.inflight.rows, of.fleet.inflight.step_model.rows
        saturation, now_ms = of.saturation, of.wanted.now * 1000.0
        queue_ms = 0.0
        if saturation is not None and saturation.queue:  # elsewhere other requests wait, too
            queue_ms = saturation.queue_ms(of.wanted, of.fleet)
        waited_ms = of.waited_ms
        for row in rows:
            at = len(self.ttft)
            alone = self.prompt[at] + speeds[row].lead + waited_ms
            wait = abs(loads[row].ends - now_ms)  # `InflightLoad.waits_ms`
            ttft = (wait if wait < math.inf else 0.0) + alone
            if not opened[at]:
                ttft += queue_ms
            self.alone.append(alone)
            self.ttft.append(ttft)
        if not of.ttft_unit:  # in a large fleet the shortlist has set it
            able: list[int] = of.fleet.ready_for(of.wanted).any.tolist()
            of.ttft_unit = LOOSE * min([self.alone[row] for row in able], default=math.inf)

    def _add_steps(self, of: Figures, rows: Sequence[int]) -> None:
        inflight = of.fleet.inflight
        loads, speeds = inflight.rows, inflight.step_model.rows
        faded, per, context, answers = -inflight.faded(of.wanted.now), 1.0 / of.tpot_unit, of.context, of.answers
        for row in rows:
            load, speed = loads[row], speeds[row]
            per_ms = per / max(load.recent * faded + 1.0, IDLE_MIN)
            longer = speed.context * context + speed.request * answers
            more = longer * per_ms
            before = load.step * per_ms
            self.longer.append(longer)
            self.more.append(more)
            self.before.append(before)
            self.used.append(before + more)


def _before_ms(fleet: FleetSnapshot, row: int, now: float) -> float:
    """The time for the prompts that a row computes first (`InflightLoad.waits_ms`)."""
    wait = abs(fleet.inflight.rows[row].ends - now * 1000.0)
    return wait if wait < math.inf else 0.0


def _source_ms(fleet: FleetSnapshot, source: int, now: float) -> float:
    """The time until a source has answered: what it has to compute before, a message, the step under way if it
    decodes, and one for the leg.
    """
    there = fleet.inflight.rows[source]
    wait = max(0.0, there.ends - now * 1000.0)
    return wait + PULL_MS + there.step * (2 if there.decoding else 1)


def _load_ms(of: Figures, source: int, chunks: float) -> float:
    """The time for a source to load from its tiers what takes as long as to compute `chunks` of the prompt's chunks."""
    if not chunks:
        return 0.0
    step_model = of.fleet.inflight.step_model
    speed, tokens = step_model.rows[source], min(of.tokens, max(1, int(chunks * of.wanted.prefix_block_tokens)))
    return speed.prefill_factor * step_model.of_prompt_by_make(of.tokens)[speed.kind][0] * tokens / of.tokens


def _pull_ms(fleet: FleetSnapshot, source: int, row: int, tokens: int, now: float) -> float:
    """The time for a row to pull `tokens` tokens from a source that has answered: a message, the move, a step before
    and after it if the row decodes (an idle engine looks at once), and its front end, as late as the source's.
    """
    inflight = fleet.inflight
    here, near = inflight.rows[row], fleet.near(source, row)
    told_ms = inflight.step_model.handoff_ms(tokens, source, row, near=near)
    moving_ms = inflight.pulls(row).expects_ms(told_ms, now, near=near)
    return PULL_MS + moving_ms + (2 * here.step if here.decoding else 0.0) + inflight.source_delay.ms(now)
