"""Where a request's time went: two sums, each part by its own clock, and the rest. Pure.

A `RequestTimeline` is the router's own clock: the stage of a request and since when, without gaps. An engine's report
about its part of a leg (`EngineTimes`, from vLLM's per-request ``metrics``) replaces that part of the leg; the rest of
the leg is the *residual*: networks, the engine's HTTP server, and all other time that no clock measured. docs/timing.md
has the sums.

Invariants: the parts of a sum and its residual add up to its total; a part that was not measured is None, not 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from router.core.timing_parts import EngineTold, Sum, Timing, Totals


class Stage:
    """What a request is waiting for. Plain texts: an Enum's hash costs more than all else that is done with them."""

    ROUTER: Final = "router"
    """The router: parsing, choosing, building the legs."""
    CREDIT: Final = "credit"
    """A place on an instance, in the flow-control queue."""
    SOURCE: Final = "source"
    """The answer of another instance that may have the prompt's beginning: the leg that pulls it is sent afterwards."""
    PREFILL_LEG: Final = "prefill_leg"
    """P's answer."""
    DECODE_LEG: Final = "decode_leg"
    """D's first event; its whole answer where that is not streamed."""
    AGGREGATED_LEG: Final = "whole_leg"
    """The same for the one instance that serves an aggregated request."""
    RELAY: Final = "relay"
    """The router: an engine's output has arrived, and the client has not received it yet."""
    STEP: Final = "step"
    """D's second token."""
    RETRIES: Final = "retries"
    """Work that failed and was repeated."""
    REST: Final = "rest"
    """The answer's further tokens: in no sum."""


STAGES_MAX: Final = 64
"""The most stages of a shape. To be counted together with others, a request of n stages is read n times, and one that
waits gets two more stages whenever it asks for a place in vain."""

LEGS: Final = {
    Stage.PREFILL_LEG: ("queue_p", "prefill"),
    Stage.DECODE_LEG: ("handoff_queue_d", "step_d"),
    Stage.AGGREGATED_LEG: ("queue", "prefill"),
}
"""The legs, and the meaning of their engines' ``queue_time_ms`` and ``time_to_first_token_ms``.

vLLM 0.32 counts a request as queued until its first step is scheduled (v1/core/sched/scheduler.py), and a pull comes
before that: D's queue time is hand-over and queue in one. Time to first token is counted from that step on
(entrypoints/generate/base/serving.py), so the one follows the other.
"""

_NONE_YET: Final = {Stage.ROUTER: 0.0, Stage.CREDIT: 0.0, Stage.RETRIES: 0.0}

_LOST: Final = frozenset({*LEGS, Stage.SOURCE, Stage.RELAY, Stage.STEP, Stage.REST})
"""The stages charged to `RETRIES` when the request has to be sent again."""


class EngineTimes(NamedTuple):
    """One engine's report about one leg, in seconds of its own clock."""

    queue_s: float
    first_s: float
    """From its first step to its first token."""
    generation_s: float | None = None
    """From its first token to its last."""

    def after(self, ahead_s: float) -> EngineTimes:
        """The same without the first `ahead_s` seconds: an engine counts from a leg's arrival, which of an early leg
        belongs to another stage.
        """
        if ahead_s <= 0.0:
            return self
        queue_s = max(0.0, self.queue_s - ahead_s)
        return self._replace(
            queue_s=queue_s, first_s=min(self.first_s, max(0.0, self.queue_s + self.first_s - ahead_s))
        )


def engine_times(metrics: object) -> EngineTimes | None:
    """The times in the ``metrics`` of an answer (``--enable-per-request-metrics``); None if they are missing or
    incomplete.
    """
    if not isinstance(metrics, dict):
        return None
    queue_s, first_s = _seconds(metrics, "queue_time_ms"), _seconds(metrics, "time_to_first_token_ms")
    if queue_s is None or first_s is None:
        return None
    return EngineTimes(queue_s, first_s, _seconds(metrics, "generation_time_ms"))


