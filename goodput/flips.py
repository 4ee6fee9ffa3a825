"""Which instance takes another role, and when: the quickest change. Pure.

An instance flips if the other role lacks one and its own role keeps enough without it (`Need.keep`), or if both are
short and the other split leaves less undone. It keeps the batch settings that it was started with, so needs count it in
the other role at what it is worth there (`Kinds.worth`). The last ready instance of a role never flips.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final

from cluster.ids import InstanceId
from cluster.instance import Role
from goodput import actions as do
from goodput.control_rules import ControlRules
from goodput.decision import Need
from goodput.needs import Outlook
from goodput.observation import InstanceSeen, Phase
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
        self._stay: Final[dict[InstanceId, float]] = {}
        """By instance with a refused flip: until when it is not chosen again."""
        self._uneven_since_s: float | None = None

    def gave(self, action: do.Flip, now: float) -> None:
        """Note a flip that is carried out."""
        self._flipped_s[action.instance] = now
        self._last.append(now)
        self._uneven_since_s = None

    def refused(self, action: do.Flip, now: float) -> None:
        """Note a flip that does not happen: another instance may flip in its stead."""
        at_s = self._flipped_s.pop(action.instance, None)
        if at_s is not None and at_s in self._last:
            self._last.remove(at_s)
        for name in [name for name, until_s in self._stay.items() if until_s <= now]:
            del self._stay[name]
        self._stay[action.instance] = now + self._rules.blocked_s

    def to_give(self, needs: Mapping[Role, Need], now: float) -> dict[Role, int]:
        """By role, how many of its instances will flip, so that none has to be started in the other role. Those that
        start now flip before a new one would serve; the few seconds between two flips are no reason to start one. An
        instance that waits for a GPU may wait for ever.
        """
        left = self._left(now)
        if any(role not in needs for role in _PAIR) or left < 1:
            return {}
        found = {}
        for role in _PAIR:
            staying = self._standing.staying(role)
            serve = [each for each in staying if each.phase is not Phase.PENDING]
            waits = [each for each in staying if each.phase is Phase.PENDING]
            counted = sum(each.waited_s(now) <= self._rules.pending_s for each in waits)  # in `have`, too
            spare = needs[role].have - counted - needs[role].keep
            able = sum(self._can(each, now) for each in serve)
            found[role] = max(0, min(able, len(serve) - 1, left, math.floor(spare + ROUND)))
        return found

    def choose(
        self, needs: Mapping[Role, Need], outlook: Outlook, now: float, kept: Collection[Role] = ()
    ) -> do.Flip | None:
        """The instance to flip, or None. `kept`: roles that give none, since an operator wants no fewer."""
        if any(role not in needs for role in _PAIR) or not self._may(now):
            return None
        for to, of in (_PAIR, _PAIR[::-1]):
            short, other = needs[to], needs[of]
            lacking = max(short.now - short.ready, short.ahead - short.have)
            if (
                of not in kept
                and lacking > 0.5
                and other.ready - 1 >= other.keep - ROUND
                and other.have - 1 >= other.keep - ROUND
            ):
                because = (
                    f"{to.value}: {short.now} needed now, {short.ready:.3g} ready ({short.because}); "
                    f"{of.value}: {other.keep} of {other.ready:.3g} would do"
                )
                return self._flip(of, to, because, now)
        return self._even_out(needs, now, kept)

    def _may(self, now: float) -> bool:
        return self._left(now) >= 1 and not (self._last and now - self._last[-1] < self._rules.flip_every_s)

    def _left(self, now: float) -> int:
        """How many flips this hour still allows."""
        while self._last and now - self._last[0] > 3600:
            self._last.popleft()
        most = max(2, self._rules.flips_hour * len(self._standing.staying()))
        return max(0, math.ceil(most - len(self._last)))

    def _even_out(self, needs: Mapping[Role, Need], now: float, kept: Collection[Role]) -> do.Flip | None:
        """The flip that makes the worst shortage smaller by `BETTER`, if there is one. It is asked for when no role has
        an instance to spare.
        """
        worst = {role: needs[role].now / max(0.5, needs[role].ready) for role in _PAIR}
        to, of = sorted(_PAIR, key=lambda role: -worst[role])
        after = max(needs[to].now / (needs[to].ready + 1), needs[of].now / max(0.5, needs[of].ready - 1))
        if worst[to] <= 1.0 or worst[to] < after * BETTER or needs[of].ready < 2 or of in kept:
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
        able = [each for each in ready if self._can(each, now)]
        if len(ready) < 2 or not able:
            return None
        chosen = min(able, key=lambda each: self._order(each, to))
        return do.Flip(instance=chosen.id, role=to, because=because)

    def _can(self, each: InstanceSeen, now: float) -> bool:
        """Whether the rules for a single instance let this one flip, now or once it is ready."""
        return (
            each.flips
            and each.pool not in self._rules.holds
            and now - self._flipped_s.get(each.id, -math.inf) >= self._rules.flip_back_s
            and now >= self._stay.get(each.id, -math.inf)
        )

    def _order(self, each: InstanceSeen, to: Role) -> tuple[bool, float, str]:
        """Sort key: first an instance of a pool of role `to`, then the one with the least work left."""
        busy = each.kv_usage if each.kv_usage is not None else 0.5
        return self._kinds.pools[each.pool].role is not to, busy, each.id
