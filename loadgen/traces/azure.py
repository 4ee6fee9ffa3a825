"""Azure's CSV (AzurePublicDataset, 2023 and 2024): `TIMESTAMP` to 100 ns, `ContextTokens`, `GeneratedTokens`.

2023 writes `2023-11-16 18:17:03.9799600`, 2024 `2024-05-10 00:00:00.009930+00:00`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from loadgen.arrival import Arrival, Row
from loadgen.traces.fields import RowFault, cells, count, shown
from loadgen.traces.ordered import from_zero, rows, spread

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_STAMP = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII
)
_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_FROM_YEAR = 2000
"""Seconds count from this year, so that a float keeps 100 ns (2^53 of them are 28 years)."""


def read(lines: Iterable[str], rng: np.random.Generator, tick_s: float | None = None) -> Iterator[Row]:
    """Arrivals of an Azure trace. `tick_s`: as for Mooncake; these stamps are fine, so None spreads nothing."""
    return spread(from_zero(rows(lines, _parse)), tick_s or 0.0, rng)


def _parse(line: str) -> Arrival | None:
    found = cells(line)
    if found[0] == HEADER[0]:
        return None
    if len(found) != len(HEADER):
        raise RowFault(f"{len(found)} cells, where there are {len(HEADER)}: {', '.join(HEADER)}")
    return Arrival(
        at_s=seconds(found[0]),
        input_tokens=count(found[1], HEADER[1]),
        output_tokens=count(found[2], HEADER[2]),
    )


def seconds(stamp: str) -> float:
    """Seconds of a time stamp since the year 2000, UTC unless it says otherwise. Raises `RowFault`."""
    if not stamp:
        raise RowFault("TIMESTAMP is missing")
    found = _STAMP.fullmatch(stamp)
    if found is None:
        raise RowFault(f"TIMESTAMP {shown(stamp)} is not like 2023-11-16 18:17:03.9799600")
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    real = 1 <= month <= 12 and 1 <= day <= _MONTH_DAYS[month - 1] and hour < 24 and minute < 60 and second < 60
    if not real or year < _FROM_YEAR:
        raise RowFault(f"TIMESTAMP {shown(stamp)} is no date and time after {_FROM_YEAR}")
    whole = _days(year, month, day) * 86400 + hour * 3600 + minute * 60 + second
    if found[8]:
        whole -= (int(found[9]) * 3600 + int(found[10]) * 60) * (1 if found[8] == "+" else -1)
    return whole + int((found[7] or "0").ljust(9, "0")) / 1e9


def _days(year: int, month: int, day: int) -> int:
    """Days since 1 January 2000 (Gregorian)."""
    before = year - 1
    leaps = before // 4 - before // 100 + before // 400 - (1999 // 4 - 1999 // 100 + 1999 // 400)
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    in_year = sum(_MONTH_DAYS[: month - 1]) - (1 if month > 2 and not leap else 0)
    return (year - _FROM_YEAR) * 365 + leaps + in_year + day - 1
