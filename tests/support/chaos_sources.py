"""A policy for chaos rows with sources: it hands over, and has every prompt's beginning pulled from some instance.

Prices would choose sources for few of these prompts: mocks compute them in no time. The source may have the beginning
or not, may be the D of the same request, and is waited for shortly, long, or longer than a client's patience.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from router.core.events import Chosen, PrefixSource
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.policies import POLICIES

WAITS_S: Final = (0.3, 0.02, 0.6)

_HANDS_OVER: Final = POLICIES["least_load"]


def with_sources(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The choice of `least_load`, with a source that follows from the prompt."""
    chosen = _HANDS_OVER(fleet, wanted)
    puller = chosen.prefill or chosen.decode
    ready = [each.id for each in fleet if each.ready and each.id != puller]
    if chosen.decode is None or not ready:
        return chosen
    at = wanted.prompt_tokens
    there = chosen.decode if at % 2 and chosen.decode in ready else ready[at % len(ready)]
    return replace(chosen, source=PrefixSource(there, 64, WAITS_S[at % len(WAITS_S)]))
