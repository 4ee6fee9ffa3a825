"""The result of one request: one line of JSON each, which `loadgen.traces.own` reads back as an arrival. Pure.

All times are seconds since the start of the load. docs/load.md has the schema.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from loadgen.arrival import Arrival

INTERRUPTED = "interrupted"
"""The error of a request that the sender cut itself (Ctrl-C): it says nothing of the server."""


class Record(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One request, sent or cut. Fields up to `slo_class` are the arrival's own.

    It has many fields because it is one line of a file, which later programs read without the load.
    """

    request: int
    """Its number in this load, from 0, in order of intended time."""
    at_s: float
    """The intended moment: when it was due to be sent."""
    input_tokens: int
    output_tokens: int
    """Tokens that were asked for. The server's own counts are `prompt_tokens` and `completion_tokens`."""
    prefix: tuple[int, ...] = ()
    block_tokens: int = 0
    session: str | None = None
    turn: int | None = None
    tenant: str | None = None
    kind: str | None = None
    slo_class: str | None = None

    sent_s: float
    """When sending began; a connection, if needed, comes after. `sent_s - at_s` is the sender's own lateness."""
    first_byte_s: float | None = None
    """First byte of the answer's body."""
    first_token_s: float | None = None
    second_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float
    """When the answer was complete, or given up."""
    status: int | None = None
    """HTTP status; None if no answer came."""
    error: str | None = None
    """None if the answer is whole; docs/load.md has the kinds."""
    detail: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """Tokens of prompt and answer as the server's `usage` counts them; None: the server sent none."""
    chunks: int = 0
    """Events that carried a token."""
    held_back: bool = False
    """Whether `--max-concurrency` kept it from being sent in time."""
    resent: bool = False
    """Whether the server closed the idle connection that it was sent on first, so that it was sent again on a new
    one."""
    closed_loop: bool = False
    """Whether it waited for its conversation's previous answer (`--sessions`): a slow server then gets less work."""
    timing: dict[str, Any] | None = None
    """The router's own breakdown of the time, in milliseconds (docs/timing.md)."""
    token_s: tuple[float, ...] = ()
    """When each chunk came; only with `--token-times`."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the intended moment to the first token: includes any wait that a slow server causes."""
        return None if self.first_token_s is None else self.first_token_s - self.at_s

    @property
    def ttft_sent_s(self) -> float | None:
        """Seconds from the real sending to the first token, as tools that hide their own lateness count it."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tt2t_s(self) -> float | None:
        """Seconds from the first token to the second: the hand-over lies in between."""
        if self.first_token_s is None or self.second_token_s is None:
            return None
        return self.second_token_s - self.first_token_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None for an answer of one token."""
        tokens = self.tokens
        if self.first_token_s is None or self.last_token_s is None or tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Seconds from the intended moment to the end of the answer."""
        return self.end_s - self.at_s

    @property
    def tokens(self) -> int:
        """Tokens generated: from `usage`, or else the number of chunks."""
        return self.chunks if self.completion_tokens is None else self.completion_tokens


class Timings(msgspec.Struct, frozen=True):
    """The sender's times of one request, in seconds since the start of the load."""

    sent_s: float
    first_byte_s: float | None
    end_s: float
    token_s: array[float]
    """One for each chunk with a token."""


def record_of(number: int, arrival: Arrival, timings: Timings, *, token_times: bool = False) -> Record:
    """The record of an arrival and its times; the caller fills in the server's answer."""
    times = timings.token_s
    return Record(
        request=number,
        **{name: getattr(arrival, name) for name in Arrival.__struct_fields__},
        sent_s=_rounded(timings.sent_s),
        first_byte_s=None if timings.first_byte_s is None else _rounded(timings.first_byte_s),
        first_token_s=_rounded(times[0]) if times else None,
        second_token_s=_rounded(times[1]) if len(times) > 1 else None,
        last_token_s=_rounded(times[-1]) if times else None,
        end_s=_rounded(timings.end_s),
        chunks=len(times),
        token_s=tuple(map(_rounded, times)) if token_times else (),
    )


def line_of(record: Record) -> bytes:
    """The record as a line of JSON, with its line feed."""
    return msgspec.json.encode(record) + b"\n"


def _rounded(seconds: float) -> float:
    """Rounded to the microsecond, the accuracy of a clock that Python reads."""
    return round(seconds, 6)
