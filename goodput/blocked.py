"""What prevents a larger fleet, and until when starts are not tried again. Pure."""

from __future__ import annotations

from typing import Final

_BUDGET_S: Final = 30.0
"""Seconds for which a budget's refusal is shown after it was met last."""


class Blocked:
    """Pools that get no starts for now, and budgets that are used up."""

    def __init__(self) -> None:
        self._pools: Final[dict[str, tuple[float, str, str]]] = {}
        """By pool: until when, why, and the kind of reason."""
        self._budgets: Final[dict[str, tuple[float, str]]] = {}

    def add(self, pool: str, because: str, now: float, for_s: float, kind: str) -> None:
        """Start nothing in this pool for `for_s` seconds. `kind`: the first words of the condition that says so."""
        self._pools[pool] = (now + for_s, because, kind)

    def budget(self, what: str, because: str, now: float) -> None:
        """Note that nothing more of `what` (a role) fits, and why."""
        self._budgets[what] = (now + _BUDGET_S, because)

    def why(self, pool: str, now: float) -> str:
        """Why a pool gets no starts now; empty: it may get some."""
        until_s, because, _ = self._pools.get(pool, (0.0, "", ""))
        return f"{pool} is not asked again for {until_s - now:.0f} s: {because}" if now < until_s else ""

    def told(self, now: float) -> tuple[str, ...]:
        """All reasons, as sentences."""
        pools = [
            f"{self._pools[name][2]}: {self.why(name, now)}" for name in sorted(self._pools) if self.why(name, now)
        ]
        budgets = [f"{name}: {said}" for name, (until_s, said) in sorted(self._budgets.items()) if now < until_s]
        return (*pools, *(each for each in budgets if each))
