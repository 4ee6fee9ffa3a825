"""Whether a pod may become Ready: its instance is proven, and every Ready router knows it. Pure.

An open gate stays open: a router that starts later learns the fleet before it is Ready itself. To close gates because
of it would take the whole fleet out of service.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cluster.instance import Role
from k8s.plan.values import PlannedObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What routers report of the fleet."""

    routers: frozenset[str] = frozenset()
    """Names of the Ready routers' pods."""
    known_to: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By instance: the routers that have it in their fleet."""
    proven: frozenset[frozenset[str]] = frozenset()
    """Pairs of instances that no router keeps apart: each router has proven them, or needs no proof."""


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
        if frozenset({each.name, instance.name}) in known.proven:
            return True, f"proven with {each.name}"
    return False, f"no pair proven yet with {', '.join(sorted(each.name for each in partners)[:3])}"
