"""The summary of a load. Pure: records in, a value out; also for no records and for one.

Times are in milliseconds. Percentiles interpolate linearly (numpy's default, as in `vllm bench serve`). Latencies are
those of whole answers. Attainment is the share of **all** arrivals that met every target, so errors and shed requests
are misses. Requests that the sender cut itself count in neither; they have a count of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from loadgen.faults import Applied
from loadgen.record import INTERRUPTED, Record
from loadgen.stages import Stages, stages_of

LATE_MS = 10.0
"""A load sent later than this at p99, in ms, was not the one asked for: ten times what timers cost an idle sender."""

CPU_SHARE = 0.9
"""A sender that used more of one core than this may itself delay what it measures."""

STARVED_SHARE = 0.5
"""A late sender that used less of one core than this was delayed by something else than its own work."""

ERRORS_SHOWN = 20

CLOSED_LOOP = (
    "closed loop: each session waits for its answer, so a slower server is asked less; backlog and rate here "
    "are blind to its capacity, which only an open loop (--rate, --find-goodput) finds"
)


class Targets(msgspec.Struct, frozen=True):
    """Latency targets in milliseconds, as in the cluster file; None = no target."""

    ttft_ms: float | None = None
    tt2t_ms: float | None = None
    """From the first token to the second."""
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def any(self) -> bool:
        return any(each is not None for each in (self.ttft_ms, self.tt2t_ms, self.tpot_ms, self.e2e_ms))


class Spread(msgspec.Struct, frozen=True):
    """A quantity over many requests, in milliseconds. None without values."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class ErrorKind(msgspec.Struct, frozen=True):
    """One kind of error: how often, and its first message."""

    kind: str
    count: int
    example: str


class ClassAttainment(msgspec.Struct, frozen=True, kw_only=True):
    """One class's attainment of its own targets."""

    name: str
    """Empty: requests that name no class."""
    targets: Targets
    attained: int
    requests: int


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole summary, as `--json` prints it. It has many fields, one for each figure."""

    planned: int | None
    """Requests in the load; None if the load ran for a time."""
    sent: int
    completed: int
    failed: int
    shed: int
    """Requests answered 429; also counted in `failed`."""
    interrupted: int
    elapsed_s: float
    offered_rate: float | None
    """Requests per second as they were meant to be sent."""
    completed_rate: float | None
    """Whole answers per second, from the first intended send to the last end."""
    input_tokens: int
    output_tokens: int
    """Tokens of whole answers, by `usage` if the server sends it."""
    output_tokens_s: float | None
    """Tokens per second in the same time as `completed_rate`; the next one counts prompts, too."""
    total_tokens_s: float | None
    ttft_ms: Spread
    """Counted from the intended moment."""
    ttft_sent_ms: Spread
    """Counted from the real moment of sending."""
    tt2t_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    """Gaps between chunks, of all answers together."""
    e2e_ms: Spread
    late_ms: Spread
    """Real minus intended moment of sending: how late the sender itself was."""
    attained: int | None
    attainment: float | None
    """None without targets or arrivals."""
    targets: Targets
    errors: tuple[ErrorKind, ...]
    prompt_tokens_off: float | None
    """Mean of |prompt tokens by `usage` − asked| / asked: how well prompts have the wanted length."""
    short_answers: int
    """Whole answers with fewer tokens than asked for."""
    cpu_share: float | None
    notes: tuple[str, ...]
    """Warnings to read before the numbers."""
    stages: tuple[Stages, ...] = ()
    """The breakdown of the time by the router's own parts; empty if the router gave none."""
    faults: tuple[Applied, ...] = ()
    """Actions on the fleet during the load (`--fault`)."""
    senders: int = 1
    """Processes that sent; `cpu_share` is the busiest one's."""
    classes: tuple[ClassAttainment, ...] = ()
    """Where classes have targets of their own (`baton simulate --cluster`): each of the load's classes. `targets` are
    then those of requests without such a class, and `attained` counts each request by its own."""


