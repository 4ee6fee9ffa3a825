"""What a fleet may use at most, and what it uses now: GPUs by type, price an hour, watts. Pure.

An instance counts from its request until it is gone: while it waits for a GPU, starts, serves, drains or ends. If only
serving instances counted, every change could exceed the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cluster.ids import InstanceId

_ROUND: Final = 1e-9
"""Rounding error that sums of prices and watts may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one instance uses while it exists."""

    gpu: str = ""
    """Type of its GPUs, by the name that the budget uses."""
    gpus: int = 1
    price_per_hour: float = 0.0
    """Of all its GPUs together, in the currency of the cluster file."""
    power_w: float = 0.0
    """Most that all its GPUs together draw, in watts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Upper bounds that hold at every instant; None, or a type that is not named: no bound."""

    gpus: Mapping[str, int] = field(default_factory=dict)
    """By type of GPU."""
    price_per_hour: float | None = None
    power_w: float | None = None


NO_BUDGET: Final = Budget()


class Usage:
    """What a fleet uses now, by instance."""

    def __init__(self) -> None:
        self._held: Final[dict[InstanceId, Footprint]] = {}
        self.gpus: Final[dict[str, int]] = {}
        """By type of GPU."""
        self.price_per_hour = 0.0
        self.power_w = 0.0

    def __contains__(self, instance: InstanceId) -> bool:
        return instance in self._held

    def add(self, instance: InstanceId, footprint: Footprint) -> None:
        """Count an instance that is asked for. Its name must not be counted yet."""
        assert instance not in self._held, f"{instance} is counted already"
        self._held[instance] = footprint
        self.gpus[footprint.gpu] = self.gpus.get(footprint.gpu, 0) + footprint.gpus
        self._sum()

    def also(self, gpus: Mapping[str, int]) -> None:
        """Count GPUs, by type, that others use."""
        for gpu, count in gpus.items():
            self.gpus[gpu] = self.gpus.get(gpu, 0) + count

    def remove(self, instance: InstanceId) -> Footprint:
        """Take away an instance that is gone; returns what it used.

        Raises:
            KeyError: no such instance is counted.
        """
        footprint = self._held.pop(instance)
        self.gpus[footprint.gpu] -= footprint.gpus
        self._sum()
        return footprint

    def _sum(self) -> None:
        """Sums are made anew: a running sum of prices would drift over weeks of changes."""
        self.price_per_hour = sum(each.price_per_hour for each in self._held.values())
        self.power_w = sum(each.power_w for each in self._held.values())

    def lacks(self, budget: Budget, more: Footprint) -> str:
        """Why an instance of this footprint does not fit into the budget beside what is there; empty: it fits."""
        bound = budget.gpus.get(more.gpu)
        used = self.gpus.get(more.gpu, 0)
        if bound is not None and used + more.gpus > bound:
            return f"{more.gpus} × {more.gpu or 'GPU'} wanted, {max(0, bound - used)} of {bound} left in the budget"
        price, watts = budget.price_per_hour, budget.power_w
        if price is not None and self.price_per_hour + more.price_per_hour > price + _ROUND:
            return f"{self.price_per_hour + more.price_per_hour:g} an hour would exceed the budget of {price:g} an hour"
        if watts is not None and self.power_w + more.power_w > watts + _ROUND:
            return f"{self.power_w + more.power_w:g} W would exceed the budget of {watts:g} W"
        return ""

    def within(self, budget: Budget) -> str:
        """Which bound is exceeded now, as a sentence; empty: none."""
        for gpu, bound in budget.gpus.items():
            if self.gpus.get(gpu, 0) > bound:
                return f"{self.gpus[gpu]} × {gpu or 'GPU'} are used, {bound} are in the budget"
        price, watts = budget.price_per_hour, budget.power_w
        if price is not None and self.price_per_hour > price + _ROUND:
            return f"{self.price_per_hour:g} an hour are used, {price:g} are in the budget"
        if watts is not None and self.power_w > watts + _ROUND:
            return f"{self.power_w:g} W are used, {watts:g} are in the budget"
        return ""
