"""`baton load`: from flags to the list of arrivals. Opens trace files; the reading itself is `loadgen`'s."""

from __future__ import annotations

import argparse
import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, cast

import numpy as np
from msgspec.structs import replace

from baton.file_kinds import exists, is_file, is_folder
from baton.number_flags import above_zero
from baton.output import say
from baton.unused_flags import refuse_given
from cluster.errors import UsageError
from cluster.text_file import check_encoding, unreadable
from loadgen import arrivals as processes
from loadgen import lengths, servegen, traces
from loadgen.arrival import SPAN_MAX_S, Arrival, BadRow, Row
from loadgen.made import made
from loadgen.shaping import denser, faster, window

Tell = Callable[[str], None]
"""Takes a line for people."""

REQUESTS = 100
"""Requests of made-up load, unless flags say otherwise."""

BAD_SHOWN = 20
"""Left-out rows that are shown to people; --json lists them all."""

ARRIVALS_MAX = 5_000_000
"""Most requests of a load: about 1 GB of arrivals in memory."""

RATE_SCALE_MAX = 10_000.0
"""Most copies of one arrival: they are held in memory until they are due."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The load to send."""

    arrivals: list[Arrival]
    bad: tuple[str, ...] = ()
    """Rows of the trace that were left out."""
    notes: tuple[str, ...] = ()
    count: int | None = None
    """Requests after which a load of conversations ends; None: their number does not end it."""
    lasts_s: float | None = None
    """Seconds that a load of conversations lasts: the number of its requests is not known beforehand."""

    def left_out(self, strict: str = "--strict stops at the first") -> list[str]:
        """The bad rows for people: the first ones, their number, and what `strict` would do about them."""
        told = [f"left out: {row}" for row in self.bad[:BAD_SHOWN]]
        if len(self.bad) > BAD_SHOWN:
            told.append(f"left out: {len(self.bad) - BAD_SHOWN} more; --json lists them all")
        if self.bad:
            told.append(f"left out: {len(self.bad)} bad rows in all ({strict})")
        return told

    @property
    def planned(self) -> int | None:
        """How many requests will be sent; None if only time ends the load."""
        return self.count if self.count or self.lasts_s else len(self.arrivals)

    @property
    def span_s(self) -> float:
        """When the last request is due, seconds from the start; infinite if that is not known beforehand."""
        if self.lasts_s is not None:
            return self.lasts_s
        return self.arrivals[-1].at_s if self.arrivals else math.inf if self.count else 0.0


def planned(args: argparse.Namespace, *, strict: bool = False) -> PlannedLoad:
    """The load that the flags describe. Unreadable rows of a trace are left out and listed.

    Raises:
        UsageError: flags contradict each other, no row can be read, or with `strict` one cannot.
    """
    rng = np.random.default_rng(args.seed)
    notes: list[str] = []
    if args.trace is None:
        return PlannedLoad(_made(args, rng, notes.append), notes=tuple(notes))
    for name in ("rate", "arrivals", "cv", "input_tokens", "output_tokens", "prefix_tokens", "prefix_groups"):
        if getattr(args, name) is not None:
            flag = name.replace("_", "-")
            raise UsageError(
                f"--{flag} makes load up, --trace replays one: give one (--speed and --rate-scale fit both)"
            )
    bad: list[str] = []
    found: Iterable[Arrival] = _good(_rows(Path(args.trace), args, rng, notes), args, bad, strict=strict)
    if args.format != "servegen" and args.from_s:
        found = window(found, args.from_s)
    if args.rate_scale != 1:
        found = denser(found, args.rate_scale, rng.spawn(1)[0])
    arrivals = _shaped(found, args)
    if bad and not arrivals:
        raise UsageError(
            f"{args.trace}: no row can be sent: {bad[0]}" + (f", and {len(bad) - 1} more" * (len(bad) > 1))
        )
    if bad:
        notes.append(f"{len(bad)} bad rows of the trace were left out; the first: {bad[0]}")
    return PlannedLoad(arrivals, tuple(bad), tuple(notes))


