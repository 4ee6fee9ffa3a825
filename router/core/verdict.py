"""How a request may be served: what `router.core.eligibility` says of it. Pure.

They stand apart since compiled modules can have no such classes (docs/compiled.md).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Way(StrEnum):
    """How a request is served, the most that is exact for it."""

    SEEDED = "seeded"
    PLAIN = "plain"
    WHOLE = "aggregated"


class Verdict(msgspec.Struct, frozen=True):
    """What may be done to one request."""

    way: Way
    because: str
    """Which rule says so; empty for *seeded*."""
    resumable: bool
