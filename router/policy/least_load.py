"""Send each leg where the fewest of our own legs are running."""

from __future__ import annotations

from cluster.instance import Role
from router.journey import Chosen
from router.policy.candidates import Wanted, ready, with_place
from router.view import InstanceView


def least_load(instances: tuple[InstanceView, ...], wanted: Wanted) -> Chosen:
    """The least loaded prefill instance and the least loaded decode instance, or one instance for the whole request.

    Own legs count first: they are known exactly and at once. The engine's reported queue and KV usage break ties, then
    the number of legs ever sent, so that idle twins take turns (Dynamo issue 7836: two of five decoders got nothing).
    """
    candidates = ready(instances, wanted)
    if not candidates:
        return Chosen(None, None, "no ready instance serves this model")
    placed = with_place(candidates, wanted)
    if wanted.hand_over and _least_pair(candidates) is not None:
        pair = _least_pair(placed)
        if pair is None:
            return Chosen(None, None, "every prefill or every decode instance is full", wait=True)
        prefill, decode = pair
        return Chosen(prefill.id, decode.id, f"least load: {_say(prefill)}, {_say(decode)}")
    if not placed:
        return Chosen(None, None, "every instance is full", wait=True)
    alone = _least_alone(placed, wanted)
    why = "not handed over" if not wanted.hand_over else f"no second instance to hand over {_missing(candidates)}"
    return Chosen(None, alone.id, f"{why}: whole on {_say(alone)}")


def _least_pair(candidates: tuple[InstanceView, ...]) -> tuple[InstanceView, InstanceView] | None:
    """The least loaded decode instance that leaves another instance to prefill, and that instance."""
    for decode in sorted((view for view in candidates if view.role.decodes), key=_key):
        prefill = _least([view for view in candidates if view.role.prefills and view is not decode])
        if prefill is not None:
            return prefill, decode
    return None


def _least_alone(candidates: tuple[InstanceView, ...], wanted: Wanted) -> InstanceView:
    """For a whole request: an instance of role both, else a decode one; for a single token a prefill one."""
    fits = (Role.PREFILL, Role.BOTH, Role.DECODE) if wanted.prefill_only else (Role.BOTH, Role.DECODE, Role.PREFILL)
    for role in fits:
        best = _least([view for view in candidates if view.role is role])
        if best is not None:
            return best
    raise AssertionError("there are candidates, and each has a role")


def _least(views: list[InstanceView]) -> InstanceView | None:
    return min(views, key=_key) if views else None


def _key(view: InstanceView) -> tuple[int, int, float, int, str]:
    return (view.inflight, view.load.waiting, view.load.kv_usage, view.sent, view.id)


def _say(view: InstanceView) -> str:
    return f"{view.id} (inflight {view.inflight}, waiting {view.load.waiting}, kv {view.load.kv_usage:.0%})"


def _missing(candidates: tuple[InstanceView, ...]) -> str:
    return "from" if not any(view.role.prefills for view in candidates) else "to"
