"""Measures one engine for `baton profile`: sends the points one after the other, within a time budget."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import aiohttp

from cluster.errors import UsageError
from costs.fit import DecodeRow, PrefillRow
from engine.vllm.metrics import parse_load
from loadgen.body import Asking
from loadgen.http import Failed, LoadConnections
from loadgen.measure import (
    EngineLimits,
    Point,
    Prompt,
    Rejected,
    arrivals,
    decode_row,
    expected_s,
    less,
    points,
    prefill_row,
    prefill_seconds,
    way_ms,
)
from loadgen.record import Record
from loadgen.replay import Replay, Sending

ROUND_TRIPS = 21
"""Requests for an empty answer, whose median is the round trip."""
PAGE_S = 5.0
"""Longest wait for a page such as /metrics."""
POINT_S = 10.0
"""Seconds that a point may take even if the budget is nearly spent: an answer that is cut measures nothing."""


@dataclass(slots=True)
class ProfileResults:
    """What was measured: by point its result, or why it has none."""

    round_trip_ms: float = 0.0
    """`round_trip_s`, in ms."""
    ways_ms: list[float] = field(default_factory=list)
    """For each prompt the time to the first token outside the engine's step, by the engine's metrics."""
    first_tokens: dict[Point, PrefillRow] = field(default_factory=dict)
    """Times to the first token as the client saw them; `prefills` has the steps alone."""
    decodes: dict[Point, DecodeRow] = field(default_factory=dict)
    rejected: dict[Point, str] = field(default_factory=dict)
    """Why nothing was measured at these points."""
    left_out: list[Point] = field(default_factory=list)
    """Points for which there was no time."""
    disturbed: list[Point] = field(default_factory=list)
    """Points during which other clients' requests ran on the engine."""

    @property
    def server_ms(self) -> float | None:
        """The server's part of a first token's time, without step and round trip; None: it reports no times."""
        if not self.ways_ms:
            return None
        quartile = sorted(self.ways_ms)[len(self.ways_ms) // 4]  # other programs can only add to a time
        return max(0.0, quartile - self.round_trip_ms)

    @property
    def prefills(self) -> dict[Point, PrefillRow]:
        """Prefill steps: first tokens less round trip and server's part. Without points where nothing is left."""
        way_ms = self.round_trip_ms + (self.server_ms or 0.0)
        steps = {point: less(row, way_ms) for point, row in self.first_tokens.items()}
        return {point: row for point, row in steps.items() if not isinstance(row, Rejected)}


class Measuring:
    """One engine under measurement. `told` gets each point before it is sent: its number, and how many there are."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        asking: Asking,
        told: Callable[[int, int, Point], None],
    ) -> None:
        self._url, self._headers, self._asking, self._told = url, headers, asking, told
        self.found = ProfileResults()

    async def run(
        self, limits: EngineLimits, budget_s: float, doubtful: Callable[[ProfileResults], list[Point]]
    ) -> ProfileResults:
        """Measure all points for which `budget_s` has time, the most telling first; then once more the rejected ones,
        and those that `doubtful` names.
        """
        found, end = self.found, time.monotonic() + budget_s
        found.round_trip_ms = 1000 * await round_trip_s(self._url)
        wanted = points(limits)
        for number, point in enumerate(wanted):
            if not await self._measure(point, number, len(wanted), end):
                found.left_out.append(point)
        again = [*found.rejected, *doubtful(found)]
        for number, point in enumerate(again, len(wanted)):
            await self._measure(point, number, len(wanted) + len(again), end)
        return found

    async def _measure(self, point: Point, number: int, total: int, end: float) -> bool:
        """Measure one point; False if there is no time for it."""
        found, left_s = self.found, end - time.monotonic()
        if left_s <= 0 or expected_s(point, list(found.prefills.values()), list(found.decodes.values())) > left_s:
            return False
        self._told(number, total, point)
        before = await self._metrics()
        load = parse_load(before)
        if load.running + load.waiting and point not in found.disturbed:  # this command has none open at this moment
            found.disturbed.append(point)
        records = await self._send(point, number, max(POINT_S, left_s))
        self._take(point, records)
        if isinstance(point, Prompt):
            way = way_ms(records, prefill_seconds(before), prefill_seconds(await self._metrics()))
            found.ways_ms += [] if way is None else [way]
        return True

    async def _metrics(self) -> str:
        """The engine's metrics; empty if it has none."""
        return await text_of(f"{self._url}/metrics", self._headers)

    async def _send(self, point: Point, number: int, limit_s: float) -> list[Record]:
        """Send one point, with new texts, so that no cached prompt of an earlier point is used."""
        sending = Sending(
            asking=replace(self._asking, salt=f"{self._asking.salt} {number}"),
            headers=self._headers,
            timeout_s=limit_s,
            concurrency_max=1 if isinstance(point, Prompt) else None,
            token_times=True,
        )
        load = await Replay(LoadConnections(self._url), sending).run(arrivals(point))
        return sorted(load.records, key=lambda record: record.request)

    def _take(self, point: Point, records: list[Record]) -> None:
        """Keep the row of a point; of two the faster one, since other programs can only add to a step's time."""
        found = self.found
        found.rejected.pop(point, None)
        if isinstance(point, Prompt):
            prefill = prefill_row(records)
            if isinstance(prefill, Rejected):
                found.rejected[point] = prefill.why
            else:
                found.first_tokens[point] = min(prefill, found.first_tokens.get(point, prefill), key=lambda row: row.ms)
            return
        decode = decode_row(records)
        if isinstance(decode, Rejected):
            found.rejected[point] = decode.why
        else:
            found.decodes[point] = min(decode, found.decodes.get(point, decode), key=lambda row: row.ms)


async def text_of(url: str, headers: Mapping[str, str]) -> str:
    """The text of a page; empty if it cannot be read."""
    try:
        async with (
            asyncio.timeout(PAGE_S),
            aiohttp.ClientSession(headers=headers) as session,
            session.get(url) as answer,
        ):
            return await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, UnicodeError):
        return ""


async def round_trip_s(url: str) -> float:
    """Median time of `ROUND_TRIPS` requests for /health, whose answer is empty: network, and HTTP on both sides.

    It is no part of a step.

    Raises:
        UsageError: the engine does not answer.
    """
    pool = LoadConnections(url)
    request = f"GET {pool.base}/health HTTP/1.1\r\nHost: {pool.netloc}\r\n\r\n".encode()
    taken = []
    try:
        for _ in range(ROUND_TRIPS):
            heard = _Heard(asyncio.get_running_loop().create_future())
            connection = pool.idle() or await pool.connect()
            began = time.perf_counter()
            connection.send(request, heard)
            async with asyncio.timeout(PAGE_S):
                taken.append(await heard.at - began)
    except Failed as failed:
        raise UsageError(f"{url}/health does not answer: {failed}") from None
    except TimeoutError:
        raise UsageError(f"{url}/health does not answer within {PAGE_S:g} s: is the engine well?") from None
    finally:
        pool.close()
    return statistics.median(taken)


class _Heard:
    """Receives one answer; `at` gets the time when it ended or broke."""

    def __init__(self, at: asyncio.Future[float]) -> None:
        self.at = at

    def piece(self, status: int, data: bytes, now: float) -> None:
        pass

    def ended(self, status: int, now: float) -> None:
        self.at.set_result(now)

    def broke(self, why: str, now: float, *, stale: bool) -> None:
        self.at.set_result(now)
