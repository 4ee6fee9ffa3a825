"""Makes the controller's observations from what routers, agents and an actuator report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from cluster.flow import OTHERS, FlowCounts
from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import BEAT_EVERY_S, Heartbeat, Member, MemberState
from goodput.actuate.existing import Existing, ExistingFleet, InstanceLife
from goodput.observation import ClassCounts, InstanceSeen, Phase, RouterCounts
from goodput.sketch import Sketch

UNHEARD_S: Final = 60.0
"""A router that announces no counters is treated as if it was last heard so many seconds earlier: its load is
unknown."""

FIRST_SEEN_S: Final = 60.0
"""An instance that is first seen longer than this after it was asked for may be one that restarts: how long its start
took is unknown. Looks come every few seconds, so only a new controller sees such instances."""

_PHASES: Final = {
    MemberState.STARTING: Phase.STARTING,
    MemberState.RESTARTING: Phase.STARTING,
    MemberState.READY: Phase.READY,
    MemberState.DRAINING: Phase.DRAINING,
    MemberState.STOPPING: Phase.DRAINING,
    MemberState.FAILED: Phase.FAILED,
}


class Readiness:
    """When instances became ready for the first time, as far as this controller has seen it happen."""

    def __init__(self) -> None:
        self._ready_s: Final[dict[InstanceId, float | None]] = {}
        self._coming: Final[set[InstanceId]] = set()
        """Instances that were seen soon after they were asked for, and were not ready yet."""

    def saw(self, instance: InstanceId, asked_s: float | None, now: float, *, ready: bool) -> float | None:
        """Since when an instance is ready, in seconds of `now`. A restart in place changes nothing.

        Args:
            instance: its name.
            asked_s: when it was asked for; None: unknown.
            now: seconds of the controller's clock.
            ready: whether it is ready now.

        Returns:
            None: it is not ready, or it was first seen so late that it may have been ready before.
        """
        if not ready:
            if instance not in self._ready_s and instance not in self._coming:
                if asked_s is not None and now - asked_s > FIRST_SEEN_S:
                    self._ready_s[instance] = None
                else:
                    self._coming.add(instance)
            return None
        return self._ready_s.setdefault(instance, now if instance in self._coming else None)

    def keep(self, instances: Iterable[InstanceId]) -> None:
        """Forget all instances but these."""
        known = set(instances)
        self._coming.intersection_update(known)
        for name in self._ready_s.keys() - known:
            del self._ready_s[name]


def seen_all(
    observed: ExistingFleet,
    beats: Mapping[str, Heartbeat],
    pools: Mapping[str, tuple[Role, bool]],
    readiness: Readiness,
    now: float,
) -> tuple[InstanceSeen, ...]:
    """Every instance that exists, in a pool of `pools`.

    Args:
        observed: what the actuator reports; its times are converted to the controller's clock.
        beats: agents' last heartbeats, by name.
        pools: by name, the role that its instances start in, and whether they may take another one.
        readiness: remembers when instances became ready; it is updated.
        now: seconds of the controller's clock.
    """
    known = [each for each in observed.instances if each.pool in pools]
    readiness.keep(each.instance for each in known)
    return tuple(
        _seen(each, beats.get(each.instance), pools[each.pool], readiness, now, now - observed.now_s) for each in known
    )


def _seen(
    there: Existing,
    beat: Heartbeat | None,
    pool: tuple[Role, bool],
    readiness: Readiness,
    now: float,
    ahead_s: float,
) -> InstanceSeen:
    phase = _phase(there, beat)
    asked_s = None if there.asked_s is None else there.asked_s + ahead_s
    load = None if beat is None else beat.load
    return InstanceSeen(
        id=there.instance,
        pool=there.pool,
        role=pool[0] if beat is None else beat.role,
        phase=phase,
        asked_s=asked_s,
        ready_s=readiness.saw(there.instance, asked_s, now, ready=phase is Phase.READY),
        flips=pool[1],
        leaving=there.life is InstanceLife.LEAVING or phase is Phase.DRAINING,
        running=None if load is None else load.running,
        waiting=None if load is None else max(0, load.waiting - load.deferred),
        kv_usage=None if load is None else load.kv_usage,
        because=there.because or ("" if beat is None else beat.detail),
    )


def _phase(there: Existing, beat: Heartbeat | None) -> Phase:
    match there.life:
        case InstanceLife.PENDING:
            return Phase.PENDING
        case InstanceLife.FAILED:
            return Phase.FAILED
        case InstanceLife.LEAVING:
            return Phase.DRAINING
        case InstanceLife.RUNNING:
            return Phase.STARTING if beat is None else _PHASES.get(beat.state, Phase.STARTING)


def counts_of(routers: Iterable[Member], model: str, queued: int) -> list[RouterCounts]:
    """What routers have counted of one model's requests. A router that announces no counters was not heard.

    Args:
        routers: as last heard, on the controller's clock; those that have just left come last.
        model: its name in the API; empty: the only model, so all counts are its.
        queued: prompts that wait in engines; they are added to the first router's.
    """
    found: list[RouterCounts] = []
    for member in routers:
        beat = member.beat
        counted, heard_at = beat.counted or (), member.heard_at
        began_s = heard_at - beat.seq * BEAT_EVERY_S  # its heartbeats are never closer together
        if beat.counted is None:
            heard_at -= UNHEARD_S
        left = beat.state is MemberState.GONE
        lines = [each for each in beat.backlog if not left and (not model or each.model in {model, OTHERS})]
        found.append(
            RouterCounts(
                router=str(beat.id),
                life=beat.agent,
                at_s=heard_at,
                classes=_classes([each for each in counted if not model or each.model in {model, OTHERS}]),
                waiting=sum(each.waiting for each in lines) + (0 if found else queued),
                oldest_wait_s=max((each.oldest_s for each in lines), default=0.0),
                left=left,
                address=beat.agent_url or beat.url,
                began_s=began_s,
            )
        )
    return found


def _classes(counted: Iterable[FlowCounts]) -> dict[str, ClassCounts]:
    found: dict[str, ClassCounts] = {}
    for each in counted:
        counts = _class(each)
        before = found.get(each.slo_class)
        found[each.slo_class] = counts if before is None else before + counts
    return found


def _class(each: FlowCounts) -> ClassCounts:
    return ClassCounts(
        arrivals=each.arrivals,
        prompts=Sketch(each.prompts, float(each.prompt_tokens)),
        cached_tokens=each.cached_tokens,
        computed_tokens=each.computed_tokens,
        answers=Sketch(each.answers, float(each.answer_tokens)),
        ended=each.met + each.missed + each.shed,
        met=each.met,
        late_first=each.late_first,
    )
