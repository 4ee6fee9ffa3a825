"""Policy `workload`: send each leg where it costs the fleet least: its own latency, its effect on running requests,
missed targets.

The price of a place, in milliseconds, is what all requests together lose by it:

- on P: the wait for the prompts before it and its own time; each answer that decodes there waits as long, too (the
  *mixing impact*, as in the Intelligent Router's formulation);
- on D: a step's time for each of its tokens, longer if D computes prompts as well; and the time by which every answer
  there takes longer for each of its steps;
- for a pair: moving the KV cache. For both legs on one instance: the wait and the stall, and no move;
- `MISS` for each target that is missed because of it, its own or of requests there (`SHED_WEIGHT` times `MISS` for
  answers that its prompt makes late, if its class refuses). A miss counts as a share between 0 and 1, as predictions
  are not exact.

The policy takes the best `K` for prefill and the best `K` for decode, and compares the pairs of these (never all pairs)
with the best instance for both legs. So whether to hand over at all (break-even) is one more comparison of the same
prices, with `HYSTERESIS`.
"""

from __future__ import annotations

import math
from typing import Final

from router.core.arrays import Bools, Ints
from router.core.journey import Chosen
from router.core.values import Wanted
from router.fleet.snapshot import FleetSnapshot, ReadyRows
from router.scheduler.scoring.filters import ready
from router.scheduler.scoring.prices import Prices, prices_of
from router.scheduler.scoring.row_prices import Priced

K: Final = 4
"""The number of candidates for each leg that are compared closely: sixteen pairs at most."""

WAITING: Final = 1.4
"""An option that can begin now may cost so many times an option that must wait: a waiting request keeps others waiting,
and a price does not include later requests."""

HYSTERESIS: Final = 0.02
"""A hand-over must be cheaper by this share than an aggregated request: token counts are estimates, and a hand-over has
costs that no model includes."""

ALIKE: Final = 5.0
"""The same share between two instances of one make that could do each other's part: they hand over only if nothing else
is possible. A prefill instance with some answers left is held to their TPOT, and the other one's steps are full of all
other answers. Half-made pools serve less than none, and the price of one request does not show it (docs/policy.md)."""


_A_PAIR: Final = "; a pair "
_NO_PAIR: Final = "; no pair costs less"
"""What `because` says when a request is served aggregated although a pair could serve it."""


def pair_costs_more(chosen: Chosen) -> bool:
    """Whether the request is served aggregated although a pair could serve it, at a higher price."""
    return chosen.prefill is None and (_A_PAIR in chosen.because or _NO_PAIR in chosen.because)


def workload(fleet: FleetSnapshot, wanted: Wanted) -> Chosen:
    """The cheapest pair, or the cheapest single instance; or none, if the cheapest is worth waiting for."""
    return weighed(fleet, wanted, HYSTERESIS, ALIKE)


def weighed(fleet: FleetSnapshot, wanted: Wanted, hysteresis: float, alike: float) -> Chosen:
    """The same with another weight on pairs: a pair's price counts for one plus this share of it. Both above -1."""
    found = ready(fleet, wanted)
    if not len(found.any):
        return Chosen(None, None, "no ready instance serves this model")
    prices = prices_of(fleet, wanted)
    options = _aggregated(prices, _able(found, wanted))
    if wanted.hand_over:
        begin = [each.ranked for each in options if each.open]
        ways = _Ways(fleet, prices, 1 + hysteresis, 1 + alike)
        bests: dict[bool, _Option] = {}
        for prefills, decodes in fleet.pairing.kinships(found):
            _pair_up(ways, prefills, decodes, min(begin, default=math.inf), bests)
        options += [bests[begins] for begins in (True, False) if begins in bests]
        return _cheapest(fleet, prices, options, found)
    return _cheapest(fleet, prices, options)


def gains(prices: Prices, prefill: int, decode: int) -> float:
    """By how much these two rows are predicted to be cheaper than the best single instance of any role: an instance
    that computes prompts could also serve the answer if nothing were handed over. Infinite if no single instance has
    room.
    """
    wholes = _aggregated(prices, ready(prices.fleet, prices.wanted).any)
    pair = prices.prefill_at(prefill) + prices.harm(prefill) + prices.decode_at(decode)
    pair += prices.handoff_told(prefill, decode) + prices.hold(prefill, decode)
    return min((each.price for each in wholes), default=math.inf) - pair


class _Ways:
    """The inputs of comparing pairs. (Compiled, classes are made and read several times faster than named tuples.)"""

    __slots__ = ("dearer", "dearer_alike", "fleet", "parted", "prices")

    def __init__(self, fleet: FleetSnapshot, prices: Prices, dearer: float, dearer_alike: float) -> None:
        self.fleet: Final = fleet
        self.prices: Final = prices
        self.dearer: Final = dearer
        """A pair's rank is its price times this..."""
        self.dearer_alike: Final = dearer_alike
        """... and for two that could do each other's part, its price times this."""
        self.parted: Final = fleet.pairing.parted
        """Whether there are pairs that hand nothing over."""


class _Option:
    """One option to serve the request."""

    __slots__ = ("decode", "open", "prefill", "price", "ranked")

    def __init__(self, price: float, ranked: float, prefill: int, decode: int, begins: bool) -> None:  # noqa: FBT001
        self.price: Final = price
        self.ranked: Final = ranked
        """The price with `HYSTERESIS`."""
        self.prefill: Final = prefill
        """The row; equal to `decode` for a single instance."""
        self.decode: Final = decode
        self.open: Final = begins
        """Whether it can begin now, or nearly so."""