def _seconds(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
        return None
    return value / 1000


_TOLD: Final = msgspec.json.Decoder(EngineTold)


def told_in(body: bytes) -> EngineTold | None:
    """The report in a whole answer; the rest of the answer is skipped. None: not an engine's JSON."""
    try:
        return _TOLD.decode(body)
    except (ValueError, RecursionError):  # msgspec's own errors and Unicode's are ValueErrors
        return None


def told_at_end(tail: bytes) -> EngineTold | None:
    """The report in a stream's last events: its usage event, which has no choices. None: the client did not ask for
    one.
    """
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None
    event = tail[tail.rfind(b"\n\n", 0, at) + 1 :].lstrip(b"\n").partition(b"\n\n")[0]
    return told_in(event.removeprefix(b"data:")) if event.startswith(b"data:") else None


Marks = list[float]
"""When each stage began, and the last one ended."""


class StreamShape(NamedTuple):
    """The stages of a stream, without their times."""

    stages: tuple[str, ...]
    first: int | None
    second: int | None
    seeded: bool

    def timeline(self, marks: Marks) -> RequestTimeline:
        """A stream of this shape."""
        made = RequestTimeline(marks[0], stream=True)
        made.take(self, marks)
        return made


class RequestTimeline:
    """The current stage of a request, and since when. Times are monotonic seconds of one clock."""

    __slots__ = (
        "_ahead",
        "_ended",
        "_first",
        "_reports",
        "_second",
        "_since",
        "_stages",
        "_stream",
        "arrived",
        "seeded",
    )

    def __init__(self, arrived: float, *, stream: bool) -> None:
        self.seeded = False
        self.arrived = arrived
        self._stream = stream
        self._stages: list[str] = [Stage.ROUTER]
        self._since: list[float] = [arrived]
        self._reports: dict[int, EngineTimes] = {}
        """The engines' reports, by stage."""
        self._ahead: dict[int, float] = {}
        """Legs that were sent before their stage began (early legs), by stage: by how many seconds."""
        self._first: int | None = None
        """The stage that began as the first token was sent; all stages before it belong to the first sum."""
        self._second: int | None = None
        self._ended: float | None = None

    def enter(self, stage: str, now: float, ahead_s: float = 0.0) -> None:
        """Begin another stage. `ahead_s`: how long ago its leg was sent, while another stage was under way."""
        if ahead_s > 0.0:
            self._ahead[len(self._stages)] = ahead_s
        self._stages.append(stage)
        self._since.append(now)

    def relabel(self, stage: str) -> None:
        """The stage under way turns out to be another one."""
        self._stages[-1] = stage

    def leave(self, stage: str, then: str, now: float) -> None:
        """The stage under way ends, if it is this one. `then`: the stage that begins."""
        if self._stages[-1] == stage:
            self.enter(then, now)

    def again(self, now: float) -> None:
        """The request has to be sent (again): the last wait was in vain."""
        if self._stages[-1] in _LOST:
            self._stages[-1] = Stage.RETRIES
            self.enter(Stage.ROUTER, now)

    def first(self, now: float, then: str) -> None:
        """The first token is on its way to the client. `then`: the stage that begins."""
        self._first = len(self._stages)
        self.enter(then, now)

    def second(self, now: float) -> None:
        """The second token is on its way to the client."""
        self._second = len(self._stages)
        self.enter(Stage.REST, now)

    def end(self, now: float) -> None:
        """The last byte is on its way to the client; later calls change nothing."""
        if self._ended is None:
            self._ended = now

    def report(self, leg: str, times: EngineTimes) -> None:
        """The report of the last such leg's engine."""
        for number in range(len(self._stages) - 1, -1, -1):
            if self._stages[number] == leg:
                self._reports[number] = times.after(self._ahead.get(number, 0.0))
                return

    def shape(self) -> StreamShape | None:
        """The shape of a stream that has ended without an engine's report; None for others and for many stages."""
        if self._reports or not self._stream or self._ended is None or len(self._stages) > STAGES_MAX:
            return None
        return StreamShape(tuple(self._stages), self._first, self._second, self.seeded)

    def marks(self) -> Marks:
        """The marks of a stream that has ended."""
        assert self._ended is not None
        return [*self._since, self._ended]

    def take(self, shape: StreamShape, marks: Marks) -> None:
        """Become a stream of this shape."""
        self._stages, self._first, self._second, self.seeded = [*shape.stages], shape.first, shape.second, shape.seeded
        self._since, self._ended = marks[:-1], marks[-1]

    def read(self, now: float) -> Timing:
        """The sums, as far as they are known at this time."""
        ended = now if self._ended is None else self._ended
        since = [*self._since, ended]
        whole = None if self._stream or self._ended is None else self._sum(0, len(self._stages), since)
        first = None if self._first is None else self._sum(0, self._first, since)
        second = None
        if self._first is not None and self._second is not None:
            second = self._sum(self._first, self._second, since)
        handed_over = "plain" if Stage.DECODE_LEG in self._stages else "aggregated"
        return Timing(
            way="seeded" if self.seeded else handed_over,
            ttft=first,
            tt2t=second,
            answer=whole,
            first_made_s=self._first_made(since),
            total_s=ended - self.arrived,
        )

    def totals(self, now: float) -> Totals:
        """The totals of `read`, for a fraction of its work."""
        ended = now if self._ended is None else self._ended
        since, first, second = [*self._since, ended], self._first, self._second
        return Totals(
            None if first is None else since[first] - since[0],
            None if first is None or second is None else since[second] - since[first],
            self._first_made(since),
            ended - self.arrived,
        )

    def _sum(self, begin: int, end: int, since: Sequence[float]) -> Sum:
        """The sum of the stages from `begin` to before `end`."""
        parts: dict[str, float | None] = dict(_NONE_YET)
        residual, reports, stages, at = 0.0, self._reports, self._stages, since[begin]
        for number in range(begin, end):
            stage, then = stages[number], since[number + 1]
            seconds, at = then - at, then
            if stage in LEGS:
                if number in reports:
                    residual += self._add_leg(parts, stage, reports[number], seconds)
                    continue
                queue, first = LEGS[stage]
                parts.setdefault(queue, None)
                parts.setdefault(first, None)
            parts[stage] = (parts.get(stage) or 0.0) + seconds
        return Sum(at - since[begin], parts, residual)

    def _add_leg(self, parts: dict[str, float | None], stage: str, times: EngineTimes, seconds: float) -> float:
        """The leg's parts by its engine's clock; returns the rest."""
        queue, first = LEGS[stage]
        parts[queue] = (parts.get(queue) or 0.0) + times.queue_s
        parts[first] = (parts.get(first) or 0.0) + times.first_s
        left = seconds - times.queue_s - times.first_s
        if not self._stream and stage != Stage.PREFILL_LEG and times.generation_s is not None:
            parts["generation"] = (parts.get("generation") or 0.0) + times.generation_s
            left -= times.generation_s
        return left

    def _first_made(self, since: Sequence[float]) -> float | None:
        """Seconds from arrival until P answered; without P, until the first event, or by the engine's own report. None:
        not known yet.
        """
        for number, stage in enumerate(self._stages):
            if stage not in LEGS or (number + 1 == len(self._stages) and self._ended is None):
                continue
            if self._stream or stage == Stage.PREFILL_LEG:
                return since[number + 1] - self.arrived
            times = self._reports.get(number)
            return None if times is None else since[number] + times.queue_s + times.first_s - self.arrived
        return None
