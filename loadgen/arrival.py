"""One request to send. Every trace reader and every generator yields these, in order of time."""

from __future__ import annotations

import msgspec

SPAN_MAX_S = 1e9
"""The longest load: 31 years. Simulated clocks count nanoseconds in 64 bits."""


class Arrival(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A request's arrival and size. The prompt's text is not part of it: `loadgen.prompts` makes one."""

    at_s: float
    """Seconds since the start of the load, 0 or more."""
    input_tokens: int
    """Prompt length in tokens, 0 or more (a sender sends at least one)."""
    output_tokens: int
    """Tokens to generate, as the original request did; 0 if the original request failed."""
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's blocks from its beginning; two prompts share text as long as their ids agree."""
    block_tokens: int = 0
    """Tokens of each block in `prefix`; 0 if there is none. The last block may be shorter."""
    session: str | None = None
    """The conversation that the request belongs to."""
    turn: int | None = None
    """The number of this turn in the conversation, from 1."""
    tenant: str | None = None
    """The sender: a tenant, or a trace's client."""
    kind: str | None = None
    """The trace's name for this sort of request (text, search, API log ...)."""
    slo_class: str | None = None
    """The request's latency class, sent as `x-slo-class`."""


class BadRow(msgspec.Struct, frozen=True):
    """A row that breaks its format. Readers yield it in place of an arrival and go on."""

    line: int
    """Counted from 1, the header included; 0 if the whole file is at fault."""
    what: str
    """The fault, with the value."""
    file: str | None = None
    """The file, if the trace is a folder."""

    def __str__(self) -> str:
        """`FILE: line 7: what is wrong`, as far as known."""
        where = [self.file] if self.file else []
        return ": ".join([*where, *([f"line {self.line}"] if self.line else []), self.what])


Row = Arrival | BadRow
