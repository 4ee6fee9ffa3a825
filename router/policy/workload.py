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

from router.columns import Bools, Floats, Ints
from router.journey import Chosen
from router.policy.candidates import Wanted, ready
from router.prices import Prices, prices_of
from router.view import Fleet, Ready

K: Final = 4
"""Candidates for each leg that are looked at closely; design 5.3 allows 8."""

WAITING: Final = 1.1
"""What can begin now may cost so many times what is worth waiting for."""

HYSTERESIS: Final = 0.02
"""A handoff must be cheaper by this part than serving on one instance: token counts are estimates, and a handoff has
costs of its own that no model has."""


def workload(fleet: Fleet, wanted: Wanted) -> Chosen:
    """The cheapest pair, or the cheapest single instance; or none, where the cheapest is worth waiting for."""
    found = ready(fleet, wanted)
    if not len(found.any):
        return Chosen(None, None, "no ready instance serves this model")
    prices = prices_of(fleet, wanted)
    answers = prices.places & prices.fits()
    if fleet.gate is not None:
        answers = answers & fleet.gate.answers(prices)
    options = _wholes(prices, _able(found, wanted), answers)
    if wanted.hand_over:
        options += _pairs(prices, found.prefills, found.decodes, answers)
    return _cheapest(fleet, prices, options)


class _Option(NamedTuple):
    """One way to serve it."""

    price: float
    ranked: float
    """With `HYSTERESIS`."""
    prefill: int
    """Row; equal to `decode` for a single instance."""
    decode: int
    open: bool
    """It can begin now, or nearly so."""


def _cheapest(fleet: Fleet, prices: Prices, options: list[_Option]) -> Chosen:
    """A single instance is preferred by `HYSTERESIS`."""
    now = best = other = None
    for each in options:  # few: the best of each kind, and the best of each that can begin now
        if best is None or each.ranked < best.ranked:
            best = each
        if each.open and (now is None or each.ranked < now.ranked):
            now, other = each, now
        elif each.open:
            other = each
    if best is None or now is None:
        return Chosen(None, None, "every instance has its hands full", wait=True)
    if not best.open and best.ranked * WAITING < now.ranked:
        because = f"{_say(fleet, prices, best)} is worth waiting for: now there is only {_say(fleet, prices, now)}"
        return Chosen(None, None, because, wait=True)
    against = f"; {'whole' if other.prefill == other.decode else 'a pair'} {other.price:.2f}" if other else ""
    prefill = fleet.at(now.prefill).id if now.prefill != now.decode else None
    return Chosen(prefill, fleet.at(now.decode).id, _say(fleet, prices, now) + against)


def _say(fleet: Fleet, prices: Prices, option: _Option) -> str:
    first, second = option.prefill, option.decode
    name = fleet.at(second).id
    where = f"whole on {name}" if first == second else f"{fleet.at(first).id} to {name}"
    return f"{where} (TTFT {prices.ttft[first]:.0f} ms, TPOT {prices.tpot[second]:.1f} ms, price {option.price:.2f})"


def _best(rows: Ints, price: Floats, count: int) -> list[int]:
    """The cheapest rows, cheapest first; of equal ones the first."""
    of_rows = price[rows]
    if len(rows) > 4 * count:
        some = np.sort(np.argpartition(of_rows, count)[:count])
        rows, of_rows = rows[some], of_rows[some]
    found: list[int] = rows[of_rows.argsort(kind="stable")[:count]].tolist()
    return found


def _pairs(prices: Prices, prefills: Ints, decodes: Ints, answers: Bools) -> list[_Option]:
    """The best pair of all, and the best that can begin now."""
    prefills, decodes = prefills[prices.places[prefills]], decodes[answers[decodes]]
    if not len(prefills) or not len(decodes):
        return []
    of_prefill, of_decode = prices.of_prefill(), prices.of_decode()
    firsts = _best(prefills, of_prefill, K)
    if not prices.open[firsts].any():
        firsts += _best(prefills[prices.open[prefills]], of_prefill, 1)
    seconds = [(row, of_decode.item(row)) for row in _best(decodes, of_decode, K)]
    best: dict[bool, _Option] = {}
    for first in firsts:
        begins = prices.open.item(first)
        price = of_prefill.item(first) + prices.harm(first)
        for second, more in seconds:
            known = best.get(begins)
            if first == second or (known is not None and price + more >= known.price):
                continue
            whole = price + more + prices.handoff(first, second)
            if known is None or whole < known.price:
                best[begins] = _Option(whole, whole * (1 + HYSTERESIS), first, second, begins)
    return list(best.values())


def _able(found: Ready, wanted: Wanted) -> Ints:
    """Who may serve all of it: role both or decode; a prefill one for a single token, or if there is no other."""
    if wanted.prefill_only or not wanted.hand_over:
        return found.any
    return found.decodes if len(found.decodes) else found.any


def _wholes(prices: Prices, rows: Ints, answers: Bools) -> list[_Option]:
    """The best single instance, and the best that can begin now."""
    rows = rows[answers[rows]]
    if not len(rows):
        return []
    price = prices.of_prefill() + (0.0 if prices.wanted.prefill_only else prices.of_decode())
    best: dict[bool, _Option] = {}
    begin = prices.open[rows]
    for begins in (True,) if begin.all() else (True, False):
        some = rows[begin == begins]
        priced = [(price.item(row) + prices.harm(row), row) for row in _best(some, price, K)]
        if priced:
            least, row = min(priced)
            best[begins] = _Option(least, least, row, row, begins)
    return list(best.values())
