"""The candidates for a leg: the same for every rival, so that rivals differ by their own rule only.

Instances of role both serve whole requests, as aggregated workers do; prefill and decode instances serve pairs. In a
fleet that has both kinds, instances of role both are candidates for either leg. A request whose prompt goes to one of
them stays there, unless the rule for answers finds a decode instance better. No rival's description knows such fleets;
this is its own rule over the longer lists.

A full instance is no candidate: agents' credits hold for rivals as for Baton (the same admission). So rivals that
choose at once in their own products get a queue at the router here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cluster.instance import Role
from router.core.arrays import Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot
from router.scheduler.scoring.filters import of_role, ready, with_place

Pick = Callable[[Ints], int]
"""Chooses one of these rows, of which there is at least one."""

_WHOLE = (Role.BOTH, Role.DECODE, Role.PREFILL)
_ONE_TOKEN = (Role.PREFILL, Role.BOTH, Role.DECODE)


def by_rule(fleet: FleetSnapshot, wanted: Wanted, rule: str, prefill: Pick, decode: Pick, whole: Pick) -> Chosen:
    """A pair where there are both pools, else one instance for all of it, each picked among those with a place."""
    found = ready(fleet, wanted)
    if not len(found.any):
        return Chosen(None, None, "no ready instance serves this model")
    prefills, decodes = of_role(found, Role.PREFILL), of_role(found, Role.DECODE)
    boths = of_role(found, Role.BOTH)
    if wanted.hand_over and len(boths) and (len(prefills) or len(decodes)):
        prefills, decodes, boths = (with_place(fleet, rows, wanted) for rows in (prefills, decodes, boths))
        return _with_boths(fleet, rule, (prefills, decodes, boths), prefill, decode)
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


def _with_boths(fleet: FleetSnapshot, rule: str, rows: tuple[Ints, Ints, Ints], prefill: Pick, decode: Pick) -> Chosen:
    """A pair, or one instance of role both; `rows`: prefill, decode and both instances that have a place."""
    prefills, decodes, boths = rows
    answering = np.concatenate([decodes, boths])
    prompting = np.concatenate([prefills if len(answering) else prefills[:0], boths])
    if not len(prompting):
        return Chosen(None, None, "every instance for prompts, or for their answers, is full", wait=True)
    first = prefill(prompting)
    if first in boths:
        answering = np.append(decodes, first)
    second = decode(answering) if len(answering) > 1 else int(answering[0])
    if first == second:
        return Chosen(None, fleet.at(first).id, f"{rule}: whole on {fleet.at(first).id}")
    one, other = fleet.at(first).id, fleet.at(second).id
    return Chosen(one, other, f"{rule}: prefill on {one}, decode on {other}")
