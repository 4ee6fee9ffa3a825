"""One request that wants to be sent. Every trace reader and every generator gives these, in order of time."""

from __future__ import annotations

import msgspec


class Arrival(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A request's arrival and size. What its text says is not part of it: `loadgen.prompts` makes that up."""

    at_s: float
    """Seconds since the start of the load, 0 or more."""
    input_tokens: int
    """Prompt length in tokens, 0 or more (a sender makes at least one of it)."""
    output_tokens: int
    """Tokens that were, or are to be, generated; 0 where the original request failed."""
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's blocks from its beginning; two prompts share text as long as their ids agree."""
    block_tokens: int = 0
    """Tokens behind each id of `prefix`; 0 where there is none. The last block may be shorter."""
    session: str | None = None
    """The conversation it belongs to."""
    turn: int | None = None
    """Which turn of that conversation, from 1."""
    tenant: str | None = None
    """Who sent it: a tenant, or a trace's client."""
    kind: str | None = None
    """What the trace calls this sort of request (text, search, API log ...)."""
    slo_class: str | None = None
    """Its latency class, sent as `x-slo-class`."""


class BadRow(msgspec.Struct, frozen=True):
    """A row that is not what its format promises. Readers give it in place of an arrival and go on."""

    line: int
    """Counted from 1, the header included; 0 where the fault is the whole file's."""
    what: str
    """What is wrong, with the value."""
    file: str | None = None
    """Where the trace is a folder: which file of it."""

    def __str__(self) -> str:
        """`FILE: line 7: what is wrong`, as far as known."""
        where = [self.file] if self.file else []
        return ": ".join([*where, *([f"line {self.line}"] if self.line else []), self.what])


Row = Arrival | BadRow
