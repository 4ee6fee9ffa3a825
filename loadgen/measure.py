"""Chooses requests that show what an engine's steps cost, and turns their times into rows for a fit. Pure.

There are two kinds of points. A *prompt* is sent alone, a few times: its time to the first token is a prefill step plus
the way there and back. *Streams* are sent together. After the last of them has its first token, and until the first of
them ends, every step of the engine decodes one token for each. The time between two tokens is then that step.

This method does not see inside a step. A prompt longer than the engine's token budget per step (vLLM's
``max_num_batched_tokens``) is several steps; `EngineLimits.prompt_tokens` has to stay within it. Prompts are new to the
engine each time, so that its prefix cache has no part. Prompts of streams repeat from one batch size to the next, where
a cached prefill only saves time.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from costs.fit import DecodeRow, PrefillRow
from costs.step import KNEE_TOKENS, prompt
from loadgen.arrival import Arrival
from loadgen.record import Record

SMALL_PROMPTS = (16, 64, 256, 640)
"""Prompt lengths in tokens below the knee: they show the floor."""

LARGE_PROMPTS = 6
"""Lengths from just above the knee to the longest, at equal factors."""

KNEE_MARGIN = 1.05
"""Prompts made of text come out a few percent off; the shortest large one must still lie beyond the knee."""

PROMPT_TIMES = 5
"""Repetitions of each prompt. The first one, which also opens a connection, does not count. Of the others the second
fastest counts: other programs can only add to a time, and the single fastest one might be luck."""

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Streams at once, after prompts of `SHORT_CONTEXT` tokens."""

SHORT_CONTEXT, LONG_BATCHES = 128, (1, 8, 32)
"""Tokens of a short prompt; streams at once after prompts of half and of all of `EngineLimits.prompt_tokens`."""

STEPS = 32
"""Decode steps of a stream point, after all its prompts are done."""

SPANS = 3
"""A step is the median over spans of a third of the steps, not over single steps. Timers and networks round single gaps
to a millisecond, and a stall lies in less than half of the spans."""

CHUNK_TOKENS = 2048
"""vLLM's smallest usual token budget per step: while a batch's prompts come in, its first streams already run."""

STEPS_LEAST = 8
"""Fewest steps that all streams have in common; with fewer the point is rejected."""

KV_SHARE = 0.8
"""Largest part of an engine's KV cache that a point uses: with more, the engine may preempt."""

