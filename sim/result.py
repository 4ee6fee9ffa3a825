"""The result of a run: one packed row for each request, and their sums in the terms of `loadgen`. Pure.

A million requests take 90 MB. Percentiles, attainment and the report are those of `baton load`: all arrivals count, a
refused or failed one has missed its targets. Times are nanoseconds from the start of the load, as the client sees them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.ids import InstanceId
from loadgen.arrival import Arrival
from loadgen.record import Record
from loadgen.report import ClassAttainment, ErrorKind, LoadReport, Targets, spread_ms
from sim.kernel import NS

_FORMAT: Final = "<qqqqqiiiihhbhbbi"
_SIZE: Final = struct.calcsize(_FORMAT)
_FIELDS: Final = (
    ("at_ns", "<i8"), ("first_ns", "<i8"), ("second_ns", "<i8"), ("last_ns", "<i8"), ("end_ns", "<i8"),
    ("input_tokens", "<i4"), ("output_tokens", "<i4"), ("made_tokens", "<i4"), ("cached_tokens", "<i4"),
    ("prefill", "<i2"), ("decode", "<i2"),
    ("outcome", "i1"), ("slo_class", "<i2"), ("attempts", "i1"), ("flags", "i1"), ("status", "<i4"),
)  # fmt: skip
DTYPE: Final = np.dtype([(name, kind) for name, kind in _FIELDS])
assert DTYPE.itemsize == _SIZE

OUTCOMES: Final = ("open", "served", "refused", "failed", "expired", "client_left")
"""`open` for a request that has not ended, then `router.core.journey.OUTCOMES`."""

HANDED_OVER, BROKE_OFF, WRONG, PREEMPTED, SEEDED, RESUMED = 1, 2, 4, 8, 16, 32
"""Flags of a row: two legs; a stream that ended with an error; text that is not the model's; blocks lost to others; the
first token came from P; the stream died and was generated again elsewhere."""

_CLIENT_LEFT: Final = OUTCOMES.index("client_left")

_OF_ARRIVALS: Final = ("prefix", "block_tokens", "session", "turn", "tenant", "kind")
"""Fields of a record that only the arrival has."""

_PACK: Final = struct.Struct(_FORMAT).pack_into


class Rows:
    """Rows by request number, written once each."""

    def __init__(self) -> None:
        self._bytes: Final = bytearray()
        self.count = 0
        self.ended = 0

    def add(self) -> int:
        """Make room for one more row. Returns its number."""
        self._bytes.extend(_EMPTY)
        self.count += 1
        return self.count - 1

    def write(self, number: int, *values: int) -> None:
        """Write a row: all fields, in the order of `_FIELDS`."""
        _PACK(self._bytes, number * _SIZE, *values)
        self.ended += 1

    def columns(self) -> NDArray[Any]:
        """A copy of all rows as a structured array."""
        return np.frombuffer(bytes(self._bytes), dtype=DTYPE)


class RequestRow:
    """What is known of a request's row before it is over."""

    __slots__ = ("cached_tokens", "first_ns", "flags", "prefilled_on", "second_ns", "slo_class", "status")

    def __init__(self, slo_class: int) -> None:
        self.slo_class = slo_class
        self.first_ns = self.second_ns = self.prefilled_on = -1
        self.cached_tokens = self.flags = self.status = 0

    def spoken(self, now_ns: int) -> None:
        """The client gets text; later text of the same answer is not the first."""
        if self.first_ns < 0:
            self.first_ns = now_ns
        self.status = 200


_EMPTY: Final = struct.pack(_FORMAT, *([-1] * 5), *([0] * 11))


class FleetEvent(NamedTuple):
    """Something that happened to the fleet."""

    at_ns: int
    instance: InstanceId
    what: str
    """asked, pending, cancelled, starting, ready, restarting, draining, resumed, a role, stopped, failed, refused."""
    because: str


