"""Policy `least_load`: send each leg where the fewest of this router's legs run."""

from __future__ import annotations

import numpy as np

from cluster.instance import Role
from router.core.arrays import Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.columns import InstanceView
from router.fleet.snapshot import FleetSnapshot, ReadyRows
from router.scheduler.scoring.filters import least, of_role, ready, saturation_of, with_place


def least_load(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The least loaded prefill instance and the least loaded decode instance, or one instance for the whole request.

    The router's own legs count first: they are known exactly and at once. The engine's reported queue and KV usage
    break ties, then the number of legs ever sent, so that idle twins take turns (Dynamo issue 7836: two of five
    decoders got nothing).
    """
    found = ready(fleet, wanted)
    if not len(found.any):
        return Chosen(None, None, "no ready instance serves this model")
    kinds = _able(fleet, fleet.pairing.kinships(found)) if wanted.hand_over else []
    if kinds:
        pair = _least_of_all(fleet, kinds)
        # Then it is also the least of those with a place.
        if saturation_of(wanted) is None and all(view.has_place(wanted.routers) for view in pair):
            return _handed_over(*pair)
        kinds = _able(fleet, [(with_place(fleet, p, wanted), with_place(fleet, d, wanted)) for p, d in kinds])
        if not kinds:
            return Chosen(None, None, "every prefill or every decode instance is full", wait=True)
        return _handed_over(*_least_of_all(fleet, kinds))
    alone = _least_alone(fleet, found, wanted)
    if alone is None:
        return Chosen(None, None, "every instance is full", wait=True)
    why = "not handed over" if not wanted.hand_over else _missing(fleet, found)
    return Chosen(None, alone.id, f"{why}: whole on {_say(alone)}")


def _handed_over(prefill: InstanceView, decode: InstanceView) -> Chosen:
    return Chosen(prefill.id, decode.id, f"least load: {_say(prefill)}, {_say(decode)}")


def _splits(prefills: Ints, decodes: Ints) -> bool:
    """Whether there are two different instances for the two legs."""
    if not len(prefills) or not len(decodes):
        return False
    return len(prefills) > 1 or len(decodes) > 1 or bool(prefills[0] != decodes[0])


def _able(fleet: FleetSnapshot, kinds: list[tuple[Ints, Ints]]) -> list[tuple[Ints, Ints]]:
    """For each kind, the rows that may prefill and the rows that pull from one of them; empty kinds are left out."""
    takers = [(prefills, _takers(fleet, prefills, decodes)) for prefills, decodes in kinds]
    return [(prefills, decodes) for prefills, decodes in takers if _splits(prefills, decodes)]


def _least_of_all(fleet: FleetSnapshot, kinds: list[tuple[Ints, Ints]]) -> tuple[InstanceView, InstanceView]:
    """The least loaded pair of each kind, and of these the pair whose decode instance is least loaded."""
    if len(kinds) == 1:
        return _least_pair(fleet, *kinds[0])
    pairs = {decode.row: (prefill, decode) for prefill, decode in (_least_pair(fleet, *kind) for kind in kinds)}
    best = _least(fleet, np.array(sorted(pairs), dtype=np.int64))
    assert best is not None
    return pairs[best.row]


def _takers(fleet: FleetSnapshot, prefills: Ints, decodes: Ints) -> Ints:
    """The decode rows that pull from at least one of these: nearly always all of them."""
    if not fleet.pairing.parted:
        return decodes
    return decodes[[any(not fleet.pairing.apart(p, d) for p in prefills.tolist() if p != d) for d in decodes.tolist()]]


def _least_pair(fleet: FleetSnapshot, prefills: Ints, decodes: Ints) -> tuple[InstanceView, InstanceView]:
    """The least loaded decode instance that leaves another instance to prefill, and that instance."""
    if len(prefills) == 1 and len(decodes) > 1:  # the only prefill row can then not decode
        decodes = decodes[decodes != prefills[0]]
    decode = _least(fleet, decodes)
    assert decode is not None
    if decode.role.prefills:
        prefills = prefills[prefills != decode.row]
    if fleet.pairing.parted:
        prefills = prefills[[not fleet.pairing.apart(row, decode.row) for row in prefills.tolist()]]
    prefill = _least(fleet, prefills)
    assert prefill is not None
    return prefill, decode


def _least_alone(fleet: FleetSnapshot, found: ReadyRows, wanted: Wanted) -> InstanceView | None:
    """For an aggregated request: an instance of role both, else a decode one; for a single token a prefill one."""
    fits = (Role.PREFILL, Role.BOTH, Role.DECODE) if wanted.prefill_only else (Role.BOTH, Role.DECODE, Role.PREFILL)
    for role in fits:
        best = _least(fleet, with_place(fleet, of_role(found, role), wanted))
        if best is not None:
            return best
    return None


def _least(fleet: FleetSnapshot, rows: Ints) -> InstanceView | None:
    of = fleet.columns
    row = least(rows, of.busy, of.kv_usage, of.sent, of.order)
    return None if row is None else fleet.at(row)


def _say(view: InstanceView) -> str:
    return f"{view.id} (inflight {view.inflight}, waiting {view.load.waiting}, kv {view.load.kv_usage:.0%})"


def _missing(fleet: FleetSnapshot, found: ReadyRows) -> str:
    if len(found.prefills) and _splits(found.prefills, found.decodes):
        return fleet.pairing.because_aggregated(found) or "no second instance to hand over to that pulls from another"
    return f"no second instance to hand over {'from' if not len(found.prefills) else 'to'}"
