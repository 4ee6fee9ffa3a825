"""Whether a pod may become Ready: its instance is proven, and every Ready router knows it. Pure.

An open gate stays open: a router that starts later learns the fleet before it is Ready itself. To close gates because
of it would take the whole fleet out of service.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.instance import Role
from k8s.plan.values import PlannedObject


class Circles(NamedTuple):
    """Numbers of the circles of proven instances that an instance belongs to, as one router counts them; 0: none."""

    gives: int
    """As producer."""
    takes: int
    """As consumer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsHeard:
    """What one router reports of pairs. It keeps one entry by instance, not one by pair: a thousand instances make half
    a million pairs, and `gate` asks for a few.
    """

    circles: Mapping[str, Circles | None]
    """By instance that the router knows; None: the router needs no proofs, or is too old to report circles."""
    apart: frozenset[frozenset[str]] = frozenset()
    """Pairs that the router lists as apart. It lists a limited number, so a pair that is not listed may be unproven."""

    def proven(self, one: str, other: str) -> bool:
        """Whether the router knows both instances and does not keep them apart."""
        if one not in self.circles or other not in self.circles or frozenset({one, other}) in self.apart:
            return False
        mine, its = self.circles[one], self.circles[other]
        if mine is None or its is None:
            return mine is its
        return mine.gives == its.takes != 0 or its.gives == mine.takes != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What routers report of the fleet."""

    routers: frozenset[str] = frozenset()
    """Names of the Ready routers' pods."""
    known_to: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By instance: the routers that have it in their fleet."""
    pairs: tuple[PairsHeard, ...] = ()
    """By router that answered."""

    def proven(self, one: str, other: str) -> bool:
        """Whether no router keeps two instances apart: each router has proven them, or needs no proof."""
        return bool(self.pairs) and all(each.proven(one, other) for each in self.pairs)


def gate(instance: PlannedObject, fleet: Collection[PlannedObject], known: Known) -> tuple[bool, str]:
    """Whether the instance's gate may open, and why or why not."""
    if not instance.healthy:
        return False, "its engine is not healthy"
    missing = known.routers - known.known_to.get(instance.name, frozenset())
    if missing:
        return False, f"not yet known to {', '.join(sorted(missing))}"
    if not known.routers:
        return False, "no router is Ready"
    if instance.role is Role.BOTH:
        return True, "runs whole requests"
    family = [each for each in fleet if each.family == instance.family and each.role is not instance.role]
    partners = [each for each in family if each.scheduled and not each.leaving]
    rolls_out = any(each.family != instance.family for each in fleet)
    if not partners and family and not rolls_out:
        return False, "its partner has no GPUs yet: the two start together"
    if not partners:
        return True, "alone in its family: runs whole requests until a partner is there"
    for each in partners:
        if known.proven(each.name, instance.name):
            return True, f"proven with {each.name}"
    return False, f"no pair proven yet with {', '.join(sorted(each.name for each in partners)[:3])}"
