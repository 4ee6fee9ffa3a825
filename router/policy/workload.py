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

import math
from operator import itemgetter
from typing import Final, NamedTuple

from router.columns import Bools, Floats, Ints
from router.journey import Chosen
from router.policy.candidates import ready
from router.prices import Prices, prices_of
from router.records import Wanted
from router.view import Fleet, Ready

K: Final = 4
"""Candidates for each leg that are looked at closely; design 5.3 allows 8."""

WAITING: Final = 1.4
"""What can begin now may cost so many times what is worth waiting for: who waits keeps others waiting, and a price
knows nothing of those who come after."""

HYSTERESIS: Final = 0.02
"""A handoff must be cheaper by this part than serving on one instance: token counts are estimates, and a handoff has
costs of its own that no model has."""

ALIKE: Final = 5.0
"""The same between two that could do each other's part: only where nothing else is possible. A prompt's instance with
some answers of its own left is held to their TPOT, and the other's steps are full of everybody's answers: half-made
pools serve less than none, and the price of one request does not show it (docs/policy.md)."""


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
        options += _pairs(fleet, prices, found.prefills, found.decodes, answers)
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
            other = now
            now = each
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
    return f"{where} (TTFT {prices.ttft[first]:.0f} ms, TPOT {prices.tpot_at(second):.1f} ms, price {option.price:.2f})"


_Priced = list[tuple[float, int]]
_PRICE: Final = itemgetter(0)
_FEW: Final = 32


def _best(rows: Ints, price: Floats, count: int) -> _Priced:
    """The cheapest rows and what they cost, cheapest first; of equal ones the first. Among many so few are found faster
    one by one than by sorting, and in a list of few faster than by numpy.
    """
    left = price[rows]
    if len(rows) <= _FEW:
        return sorted(zip(left.tolist(), rows.tolist(), strict=True), key=_PRICE)[:count]
    found = []
    for _ in range(min(count, len(rows))):
        at = left.argmin()
        found.append((left.item(at), rows.item(at)))
        left[at] = math.inf
    return found


def _pairs(fleet: Fleet, prices: Prices, prefills: Ints, decodes: Ints, answers: Bools) -> list[_Option]:
    """The best pair of all, and the best that can begin now. Harm and handoff only add to a price: what costs more than
    the best without them is not looked at. Nor is a pair of which D pulls nothing from P.
    """
    prefills, decodes = prefills[prices.places[prefills]], decodes[answers[decodes]]
    if not len(prefills) or not len(decodes):
        return []
    firsts = _best(prefills, prices.of_prefill(), K)
    if not any(prices.open.item(row) for _, row in firsts):
        firsts += _best(prefills[prices.open[prefills]], prices.of_prefill(), 1)
    seconds = [
        _Second(more, row, _kind(fleet, fleet.columns.prefills, row, -1))
        for more, row in _best(decodes, prices.of_decode(), K)
    ]
    bests: dict[bool, _Option] = {}
    for price, first in firsts:
        begins = prices.open.item(first)
        best = bests.get(begins)
        if best is None or price + seconds[0].price < best.ranked:
            found = _best_second(fleet, prices, (price, first), seconds, best)
            if found is not None:
                bests[begins] = found
    return [bests[begins] for begins in (True, False) if begins in bests]


class _Second(NamedTuple):
    """One that may decode."""

    price: float
    row: int
    kind: int
    """Which make it is, where it computes prompts as well."""


def _kind(fleet: Fleet, does: Bools, row: int, otherwise: int) -> int:
    """Which make it is, where it does that leg."""
    return fleet.book.speeds.kind(row) if does.item(row) else otherwise


def _best_second(
    fleet: Fleet, prices: Prices, priced: tuple[float, int], seconds: list[_Second], best: _Option | None
) -> _Option | None:
    """The pair with this P that ranks before the best one so far, if there is one. Two of one make are `ALIKE` where
    either does the other's leg as well.
    """
    found, (price, first) = None, priced
    harmed = price + prices.harm(first)
    kind = _kind(fleet, fleet.columns.decodes, first, -2)
    least = math.inf if best is None else best.ranked
    for more, second, other in seconds:
        whole = harmed + more
        if whole >= least:
            break
        if first == second or (fleet.shunning and fleet.apart(first, second)):
            continue
        dearer = 1 + (ALIKE if other == kind else HYSTERESIS)
        if whole * dearer < least:
            whole += prices.handoff(first, second)
            if whole * dearer < least:
                least = whole * dearer
                found = _Option(whole, least, first, second, prices.open.item(first))
    return found


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
    price = prices.of_prefill() if prices.wanted.prefill_only else prices.of_prefill() + prices.of_decode()
    begin = prices.open[rows]
    if begin.all():
        return _least(prices, rows, price, now=True)
    return _least(prices, rows[begin], price, now=True) + _least(prices, rows[~begin], price, now=False)


def _least(prices: Prices, rows: Ints, price: Floats, *, now: bool) -> list[_Option]:
    """The cheapest of these, harm included."""
    best, at = math.inf, -1
    for least, row in _best(rows, price, K):
        if least > best:
            break
        whole = least + prices.harm(row)
        if whole < best or (whole == best and row < at):
            best, at = whole, row
    return [_Option(best, best, at, at, now)] if at >= 0 else []