class LoadRun(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the load that are not in its records."""

    planned: int | None = None
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    held_back: int = 0
    stopped: bool = False
    senders: int = 1
    faults: tuple[Applied, ...] = ()
    notes: tuple[str, ...] = ()


def report_of(
    records: Sequence[Record], run: LoadRun, targets: Targets | None = None, gaps_s: Iterable[float] = ()
) -> LoadReport:
    """Summarise a load. `gaps_s`: seconds between chunks, of all whole answers."""
    targets = targets or Targets()
    ours = [r for r in records if r.error != INTERRUPTED]
    good = [r for r in ours if r.error is None]
    span_s = max((r.end_s for r in ours), default=0.0) - min((r.at_s for r in ours), default=0.0)
    prompt = sum(r.input_tokens if r.prompt_tokens is None else r.prompt_tokens for r in good)
    output = sum(r.tokens for r in good)
    attained = sum(met(r, targets) for r in ours) if targets.any else None
    late = spread_ms(r.sent_s - r.at_s for r in records if not r.held_back)
    cpu_share = run.cpu_s / run.elapsed_s if run.elapsed_s > 0 else None
    return LoadReport(
        planned=run.planned,
        sent=len(records),
        completed=len(good),
        failed=len(ours) - len(good),
        shed=sum(r.error == "shed" for r in ours),
        interrupted=len(records) - len(ours),
        elapsed_s=run.elapsed_s,
        offered_rate=_offered(records),
        completed_rate=_per(len(good), span_s),
        input_tokens=prompt,
        output_tokens=output,
        output_tokens_s=_per(output, span_s),
        total_tokens_s=_per(output + prompt, span_s),
        **{name: spread_ms(map(of, good)) for name, of in _LATENCIES.items()},
        itl_ms=spread_ms(gaps_s),
        late_ms=late,
        attained=attained,
        attainment=attained / len(ours) if attained is not None and ours else None,
        targets=targets,
        errors=_errors(ours),
        prompt_tokens_off=_off(good),
        short_answers=sum(r.tokens < max(1, r.output_tokens) for r in good),
        cpu_share=cpu_share,
        notes=(*run.notes, *_notes(run, late, cpu_share, records)),
        stages=stages_of(ours),
        faults=run.faults,
        senders=run.senders,
        classes=(),  # written out: mypy would take `latencies` for it, too
    )


_LATENCIES: dict[str, Callable[[Record], float | None]] = {
    "ttft_ms": lambda record: record.ttft_s,
    "ttft_sent_ms": lambda record: record.ttft_sent_s,
    "tt2t_ms": lambda record: record.tt2t_s,
    "tpot_ms": lambda record: record.tpot_s,
    "e2e_ms": lambda record: record.e2e_s,
}


def met(record: Record, targets: Targets, *, from_sent: bool = False) -> bool:
    """Whether this request was answered whole and within every target.

    With `from_sent`, times count from the real sending: the sender's lateness is no miss.

    A time that the request lacks (the second token of an answer of one) is not a miss. A whole answer without a token
    misses its first.
    """
    if record.error is not None:
        return False
    late_s = record.sent_s - record.at_s if from_sent else 0.0
    for target, seconds in (
        (targets.tt2t_ms, record.tt2t_s),
        (targets.tpot_ms, record.tpot_s),
        (targets.e2e_ms, record.e2e_s - late_s),
    ):
        if target is not None and seconds is not None and seconds * 1000 > target:
            return False
    return targets.ttft_ms is None or (record.ttft_s is not None and (record.ttft_s - late_s) * 1000 <= targets.ttft_ms)


def spread_ms(seconds: Iterable[float | None]) -> Spread:
    """Mean, percentiles and maximum in milliseconds, of the values that exist."""
    values = np.array([each for each in seconds if each is not None], dtype=np.float64) * 1000
    if not len(values):
        return Spread()
    p50, p90, p99 = (round(float(each), 4) for each in np.percentile(values, (50, 90, 99)))
    return Spread(len(values), round(float(values.mean()), 4), p50, p90, p99, round(float(values.max()), 4))


def as_json(report: LoadReport) -> dict[str, Any]:
    """The report as plain values."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found


def _per(amount: float, span_s: float) -> float | None:
    return amount / span_s if span_s > 0 else None


def _offered(records: Sequence[Record]) -> float | None:
    """Intended requests per second: the number of gaps over their time, so one request has no rate."""
    if len(records) < 2:
        return None
    times = [record.at_s for record in records]
    return _per(len(records) - 1, max(times) - min(times))


def _errors(ours: Sequence[Record]) -> tuple[ErrorKind, ...]:
    counted = Counter(record.error for record in ours if record.error is not None)
    example = {record.error: record.detail for record in reversed(ours) if record.error is not None}
    return tuple(ErrorKind(kind, count, example[kind]) for kind, count in counted.most_common(ERRORS_SHOWN))


def _off(good: Sequence[Record]) -> float | None:
    offs = [abs(r.prompt_tokens - r.input_tokens) / max(1, r.input_tokens) for r in good if r.prompt_tokens is not None]
    return sum(offs) / len(offs) if offs else None


def _starved(cpu_share: float | None) -> str:
    if cpu_share is None or cpu_share > STARVED_SHARE:
        return ""
    return (
        f" (it used {cpu_share:.0%} of a core: other programs had the processor, or it was asleep; "
        "`chrt --rr 1 baton load ...` lets it run before them, niceness may not: docs/load.md)"
    )


def sender_limit(late: Spread, cpu_share: float | None) -> str:
    """Why the sender, not the server, is the limit; empty if it is not."""
    if late.p99 is None or late.p99 <= LATE_MS:
        return ""
    return (
        f"the sender, not the server, is the limit: requests left {late.p99:.0f} ms late at p99; "
        f"use a faster or idle machine, --senders, or a lower rate{_starved(cpu_share)}"
    )


def _notes(run: LoadRun, late: Spread, cpu_share: float | None, records: Sequence[Record]) -> Iterable[str]:
    limit = sender_limit(late, cpu_share)
    if limit:
        yield limit
    if any(record.closed_loop for record in records):
        yield CLOSED_LOOP
    failed = [each for each in run.faults if each.error is not None]
    if failed:
        yield f"{len(failed)} of {len(run.faults)} faults could not be done: {failed[0].what}: {failed[0].error}"
    if cpu_share is not None and cpu_share > CPU_SHARE:
        yield f"the sender used {cpu_share:.0%} of a core: its own delays may be inside the latencies"
    if run.held_back:
        yield (
            f"{run.held_back} requests were held back by --max-concurrency: the load was not the one asked for; "
            "latencies count from the intended moment"
        )
    own = sum(record.error == "own_limit" for record in records)
    if own:
        yield f"{own} requests failed for want of a file or port on this machine (ulimit -n, ip_local_port_range)"
    if run.stopped:
        planned = "" if run.planned is None else f" of {run.planned}"
        yield f"stopped before its end: {len(records)}{planned} requests were sent"
