"""Counters of a router's requests since it started: arrivals, lengths, attainment, by model and class. Pure.

Counters only grow, so that a reader may miss any number of announcements: the reader takes the difference of two that
it has read. A router that starts anew announces itself under another agent's id, and its counters begin at 0
(`goodput.counters`).

Lengths are counted in the buckets of `goodput.sketch`; the sums beside them are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

SERIES_MAX: Final = 12
"""Pairs of model and class that a router counts apart; later pairs are counted together as `OTHERS`. The first pairs
stay, so that no counter ever shrinks."""

OTHERS: Final = "*"
"""The model of the pairs that are counted together."""

NAME_CHARS_MAX: Final = 128
"""Longest announced name of a model or class; requests with a longer one count among the others."""

BUCKETS_MAX: Final = 256
"""Most buckets of lengths; 2^32 tokens are in the 160th."""

Total = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Bucket = Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS_MAX)]
Buckets = Annotated[dict[_Bucket, Total], msgspec.Meta(max_length=BUCKETS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowCounts:
    """Counters of one model's requests of one class, since the router started.

    It has many fields because it is one JSON object of a heartbeat.
    """

    model: Name
    """Of a LoRA adapter its model."""
    slo_class: Name = ""
    """Empty: best effort."""
    arrivals: Total = 0
    """All requests that may use this model, including those that were shed afterwards."""
    prompt_tokens: Total = 0
    """Prompt tokens of all arrivals, as estimated on arrival."""
    prompts: Buckets = field(default_factory=dict)
    """Arrivals by length of the prompt."""
    cached_tokens: Total = 0
    """Prompt tokens that engines found in their prefix caches. Only prompts whose engine reports it count, here and in
    `computed_tokens`."""
    computed_tokens: Total = 0
    """Prompt tokens that engines computed."""
    ended: Total = 0
    """Arrivals that have ended, in whatever way; the others wait or are being answered."""
    answer_tokens: Total = 0
    """Tokens of all answers whose engine counted them."""
    answers: Buckets = field(default_factory=dict)
    """Answered requests, by tokens of the answer."""
    met: Total = 0
    """Ended requests that met every target of their class. `missed` and `shed` count the others; best effort counts in
    none of the three."""
    missed: Total = 0
    shed: Total = 0
    late_first: Total = 0
    """Of the missed or shed requests: those whose first token was late or never came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Requests of one model that wait for a place at a router now."""

    model: Name
    waiting: Total
    oldest_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    """Age of the oldest of them, seconds."""
