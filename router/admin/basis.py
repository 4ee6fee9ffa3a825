"""What a router's predictions rest on: what it was told, what it has measured, and what it assumes. Pure.

*told*: by the cluster file, a cost profile, or an engine's own report. *learned*: measured here, often enough to be
trusted. *assumed*: default numbers, until there is something better. What was told or assumed is corrected by
measurements all the while; the factor says by how much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from router.fleet.columns import InstanceView
from router.fleet.snapshot import FleetSnapshot
from router.predict.predictors import RequestPredictor
from router.predict.step_model import ASSUMED, LEARNED, TIER_GB_S, TOLD, UNKNOWN

ORIGINS: Final = (TOLD, LEARNED, ASSUMED)


class Basis(NamedTuple):
    """What one kind of prediction rests on at one instance."""

    origin: str
    seen: int
    """The number of measurements."""
    factor: float = 1.0
    """The measured time over the time that was told or assumed."""

    def as_json(self) -> dict[str, Any]:
        """For `/ui/data`."""
        return {"from": self.origin, "seen": self.seen, "factor": round(self.factor, 3)}


class _Kind(NamedTuple):
    """One kind of prediction, in words for operators."""

    name: str
    title: str
    assumed: str
    """The default numbers."""


KINDS: Final = (
    _Kind("prompts", "time of a prompt", "an 8B model on an H100"),
    _Kind("steps", "time of a decode step", "an 8B model on an H100"),
    _Kind("transfers", "time of a hand-over's transfer", "three decode steps and 3 ms; no time for the bytes"),
    _Kind("memory", "size of the KV cache", f"{UNKNOWN.capacity_tokens:,} tokens"),
    _Kind(
        "tiers",
        "time to load from host memory or disk",
        " and ".join(f"{rate:g} GB/s from {tier}" for tier, rate in TIER_GB_S.items()),
    ),
)
_LENGTHS: Final = _Kind("lengths", "length of an answer", "a prior of chats and completions, up to `max_tokens`")
_TOKENS: Final = _Kind("tokens", "tokens of a prompt", "bytes per token of common kinds of text")


def of_instance(fleet: FleetSnapshot, seen: InstanceView) -> dict[str, Basis]:
    """What predictions at this instance rest on, by names of `KINDS`: prompts only where it computes prompts, steps
    and transfers only where it answers, tiers only where there are some.
    """
    model, row, role = fleet.inflight.step_model, seen.row, seen.role
    speed, told = model.rows[row], model.make(row) is not UNKNOWN
    found = {}
    if role.prefills or speed.prompts.count:
        factor = speed.prefill_factor
        found["prompts"] = Basis(speed.prompts_from(), int(speed.prompts.count), factor)
    if role.decodes or speed.steps_seen:
        found["steps"] = Basis(speed.steps_from(), speed.steps_seen, speed.decode_factor)
    if role.decodes:
        pulled = fleet.inflight.pulls(row).seen
        found["transfers"] = Basis(TOLD if told else LEARNED if pulled else ASSUMED, pulled)
    found["memory"] = Basis(TOLD if told or seen.load.kv_tokens else ASSUMED, 0)
    if speed.tiers:
        found["tiers"] = Basis(speed.tiers_from(), 0)
    return found


def of_fleet(fleet: FleetSnapshot, instances: Sequence[InstanceView]) -> list[dict[str, Any]]:
    """For each kind of prediction: these instances counted by origin, and the default numbers if some assume them."""
    each = [of_instance(fleet, seen) for seen in instances]
    return [_told(kind, Counter(bases[kind.name].origin for bases in each if kind.name in bases)) for kind in KINDS]


def of_requests(predictor: RequestPredictor | None) -> list[dict[str, Any]]:
    """As `of_fleet`, for predictions that do not depend on an instance: learned from answers that ended. Empty without
    a predictor.
    """
    if predictor is None:
        return []
    lengths, tokens = predictor.learned
    return [
        _told(kind, Counter({LEARNED if seen else ASSUMED: 1})) | {"seen": seen}
        for kind, seen in ((_LENGTHS, lengths), (_TOKENS, tokens))
    ]


def _told(kind: _Kind, counts: Counter[str]) -> dict[str, Any]:
    origins = {origin: counts[origin] for origin in ORIGINS}
    return {"name": kind.name, "title": kind.title, **origins, "assumes": kind.assumed if counts[ASSUMED] else ""}