_PREFILL = re.compile(r"^vllm:request_prefill_time_seconds_(sum|count)(?:\{.*\})? ([0-9.eE+-]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What one engine can take; every point stays within it."""

    prompt_tokens: int
    """Longest prompt to try, within one step's token budget and the model's context."""
    context_tokens: int
    """The model's longest context."""
    batch: int
    """Most streams at once."""
    kv_tokens: int | None = None
    """Tokens that the engine's KV cache holds; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompts of one length, one after the other."""

    tokens: int
    times: int = PROMPT_TIMES

    def __str__(self) -> str:
        return f"prompt of {self.tokens:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """`batch` answers at once, each of `steps` decode steps after a prompt of `context` tokens."""

    batch: int
    context: int
    steps: int

    def __str__(self) -> str:
        return f"{self.batch} streams after {self.context:,} tokens"


Point = Prompt | Streams


@dataclass(frozen=True, slots=True)
class Rejected:
    """A point without a result, and why."""

    why: str


def too_short(limits: EngineLimits) -> str | None:
    """Why these limits allow no fit of prefill; None if they do."""
    if limits.prompt_tokens < KNEE_TOKENS * KNEE_MARGIN * 1.5:
        need = math.ceil(KNEE_TOKENS * KNEE_MARGIN * 1.5)
        return f"prompts go up to {limits.prompt_tokens:,} tokens; a fit needs {need:,} and more"
    return None


def points(limits: EngineLimits) -> list[Point]:
    """The points to measure. Each half of the list would do for a rough fit, so a run that is cut short still gives
    one.
    """
    first, last = KNEE_TOKENS * KNEE_MARGIN, limits.prompt_tokens
    large = [round(first * (last / first) ** (at / (LARGE_PROMPTS - 1))) for at in reversed(range(LARGE_PROMPTS))]
    prompts = [Prompt(tokens=tokens) for tokens in (*large, *SMALL_PROMPTS)]
    streams = list(_streams(limits))
    return [*prompts[::2], *streams[::2], *prompts[1::2], *streams[1::2]]


def _streams(limits: EngineLimits) -> Iterator[Streams]:
    batches = [each for each in BATCHES if each <= limits.batch]
    long = limits.prompt_tokens
    wanted = [(batch, SHORT_CONTEXT) for batch in batches]
    wanted += [(batch, context) for batch in LONG_BATCHES if batch in batches for context in (long // 2, long)]
    for batch, context in wanted:
        steps = STEPS + math.ceil(batch * context / CHUNK_TOKENS)
        room = limits.context_tokens - steps - 1
        if limits.kv_tokens is not None:
            room = min(room, int(KV_SHARE * limits.kv_tokens / batch) - steps)
        if room >= SHORT_CONTEXT // 2:
            yield Streams(batch=batch, context=min(context, room), steps=steps)


def arrivals(point: Point) -> list[Arrival]:
    """The arrivals of one point, all at second 0. The sender sends a `Prompt`'s one after the other."""
    if isinstance(point, Prompt):
        return [Arrival(0.0, point.tokens, 1)] * point.times
    return [Arrival(0.0, point.context, point.steps + 1, prefix=(number,), block_tokens=point.context)
            for number in range(point.batch)]  # fmt: skip


def prefill_row(records: Sequence[Record]) -> PrefillRow | Rejected:
    """Prompts of one length → the second fastest time to the first token: a step plus the way there and back."""
    good = [each for each in records if each.error is None and each.ttft_sent_s is not None and not each.resent]
    if len(good) < 2:
        return Rejected(_failure(records) or "not enough answers")
    later = good[1:]
    tokens = round(statistics.median(_prompt_tokens(each) for each in later))
    times = sorted(1000 * (each.ttft_sent_s or 0.0) for each in later)
    work = prompt(tokens)
    return PrefillRow(work.new_tokens, work.area, times[min(1, len(times) - 1)])


def less(row: PrefillRow, way_ms: float) -> PrefillRow | Rejected:
    """The row without the way there and back (`way_ms`, milliseconds): the step alone."""
    if row.ms <= way_ms:
        return Rejected(f"its first token came within the {way_ms:.2f} ms that others take beside their step")
    return row._replace(ms=row.ms - way_ms)


def way_ms(records: Sequence[Record], before: PrefillSeconds | None, after: PrefillSeconds | None) -> float | None:
    """Milliseconds of a first token besides its step, by the engine's own clock; None if the engine does not report it.

    The engine sums up, over requests, the time from scheduling to the first token. The rest of the time that the sender
    measures is the server's other work (tokenising, answering) and the network.
    """
    times = [each.ttft_sent_s for each in records if each.error is None and each.ttft_sent_s is not None]
    if before is None or after is None or not times or after.requests - before.requests != len(times):
        return None
    return 1000 * (sum(times) - (after.total_s - before.total_s)) / len(times)


def decode_row(records: Sequence[Record]) -> DecodeRow | Rejected:
    """Streams that ran at once → one step: the median time between tokens while all of them decoded."""
    if any(each.error is not None for each in records) or not records:
        return Rejected(_failure(records) or "no answers")
    if any(each.chunks != each.tokens for each in records):
        return Rejected("events carry more than one token each")
    if not all(each.token_s for each in records):
        return Rejected("an answer ended without a token")
    begin = max(each.token_s[0] for each in records)
    end = min(each.token_s[-1] for each in records)
    steps: list[float] = []
    contexts: list[float] = []
    for each in records:
        within = [number for number, at in enumerate(each.token_s) if begin <= at <= end]
        if len(within) <= STEPS_LEAST:
            common = max(0, len(within) - 1)
            return Rejected(f"only {common} steps had all {len(records)} streams in them; is that batch too large?")
        span = max(1, (len(within) - 1) // SPANS)
        steps += [(each.token_s[at + span] - each.token_s[at]) / span for at in within[:-span]]
        contexts.append(_prompt_tokens(each) + statistics.fmean(within[:-1]) + 1)
    return DecodeRow(len(records), sum(contexts), 1000 * statistics.median(steps))


def _prompt_tokens(record: Record) -> int:
    return record.input_tokens if record.prompt_tokens is None else record.prompt_tokens


def _failure(records: Sequence[Record]) -> str | None:
    return next((f"{each.error}: {each.detail}" for each in records if each.error is not None), None)


class PrefillSeconds(NamedTuple):
    """vLLM's ``request_prefill_time_seconds`` of all requests that have ended."""

    total_s: float
    requests: int


def prefill_seconds(metrics: str) -> PrefillSeconds | None:
    """`PrefillSeconds` from the text of an engine's ``/metrics``, summed over its ranks; None: the text lacks it."""
    found = _PREFILL.findall(metrics)
    if not found:
        return None
    total_s = sum(float(value) for kind, value in found if kind == "sum")
    return PrefillSeconds(total_s, round(sum(float(value) for kind, value in found if kind == "count")))


def expected_s(point: Point, prefills: Sequence[PrefillRow], decodes: Sequence[DecodeRow]) -> float:
    """Rough seconds that a point takes, from the rows so far: it keeps a run within its time budget."""
    per_token = max((row.ms / row.new_tokens for row in prefills if row.new_tokens >= KNEE_TOKENS), default=0.0)
    if isinstance(point, Prompt):
        return point.times * point.tokens * per_token / 1000
    step = max((row.ms * max(1.0, point.batch / row.batch) ** 0.5 for row in decodes), default=0.0)
    return (point.batch * point.context * per_token + point.steps * step) / 1000
