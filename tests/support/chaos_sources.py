"""Choices with a source for every prompt: the policies of chaos rows have each prefix pulled.

Prices would choose sources for few of these prompts: mocks compute them in no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from router.core.events import Chosen, PrefixSource
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.policies import POLICIES

WAITS_S: Final = (0.3, 0.02, 0.6)

COLD_S: Final = 0.1
"""The expected time of a prompt without a source, where pulls stand still: some ten times what mocks take."""

_HANDS_OVER: Final = POLICIES["least_load"]


def with_sources(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The choice of `least_load`, with a source that follows from the prompt."""
    return sourced(fleet, _HANDS_OVER(fleet, wanted), wanted.prompt_tokens, WAITS_S)


def patient_sources(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The same with a cold time, so that a leg that pulls has a turn."""
    return timed(with_sources(fleet, wanted))


def aggregated_with_sources(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """Serve each request on one instance. A stream has a source that follows from its arrival, and is served elsewhere
    if there is room. (The longest time of an answer in one piece is not known.)
    """
    whole = replace(wanted, hand_over=False)
    able = [each.id for each in fleet if each.ready and each.instance.role.decodes]
    if able and wanted.streamed:
        there = able[int(wanted.arrived * 1000) % len(able)]
        chosen = _HANDS_OVER(fleet, replace(whole, excluded=wanted.excluded | {there}))
        if chosen.decode is not None:
            return timed(replace(chosen, source=PrefixSource(there, 64, WAITS_S[0])))
    return _HANDS_OVER(fleet, whole)


def timed(chosen: Chosen) -> Chosen:
    """The choice with a cold time for its source, if it has one."""
    return chosen if chosen.source is None else replace(chosen, source=replace(chosen.source, cold_s=COLD_S))


def sourced(fleet: FleetSnapshot, chosen: Chosen, at: int, waits_s: Sequence[float]) -> Chosen:
    """This choice with a source for the instance that computes the prompt: every second time the request's D, else any
    other instance, whether it has the prefix or not. `at`: a number of the prompt; `waits_s`: the waits, one of which
    is taken.
    """
    puller = chosen.prefill or chosen.decode
    ready = [each.id for each in fleet if each.ready and each.id != puller]
    if chosen.decode is None or not ready:
        return chosen
    there = chosen.decode if at % 2 and chosen.decode in ready else ready[at % len(ready)]
    return replace(chosen, source=PrefixSource(there, 64, waits_s[at % len(waits_s)]))
