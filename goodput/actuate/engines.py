"""Heartbeats of data parallel ranks folded into one heartbeat for each engine. Pure.

Routers choose ranks; controllers start and end engines, so a rank never exists without the others of its engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from cluster.ids import InstanceId, engine_of
from cluster.instance import total_load
from cluster.registry.membership import Heartbeat, MemberState

_ORDER: Final = (
    MemberState.GONE,
    MemberState.FAILED,
    MemberState.STOPPING,
    MemberState.DRAINING,
    MemberState.RESTARTING,
    MemberState.STARTING,
    MemberState.READY,
)
"""An engine is in the first of these states that one of its ranks is in."""


def by_engine(beats: Iterable[Heartbeat]) -> dict[str, Heartbeat]:
    """By engine, a heartbeat as if it had no ranks: loads, credits and holds are summed."""
    ranks: dict[InstanceId, list[Heartbeat]] = {}
    for beat in beats:
        ranks.setdefault(engine_of(beat.id), []).append(beat)
    return {str(engine): _one(engine, each) for engine, each in ranks.items()}


def _one(engine: InstanceId, ranks: Sequence[Heartbeat]) -> Heartbeat:
    if len(ranks) == 1 and ranks[0].id == engine:
        return ranks[0]
    least = min(ranks, key=lambda beat: _ORDER.index(beat.state))
    return replace(
        least,
        id=engine,
        epoch=max(beat.epoch for beat in ranks),
        load=total_load([beat.load for beat in ranks]),
        credits=sum(beat.credits for beat in ranks),
        holds=sum(beat.holds for beat in ranks),
    )
