"""The candidates for a leg: the same for every rival, so that rivals differ by their own rule only.

Instances of role both serve whole requests, as aggregated workers do; prefill and decode instances serve pairs. A full
instance is no candidate: the agents' credits hold for rivals as for Baton (the same admission), which gives a queue at
the router to those that choose at once in their own products.
"""

from __future__ import annotations

from collections.abc import Callable

from cluster.instance import Role
from router.core.arrays import Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.filters import of_role, ready, with_place

Pick = Callable[[Ints], int]
"""One of these rows; there is at least one."""

_WHOLE = (Role.BOTH, Role.DECODE, Role.PREFILL)
_ONE_TOKEN = (Role.PREFILL, Role.BOTH, Role.DECODE)


def by_rule(fleet: FleetSnapshot, wanted: Wanted, rule: str, prefill: Pick, decode: Pick, whole: Pick) -> Chosen:
    """A pair where there are both pools, else one instance for all of it, each picked among those with a place."""
    found = ready(fleet, wanted)
    if not len(found.any):
        return Chosen(None, None, "no ready instance serves this model")
    prefills, decodes = of_role(found, Role.PREFILL), of_role(found, Role.DECODE)
    if wanted.hand_over and len(prefills) and len(decodes):
        prefills, decodes = with_place(fleet, prefills, wanted), with_place(fleet, decodes, wanted)
        if not len(prefills) or not len(decodes):
            return Chosen(None, None, "every prefill or every decode instance is full", wait=True)
        first, second = fleet.at(prefill(prefills)).id, fleet.at(decode(decodes)).id
        return Chosen(first, second, f"{rule}: prefill on {first}, decode on {second}")
    for role in _ONE_TOKEN if wanted.prefill_only else _WHOLE:
        rows = with_place(fleet, of_role(found, role), wanted)
        if len(rows):
            alone = fleet.at(whole(rows)).id
            return Chosen(None, alone, f"{rule}: whole on {alone}")
    return Chosen(None, None, "every instance is full", wait=True)
