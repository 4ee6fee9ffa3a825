"""What a router has counted of its requests since it began: arrivals, lengths, attainment, by model and class. Pure.

Counters only ever grow, so that a reader may miss any number of announcements: it takes the difference of two it has
heard. A router that starts anew announces itself under another agent's id, and begins at 0 there (`goodput.routers`).

Lengths are counted in the buckets of `goodput.sketch`; the sums beside them are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

SERIES_MAX: Final = 12
"""Pairs of model and class that a router counts apart; what comes later is counted together as `OTHERS`. The first ones
stay, so that no counter ever shrinks."""

OTHERS: Final = "*"

NAME_CHARS_MAX: Final = 128
"""Longest name of a model or class that is announced; a longer one's requests are among the others."""

BUCKETS_MAX: Final = 256
"""Lengths that are told apart; 2^32 tokens are in the 160th bucket."""

Total = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Bucket = Annotated[int, msgspec.Meta(ge=0, lt=BUCKETS_MAX)]
Buckets = Annotated[dict[_Bucket, Total], msgspec.Meta(max_length=BUCKETS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Of one model's requests of one class, since the router began."""

    model: Name
    slo_class: Name = ""
    """Empty: best effort."""
    arrivals: Total = 0
    """Everything that asked for this model with a right to: those that were shed afterwards, too."""
    prompt_tokens: Total = 0
    """Of all arrivals, as estimated when they came."""
    prompts: Buckets = field(default_factory=dict)
    """Arrivals by length of their prompt."""
    cached_tokens: Total = 0
    """Of the prompts whose engine has said so, tokens that came out of its prefix cache, and..."""
    computed_tokens: Total = 0
    """... those that did not."""
    ended: Total = 0
    """Arrivals that are over, however they ended; the others are in line or being answered."""
    answer_tokens: Total = 0
    answers: Buckets = field(default_factory=dict)
    """Those that were answered, by tokens of their answer."""
    met: Total = 0
    missed: Total = 0
    shed: Total = 0
    late_first: Total = 0
    """Of those that were missed or shed: the ones whose first token was late or never came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What waits for a place at a router now, of one model."""

    model: Name
    waiting: Total
    oldest_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    """Since when the oldest of them has been waiting."""