class Loads:
    """Loads of one kind, each drawn anew, for `--find-goodput`. Load `number` has the same requests at any rate."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.notes: tuple[str, ...] = ()
        self._trace: list[Arrival] = []
        if args.trace is not None:
            unrated = argparse.Namespace(
                **{**vars(args), "rate": None}
            )  # --rate is where a search begins; a replay goes at the trace's own rate
            whole = planned(unrated, strict=args.strict)
            self._trace, self.notes = whole.arrivals, whole.notes
            if len(self._trace) < 2 or self._trace[-1].at_s <= self._trace[0].at_s:
                raise UsageError(f"{args.trace}: a rate needs two requests at different moments")

    def load(self, number: int, requests: int, rate: float) -> list[Arrival]:
        """Load `number`, with so many requests at a mean `rate` a second: made up, or a stretch of the trace with a
        random beginning.
        """
        rng = np.random.default_rng([self._args.seed, number])
        found = self._stretch(requests, rng) if self._trace else self._made(requests, rng)
        mean = (len(found) - 1) / span_s if (span_s := found[-1].at_s - found[0].at_s) > 0 else 1.0
        return list(faster(window(found, found[0].at_s), rate / mean)) if len(found) > 1 else found

    def _made(self, requests: int, rng: np.random.Generator) -> list[Arrival]:
        args = argparse.Namespace(**{**vars(self._args), "rate": 1.0})
        notes: list[str] = []
        found = list(islice(_drawn(args, rng, notes.append), requests))
        self.notes = tuple(dict.fromkeys((*self.notes, *notes)))
        return found

    def _stretch(self, requests: int, rng: np.random.Generator) -> list[Arrival]:
        """Consecutive requests of the trace, which is repeated if it has fewer."""
        trace = self._trace
        lap_s = (trace[-1].at_s - trace[0].at_s) * len(trace) / (len(trace) - 1)
        begin = int(rng.integers(len(trace)))
        laps = ((at // len(trace), trace[at % len(trace)]) for at in range(begin, begin + requests))
        return [replace(each, at_s=each.at_s + lap * lap_s) for lap, each in laps]


def loads_of(args: argparse.Namespace) -> Loads:
    """The loads that the flags ask for.

    Raises:
        UsageError: as `planned`.
    """
    loads = Loads(args)
    loads.load(0, 2, 1.0)  # a bad flag is reported before anything is sent
    return loads


def lengths_from(text: str, flag: str, *, strict: bool = False, tell: Tell = say) -> lengths.Lengths:
    """The distribution that a length flag names. `like:FILE`: the lengths of a trace; `tell` gets a line on bad rows.

    Raises:
        UsageError: the text is neither, no row can be read, or with `strict` one cannot.
    """
    if not text.startswith("like:"):
        try:
            return lengths.parse(text)
        except ValueError as error:
            raise UsageError(f"{flag}: {error}") from None
    path = Path(text.removeprefix("like:"))
    field = "input_tokens" if flag == "--input-tokens" else "output_tokens"
    found: list[int] = []
    bad: list[BadRow] = []
    for row in _reader(path, None)(_lines(path), np.random.default_rng(0), 0.0):
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            found.append(getattr(row, field))
    if bad and (strict or not found):
        raise UsageError(f"{flag}: {path}: {bad[0]}")
    if not found:
        raise UsageError(f"{flag}: {path} holds no request")
    if bad:
        rows_are = "1 bad row was" if len(bad) == 1 else f"{len(bad)} bad rows were"
        tell(f"{flag}: {path}: {rows_are} left out; the first: {bad[0]}")
    return lengths.empirical(found)


def _made(args: argparse.Namespace, rng: np.random.Generator, tell: Tell) -> list[Arrival]:
    for name in ("format", "tick_ms", "from_s"):
        if getattr(args, name) not in {None, 0.0} or (name == "tick_ms" and args.tick_ms is not None):
            raise UsageError(f"--{name.replace('_', '-')} tells how to read a --trace, and there is none")
    found: Iterable[Arrival] = _drawn(args, rng, tell)
    if args.requests is None and args.duration_s is None:
        args.requests = REQUESTS
    expected = (args.rate or 1.0) * args.speed * args.rate_scale * (args.duration_s or math.inf)
    if min(args.requests or math.inf, expected) > 1.1 * ARRIVALS_MAX:
        raise _too_many()
    if args.rate_scale != 1:
        found = denser(found, args.rate_scale, rng.spawn(1)[0])
    return _shaped(found, args)


def _drawn(args: argparse.Namespace, rng: np.random.Generator, tell: Tell) -> Iterator[Arrival]:
    """An endless stream of made-up requests."""
    prefix = args.prefix_tokens or 0
    if not prefix:
        refuse_given(
            args, ("prefix_groups",), "says how many prefixes there are, and prompts have none: give --prefix-tokens N"
        )
    strict = getattr(args, "strict", False)  # `baton simulate` has no such flag
    return made(
        _times(args, rng),
        lengths_from(args.input_tokens or "512", "--input-tokens", strict=strict, tell=tell),
        lengths_from(args.output_tokens or "128", "--output-tokens", strict=strict, tell=tell),
        rng.spawn(1)[0],
        prefix_tokens=prefix,
        prefix_groups=args.prefix_groups or 1,
    )


def _times(args: argparse.Namespace, rng: np.random.Generator) -> Iterator[float]:
    rate, kind = args.rate or 1.0, args.arrivals or "poisson"
    if args.cv is not None and kind not in {"gamma", "weibull"}:
        raise UsageError(f"--cv shapes gamma and weibull arrivals; {kind} has its own")
    cv = 2.0 if args.cv is None else args.cv
    if fault := processes.cv_fault(kind, cv):
        raise UsageError(f"--cv {cv:g}: {fault}")
    if kind == "constant":
        return processes.constant(rate)
    if kind == "poisson":
        return processes.poisson(rate, rng)
    return processes.gamma(rate, cv, rng) if kind == "gamma" else processes.weibull(rate, cv, rng)


def _shaped(found: Iterable[Arrival], args: argparse.Namespace) -> list[Arrival]:
    """Apply speed, duration and number, in this order; return a list, so that nothing is computed while sending."""
    if args.speed != 1:
        found = faster(found, args.speed)
    if args.duration_s is not None:
        found = window(found, 0.0, args.duration_s)
    limit = ARRIVALS_MAX + 1 if args.requests is None else args.requests
    listed = list(islice(found, limit))
    if len(listed) > ARRIVALS_MAX:
        raise _too_many()
    if listed and not listed[-1].at_s <= SPAN_MAX_S:
        raise UsageError(f"the last request is due after {listed[-1].at_s:.3g} s; a load lasts up to {SPAN_MAX_S:g} s")
    return listed


def _too_many() -> UsageError:
    return UsageError(f"more than {ARRIVALS_MAX:,} requests; take part of it with --requests or --duration-s")


def _rows(path: Path, args: argparse.Namespace, rng: np.random.Generator, notes: list[str]) -> Iterator[Row]:
    if is_folder(path):
        if args.format not in {None, "servegen"}:
            raise UsageError(f"--trace {path} is a folder, which is ServeGen's format, not --format {args.format}")
        args.format = "servegen"
        return _servegen(path, args, rng, notes)
    if args.format == "servegen":
        raise UsageError(f"--trace {path} is a file; ServeGen's format is a folder")
    return _reader(path, args.format)(_lines(path), rng, None if args.tick_ms is None else args.tick_ms / 1000)


def _servegen(path: Path, args: argparse.Namespace, rng: np.random.Generator, notes: list[str]) -> Iterator[Row]:
    try:
        inside = sorted(path.iterdir())
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror}; give a folder that may be read") from None
    files = {each.name: list(_lines(each)) for each in inside if each.suffix in {".csv", ".json"}}
    pool = servegen.read(files)
    yield from pool.bad
    if pool.silent:
        notes.append(f"{len(pool.silent)} of the trace's clients have rate 0 throughout and send nothing")
    yield from servegen.arrivals(pool, rng, args.from_s)


def _reader(path: Path, wanted: str | None) -> traces.Reader:
    found = wanted or traces.detect(islice(_lines(path), traces.LOOK_LINES))
    if found is None:
        known = ", ".join(traces.FORMATS)
        raise UsageError(f"{path} is in no format known here; say --format ({known})")
    return traces.FORMATS[found]


def _lines(path: Path) -> Iterator[str]:
    """Lines of a file, also of one with gzip; bytes that are not UTF-8 become surrogates, which readers see.

    Raises:
        UsageError: the file cannot be read.
    """
    if exists(path) and not is_file(path) and not is_folder(path):
        raise UsageError(
            f"{path}: a pipe or a device cannot be read twice (its beginning tells its format): name a file"
        )
    try:
        with _opened(path) as raw:
            check_encoding(raw.read(2), str(path))
        with _opened(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape") as text:
            yield from text
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        fix = "copy or fetch it again; a file that is not packed has no .gz in its name"
        raise UsageError(f"{path}: the file is not whole gzip data ({error}): {fix}") from None
    except OSError as error:
        raise unreadable(path, "", error, "give a trace file, or a folder of ServeGen") from None


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _good(rows: Iterator[Row], args: argparse.Namespace, bad: list[str], *, strict: bool) -> Iterator[Arrival]:
    """Arrivals only: bad rows are added to `bad`; with `strict` the first one is a UsageError."""
    for row in rows:
        if isinstance(row, Arrival):
            yield row
        elif strict:
            raise UsageError(f"{args.trace}: {row} (without --strict such rows are left out and listed)")
        else:
            bad.append(str(row))


def scale(text: str) -> float:
    """For argparse: a number of copies of each arrival, above 0 and at most `RATE_SCALE_MAX`."""
    value = above_zero(text)
    if value > RATE_SCALE_MAX:
        raise argparse.ArgumentTypeError(f"{text} is more than {RATE_SCALE_MAX:,.0f}")
    return value
