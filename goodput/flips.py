"""Which instance takes another role, and when: the quickest change. Pure.

An instance flips if the other role lacks one and its own role keeps enough without it (`Need.keep`), or if both are
short and the other split leaves less undone. It keeps the batch settings that it was started with, so needs count it in
the other role at what it is worth there (`Kinds.worth`). The last ready instance of a role never flips.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.control_rules import ControlRules
from goodput.decision import Need
from goodput.needs import Outlook
from goodput.observation import InstanceSeen
from goodput.pools import Kinds
from goodput.scale_down import ROUND
from goodput.standing import StandingInstances

BETTER: Final = 1.15
"""Where both roles are short: the worst shortage must shrink by this factor."""
SHORT_S: Final = 10.0
"""Seconds for which a shortage of both roles must last before a flip."""
_PAIR: Final = (Role.PREFILL, Role.DECODE)


class Flips:
    """Chooses one controller's flips; remembers the last ones."""

    def __init__(self, kinds: Kinds, standing: StandingInstances, rules: ControlRules) -> None:
        self._kinds: Final = kinds
        self._standing: Final = standing
        self._rules: Final = rules
        self._flipped_s: Final[dict[InstanceId, float]] = {}
        self._last: Final[deque[float]] = deque()
        """Times of the flips of the last hour."""
        self._uneven_since_s: float | None = None

    def gave(self, action: do.Flip, now: float) -> None:
        """Note a flip that is carried out."""
        self._flipped_s[action.instance] = now
        self._last.append(now)
        self._uneven_since_s = None

    def to_give(self, needs: Mapping[Role, Need]) -> dict[Role, int]:
        """By role, how many of its instances may flip, so that none has to be started in the other role."""
        found = {}
        for role in _PAIR:
            need = needs.get(role)
            if need is not None:
                able = sum(each.flips for each in self._standing.staying(role))
                found[role] = min(able, max(0, math.floor(need.have - need.keep + ROUND)))
        return found

    def choose(self, needs: Mapping[Role, Need], outlook: Outlook, now: float) -> do.Flip | None:
        """The instance to flip, or None."""
        if any(role not in needs for role in _PAIR) or not self._may(now):
            return None
        for to, of in (_PAIR, _PAIR[::-1]):
            short, other = needs[to], needs[of]
            lacking = max(short.now - short.ready, short.ahead - short.have)
            if lacking > 0.5 and other.ready - 1 >= other.keep - ROUND and other.have - 1 >= other.keep - ROUND:
                because = (
                    f"{to.value}: {short.now} needed now, {short.ready:.3g} ready ({short.because}); "
                    f"{of.value}: {other.keep} of {other.ready:.3g} would do"
                )
                return self._flip(of, to, because, now)
        return self._even_out(needs, now)

    def _may(self, now: float) -> bool:
        while self._last and now - self._last[0] > 3600:
            self._last.popleft()
        if self._last and now - self._last[-1] < self._rules.flip_every_s:
            return False
        return len(self._last) < max(2, self._rules.flips_hour * len(self._standing.staying()))

    def _even_out(self, needs: Mapping[Role, Need], now: float) -> do.Flip | None:
        """The flip that makes the worst shortage smaller by `BETTER`, if there is one. It is asked for when no role has
        an instance to spare.
        """
        worst = {role: needs[role].now / max(0.5, needs[role].ready) for role in _PAIR}
        to, of = sorted(_PAIR, key=lambda role: -worst[role])
        after = max(needs[to].now / (needs[to].ready + 1), needs[of].now / max(0.5, needs[of].ready - 1))
        if worst[to] <= 1.0 or worst[to] < after * BETTER or needs[of].ready < 2:
            self._uneven_since_s = None
            return None
        if self._uneven_since_s is None:
            self._uneven_since_s = now
        if now - self._uneven_since_s < SHORT_S:
            return None
        because = (
            f"both are short: {to.value} {needs[to].ready:.3g} of {needs[to].now}, "
            f"{of.value} {needs[of].ready:.3g} of {needs[of].now}"
        )
        return self._flip(of, to, because, now)

    def _flip(self, of: Role, to: Role, because: str, now: float) -> do.Flip | None:
        ready = self._standing.ready(of)
        able = [
            each
            for each in ready
            if each.flips
            and each.pool not in self._rules.holds
            and now - self._flipped_s.get(each.id, -math.inf) >= self._rules.flip_back_s
        ]
        if len(ready) < 2 or not able:
            return None
        chosen = min(able, key=lambda each: self._order(each, to))
        return do.Flip(instance=chosen.id, role=to, because=because)

    def _order(self, each: InstanceSeen, to: Role) -> tuple[bool, float, str]:
        """Sort key: first an instance of a pool of role `to`, then the one with the least work left."""
        busy = each.kv_usage if each.kv_usage is not None else 0.5
        return self._kinds.pools[each.pool].role is not to, busy, each.id