@dataclass(slots=True, kw_only=True)
class Result:
    """One run."""

    columns: NDArray[Any]
    members: tuple[InstanceId, ...]
    classes: tuple[str, ...]
    """SLO classes by the number in the rows; the first is that of requests that name none."""
    details: Mapping[int, str]
    """By number of the request: what the router or the engine said of a failure."""
    events: int
    end_ns: int
    """When the last request ended."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What happened in the world: pulls, preemptions, kills."""
    gpus: int = 0
    """The most GPUs in use at one instant."""
    gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    """By type of GPU: GPU seconds of all instances, from the start of each to its end or the run's."""
    energy_j: float = 0.0
    """The energy that all GPUs drew in that time, in joules; 0 where costs are not the cost model's."""
    busy_s: Mapping[InstanceId, float] = field(default_factory=dict)
    """By instance: seconds in which its engine computed; 0 where costs are not the cost model's."""
    fleet_events: tuple[FleetEvent, ...] = ()
    """What happened to the fleet, in order."""

    def report(self, targets: Targets | None = None, by_class: Mapping[str, Targets] | None = None) -> LoadReport:
        """The report that `loadgen.report.report_of` makes of the same records, computed from the columns."""
        targets, by_class = targets or Targets(), by_class or {}
        rows = self.columns
        good = self.good()
        served = rows[good]
        ends = rows["end_ns"][rows["end_ns"] >= 0]
        span_s = (float(ends.max()) - float(rows["at_ns"].min())) / NS if len(ends) else 0.0
        attained = int(self.met(targets, by_class).sum()) if targets.any or by_class else None
        offered_s = float(rows["at_ns"].max() - rows["at_ns"].min()) / NS if len(rows) > 1 else 0.0
        prompt, output = int(served["input_tokens"].sum()), int(served["made_tokens"].sum())
        latencies: dict[str, Any] = {
            f"{name}_ms": spread_ms(values[good & ~np.isnan(values)].tolist()) for name, values in self._latencies()
        }
        return LoadReport(
            planned=len(rows),
            sent=len(rows),
            completed=len(served),
            failed=len(rows) - len(served),
            shed=int((rows["status"] == 429).sum()),
            interrupted=0,
            elapsed_s=self.end_ns / NS,
            offered_rate=_per(len(rows) - 1, offered_s),
            completed_rate=_per(len(served), span_s),
            input_tokens=prompt,
            output_tokens=output,
            output_tokens_s=_per(output, span_s),
            total_tokens_s=_per(prompt + output, span_s),
            **latencies,
            itl_ms=spread_ms(()),
            late_ms=spread_ms(()),
            attained=attained,
            attainment=attained / len(rows) if attained is not None and len(rows) else None,
            targets=targets,
            errors=self._errors(),
            prompt_tokens_off=None,
            short_answers=int((served["made_tokens"] < np.maximum(1, served["output_tokens"])).sum()),
            cpu_share=None,
            notes=(),
            classes=tuple(self._by_class(targets, by_class)) if by_class else (),
        )

    def _by_class(self, targets: Targets, by_class: Mapping[str, Targets]) -> Iterator[ClassAttainment]:
        """Each class that the load has. Several numbers may stand for the class without a name."""
        met, numbers = self.met(targets, by_class), self.columns["slo_class"]
        for name in dict.fromkeys(self.classes):
            here = np.isin(numbers, [at for at, each in enumerate(self.classes) if each == name])
            if here.any():
                yield ClassAttainment(
                    name=name,
                    targets=by_class.get(name, targets),
                    attained=int(met[here].sum()),
                    requests=int(here.sum()),
                )

    def good(self) -> NDArray[np.bool_]:
        """Rows that were served whole."""
        found: NDArray[np.bool_] = (self.columns["outcome"] == 1) & (self.columns["flags"] & BROKE_OFF == 0)
        return found

    def latency_s(self, name: str) -> NDArray[np.float64]:
        """One latency of all rows, in seconds: ttft, tt2t, e2e, else tpot; NaN where a request has none."""
        rows = self.columns
        first, second, last = (_times(rows[f"{each}_ns"]) for each in ("first", "second", "last"))
        if name == "ttft":
            return first - rows["at_ns"] / NS
        if name == "tt2t":
            return second - first
        if name == "e2e":
            return _times(rows["end_ns"]) - rows["at_ns"] / NS
        more = rows["made_tokens"] > 1
        found: NDArray[np.float64] = np.where(more, (last - first) / np.maximum(1, rows["made_tokens"] - 1), np.nan)
        return found

    def _latencies(self) -> Iterator[tuple[str, NDArray[np.float64]]]:
        for name in ("ttft", "tt2t", "tpot", "e2e"):
            yield name, self.latency_s(name)
        yield "ttft_sent", self.latency_s("ttft")

    def met(self, targets: Targets, by_class: Mapping[str, Targets] | None = None) -> NDArray[np.bool_]:
        """Which requests ended well and within every target of their class, or of `targets` without such a class."""
        found = self.good()
        by_class = by_class or {}
        for number, name in enumerate(self.classes):
            mine = self.columns["slo_class"] == number
            found &= ~mine | self._within(by_class.get(name, targets))
        return found

    def _within(self, targets: Targets) -> NDArray[np.bool_]:
        """Which rows keep these targets. A request without a first token has missed TTFT; it misses no other target for
        lack of a time.
        """
        found = np.ones(len(self.columns), dtype=np.bool_)
        for name in ("tt2t", "tpot", "e2e"):
            target = getattr(targets, f"{name}_ms")
            if target is not None:
                found &= ~(self.latency_s(name) * 1000 > target)
        if targets.ttft_ms is not None:
            found &= self.latency_s("ttft") * 1000 <= targets.ttft_ms
        return found

    def _errors(self) -> tuple[ErrorKind, ...]:
        counted: dict[str, list[int]] = {}
        for number in np.flatnonzero(~self.good()).tolist():
            counted.setdefault(self._error(self.columns[number]), []).append(number)
        return tuple(
            ErrorKind(kind, len(numbers), self.details.get(numbers[0], ""))
            for kind, numbers in sorted(counted.items(), key=lambda each: (-len(each[1]), each[0]))
        )

    @staticmethod
    def _error(row: Any) -> str:
        """The kind of error, as docs/load.md names it, and `client_left`: a fault of the client's own."""
        if row["outcome"] == 0:
            return "timeout"
        if row["outcome"] == _CLIENT_LEFT:
            return "client_left"
        if row["flags"] & BROKE_OFF:
            return "stream_error"
        return "shed" if row["status"] == 429 else f"http_{row['status']}"

    def records(self, arrivals: Sequence[Arrival] = ()) -> Iterator[Record]:
        """Every request, as `baton load --out` writes it.

        Args:
            arrivals: the load, for what rows do not have: prefixes, sessions, tenants. Empty: records have none.
        """
        good = self.good().tolist()
        for number, values in enumerate(self.columns.tolist()):
            row = dict(zip(self.columns.dtype.names or (), values, strict=True))
            first_s = _second(row["first_ns"])
            yield Record(
                request=number,
                at_s=row["at_ns"] / NS,
                input_tokens=row["input_tokens"],
                output_tokens=row["output_tokens"],
                slo_class=self.classes[row["slo_class"]] or None,
                **({name: getattr(arrivals[number], name) for name in _OF_ARRIVALS} if arrivals else {}),
                sent_s=row["at_ns"] / NS,
                first_byte_s=first_s,
                first_token_s=first_s,
                second_token_s=_second(row["second_ns"]),
                last_token_s=_second(row["last_ns"]),
                end_s=_second(row["end_ns"]) or self.end_ns / NS,
                status=row["status"] or None,
                error=None if good[number] else self._error(row),
                detail=self.details.get(number, ""),
                prompt_tokens=row["input_tokens"],
                completion_tokens=row["made_tokens"],
                chunks=row["made_tokens"],
            )


def _second(time_ns: int) -> float | None:
    return None if time_ns < 0 else time_ns / NS


def _times(column: NDArray[np.int64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.where(column < 0, np.nan, column / NS)
    return found


def _per(amount: float, span_s: float) -> float | None:
    return amount / span_s if span_s > 0 else None
