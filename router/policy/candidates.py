"""Who may be considered at all, before any policy scores anybody."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.ids import InstanceId
from router.view import InstanceView


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request asks of the fleet."""

    model: str | None
    """None: any model, as vLLM's own server treats a request that names none."""
    hand_over: bool
    """Whether prefill and decode may run on two instances."""
    prefill_only: bool = False
    """The whole answer is one token: a prefill instance's work."""
    excluded: frozenset[InstanceId] = frozenset()
    routers: int = 1
    """Routers that share the instances' credits."""


def ready(instances: tuple[InstanceView, ...], wanted: Wanted) -> tuple[InstanceView, ...]:
    """Ready instances that serve the model and have not failed this request."""
    return tuple(
        view
        for view in instances
        if view.ready and view.id not in wanted.excluded and (wanted.model is None or wanted.model in view.models)
    )


def with_place(candidates: tuple[InstanceView, ...], wanted: Wanted) -> tuple[InstanceView, ...]:
    """Those whose credits leave room for one more leg of ours."""
    return tuple(view for view in candidates if view.has_place(wanted.routers))
