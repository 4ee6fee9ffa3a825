"""Send each leg where it costs the fleet the least: its own latency, what it does to those there, missed targets.

The price of a place, in milliseconds, is what all requests together lose by it:

- on P: the wait for the prompts before it and its own time; each answer that decodes there waits as long, too (the
  *mixing impact*, as in the Intelligent Router's formulation);
- on D: a step's time for each of its tokens, the longer where prompts are computed on D as well; and by how much longer
  every answer there takes for each of its steps;
- for a pair: moving the KV cache. For both legs on one instance: the wait and the stall, and no move;
- `MISS` for each target that is missed by it, its own or of those there, counted as a share between 0 and 1 as
  predictions are not exact.

The best `K` for prefill, then the best `K` for decode, then the pairs of these (never all pairs), against the best
instance for both legs: so whether to hand over at all is one more comparison of the same prices, with `HYSTERESIS`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from cluster.instance import Role
from router.columns import Floats, Ints
from router.journey import Chosen
from router.policy.candidates import Wanted, ready
from router.prices import Prices
from router.view import Fleet

K: Final = 8
"""Candidates for each leg that are looked at closely (design 5.3)."""

HYSTERESIS: Final = 0.02
"""A handoff must be cheaper by this part than serving on one instance: token counts are estimates, and a handoff has
costs of its own that no model has."""


def workload(fleet: Fleet, wanted: Wanted) -> Chosen:
    """The cheapest pair, or the cheapest single instance."""
    found = ready(fleet, wanted)
    if not len(found.any):
        return Chosen(None, None, "no ready instance serves this model")
    prices = Prices(fleet, wanted)
    whole = _whole(fleet, prices, wanted, found.of)
    pair = _pair(prices, found.prefills, found.decodes) if wanted.hand_over else None
    if whole is None and pair is None:
        return Chosen(None, None, "every instance has its hands full", wait=True)
    if pair is None or (whole is not None and whole.price <= pair.price * (1 + HYSTERESIS)):
        assert whole is not None
        name = fleet.at(whole.row).id
        against = f"; a pair {pair.price:.2f}" if pair is not None else ""
        return Chosen(None, name, f"whole on {name}: {whole.says}, costs all {whole.price:.2f}{against}")
    first, second = fleet.at(pair.prefill).id, fleet.at(pair.decode).id
    against = f"; whole on {fleet.at(whole.row).id} {whole.price:.2f}" if whole is not None else ""
    return Chosen(first, second, f"prefill on {first}, decode on {second}: {pair.says}, {pair.price:.2f}{against}")


class _Whole(NamedTuple):
    row: int
    price: float
    says: str


class _Pair(NamedTuple):
    prefill: int
    decode: int
    price: float
    says: str


def _best(rows: Ints, price: Floats, count: int) -> list[int]:
    """The cheapest rows, cheapest first; of equal ones the first."""
    of_rows = price[rows]
    if len(rows) > count:
        some = np.argpartition(of_rows, count)[:count]
        rows, of_rows = rows[some], of_rows[some]
    found: list[int] = rows[np.lexsort((rows, of_rows))].tolist()
    return found


def _pair(prices: Prices, prefills: Ints, decodes: Ints) -> _Pair | None:
    """The best prefill instances with the best decode instances."""
    gate = prices.fleet.gate
    prefill_places, decode_places = prices.places, prices.places & prices.fits()
    if gate is not None:
        prefill_places = prefill_places & gate.prompts(prices)
        decode_places = decode_places & gate.answers(prices)
    prefills, decodes = prefills[prefill_places[prefills]], decodes[decode_places[decodes]]
    if not len(prefills) or not len(decodes):
        return None
    of_prefill, of_decode = prices.of_prefill(), prices.of_decode()
    firsts = [(row, float(of_prefill[row]) + prices.harm(row)) for row in _best(prefills, of_prefill, K)]
    seconds = [(row, float(of_decode[row])) for row in _best(decodes, of_decode, K)]
    best: _Pair | None = None
    for first, price in firsts:
        for second, more in seconds:
            if first == second or (best is not None and price + more >= best.price):
                continue
            move = prices.handoff(first, second)
            if best is None or price + more + move < best.price:
                best = _Pair(first, second, price + more + move, "")
    if best is None:
        return None
    said = f"TTFT {prices.ttft[best.prefill]:.0f} ms, TPOT {prices.tpot[best.decode]:.1f} ms"
    return best._replace(says=said)


_WHOLE: Final = (Role.BOTH, Role.DECODE)


def _whole(fleet: Fleet, prices: Prices, wanted: Wanted, of: dict[Role, Ints]) -> _Whole | None:
    """The best single instance: of role both or decode; a prefill one for a single token, or if there is no other."""
    places = prices.places & prices.fits()
    if fleet.gate is not None:
        places = places & fleet.gate.prompts(prices) & fleet.gate.answers(prices)
    kinds = (*_WHOLE, Role.PREFILL) if wanted.prefill_only or not wanted.hand_over else _WHOLE
    listed = [of[role] for role in kinds if role in of and len(of[role])]
    if not listed and Role.PREFILL in of:
        listed = [of[Role.PREFILL]]
    if not listed:
        return None
    rows = np.concatenate(listed) if len(listed) > 1 else listed[0]
    rows = rows[places[rows]]
    if not len(rows):
        return None
    price = prices.of_prefill() + (0.0 if wanted.prefill_only else prices.of_decode())
    priced = [(float(price[row]) + prices.harm(row), row) for row in _best(rows, price, K)]
    least, row = min(priced)
    return _Whole(row, least, f"TTFT {prices.ttft[row]:.0f} ms, TPOT {prices.tpot[row]:.1f} ms")