def _cheapest(fleet: FleetSnapshot, prices: Prices, options: list[_Option], found: ReadyRows | None = None) -> Chosen:
    """A single instance is preferred by `HYSTERESIS`. `found`: instances that may form a pair."""
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
    prefill = fleet.at(now.prefill).id if now.prefill != now.decode else None
    against = ""
    if other is not None:
        against = f"{'; whole ' if other.prefill == other.decode else _A_PAIR}{other.price:.2f}"
    elif prefill is None and prices.wanted.hand_over:
        against = f"; {'' if found is None else fleet.pairing.because_aggregated(found)}"
        against = against if len(against) > 2 else _NO_PAIR
    because = _say(fleet, prices, now) + against + _known(fleet, prices, now)
    return Chosen(prefill, fleet.at(now.decode).id, because, source=prices.source_at(now.prefill))


def _say(fleet: FleetSnapshot, prices: Prices, option: _Option) -> str:
    first, second = option.prefill, option.decode
    name = fleet.at(second).id
    where = f"whole on {name}" if first == second else f"{fleet.at(first).id} to {name}"
    return (
        f"{where} (TTFT {prices.first_ms(first, second):.0f} ms, TPOT {prices.tpot_at(second):.1f} ms, "
        f"price {option.price:.2f})"
    )


def _known(fleet: FleetSnapshot, prices: Prices, option: _Option) -> str:
    """The sources of these prices."""
    costs = fleet.inflight.step_model.known(option.prefill, option.decode)
    if prices.match is None:
        return f"; costs {costs}, prefixes unknown"
    cached, source = prices.cached_at(option.prefill), prices.source_at(option.prefill)
    more = "" if source is None else f", {source.tokens - cached} more from {source.instance}"
    copied = prices.copied_at(option.prefill)
    more += f", {copied} copied for later requests" if copied else ""
    return f"; costs {costs}, {cached} of {prices.tokens} prompt tokens cached{more}"


def _pair_up(ways: _Ways, prefills: Ints, decodes: Ints, below: float, bests: dict[bool, _Option]) -> None:
    """The best pair that can begin now, and the best that cannot, if they rank below `below` and the present best. Harm
    and hand-over only add to a price, so pairs that rank no better without them are skipped. So are pairs whose D pulls
    nothing from P.
    """
    fleet, prices = ways.fleet, ways.prices
    firsts = prices.best_prefills(prefills, K)
    seconds = [
        _Second(more, row, _kind(fleet, fleet.columns.prefills, row, -1))
        for more, row in prices.best_decodes(decodes, K)
    ]
    if not seconds:
        return
    for price, first in firsts:
        begins = prices.open_at(first)
        best = bests.get(begins)
        found = _best_second(ways, (price, first), seconds, below if best is None else best.ranked)
        if found is not None:
            bests[begins] = found


class _Second:
    """A row that may decode."""

    __slots__ = ("kind", "price", "row")

    def __init__(self, price: float, row: int, kind: int) -> None:
        self.price: Final = price
        self.row: Final = row
        self.kind: Final = kind
        """The number of its make, if it computes prompts as well; else -1."""


def _kind(fleet: FleetSnapshot, does: Bools, row: int, otherwise: int) -> int:
    """The number of the row's make, if the row does that leg (`does`); else `otherwise`."""
    return fleet.inflight.step_model.kind(row) if does.item(row) else otherwise


def _best_second(ways: _Ways, priced: tuple[float, int], seconds: list[_Second], below: float) -> _Option | None:
    """The best pair with this P that ranks below `below`, if there is one. Two of one make are `ALIKE` if each
    does the other's leg as well.
    """
    fleet, prices, found, harm, (price, first) = ways.fleet, ways.prices, None, -1.0, priced
    kind = _kind(fleet, fleet.columns.decodes, first, -2)
    for each in seconds:
        more, second = each.price, each.row
        dearer = ways.dearer_alike if each.kind == kind else ways.dearer
        if (price + more) * dearer >= below or first == second or (ways.parted and fleet.pairing.apart(first, second)):
            continue
        if harm < 0:
            harm = prices.harm(first)
        whole = price + harm + more
        if whole * dearer < below:
            whole += prices.handoff(first, second) + prices.hold(first, second)
            if whole * dearer < below:
                below = whole * dearer
                found = _Option(whole, below, first, second, prices.open_at(first))
    return found


def _able(found: ReadyRows, wanted: Wanted) -> Ints:
    """The rows that may serve the whole request: role both or decode; a prefill one for a single token, or if there is
    no other.
    """
    if wanted.prefill_only or not wanted.hand_over:
        return found.any
    return found.decodes if len(found.decodes) else found.any


def _aggregated(prices: Prices, rows: Ints) -> list[_Option]:
    """The best single instance, and the best that can begin now."""
    now, later = prices.best_aggregated(rows, K)
    return _least(prices, now, now=True) + _least(prices, later, now=False)


def _least(prices: Prices, priced: Priced, *, now: bool) -> list[_Option]:
    """The cheapest of these, harm included."""
    best, at = math.inf, -1
    for least, row in priced:
        if least > best:
            break
        whole = least + prices.harm(row)
        if whole < best or (whole == best and row < at):
            best, at = whole, row
    return [_Option(best, best, at, at, now)] if at >= 0 else []
