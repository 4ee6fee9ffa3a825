"""Runs the controller: observes the fleet, feeds the machine, carries out its effects, keeps the log. A shell.

One look: the registry's routers and agents and the actuator's instances become an `Observation`. Whatever cannot be
read is unknown in it. Actions are carried out one after another, each within `ACTION_S` and only while this controller
leads; an action's answer goes back to the machine. A controller that was killed at any point begins anew with the fleet
that exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Final, Protocol

from cluster.ids import InstanceId
from cluster.instance import Role
from cluster.registry.membership import ChangeKind, Heartbeat, Member, MemberKind, Membership, MemberState
from cluster.registry.registry import Registry, RegistryDown, read_members
from cluster.telemetry import tracing
from goodput.actions import Action, Start
from goodput.actuate.elsewhere import OtherModels
from goodput.actuate.engines import by_engine
from goodput.actuate.existing import ExistingFleet as Existing
from goodput.actuate.existing import InstanceLife
from goodput.actuate.journal import Journal
from goodput.actuate.lease import ACTION_S, LeaderClaim
from goodput.actuate.protocol import Actuator, Unobservable, carry_out
from goodput.actuate.seen import Readiness, counts_of, seen_all
from goodput.budget import Footprint
from goodput.decision import (
    Act,
    Answered,
    Check,
    Checked,
    Decision,
    Effect,
    Event,
    Observed,
    Pause,
    Renewed,
    Resize,
    Told,
    What,
)
from goodput.demand import ClassPromise
from goodput.observation import InstanceSeen, Observation, RouterCounts

logger = logging.getLogger("baton.controller")

LOOK_S: Final = 1.0
"""Seconds between two looks until the machine says when it wants the next one."""

DECISIONS_KEPT: Final = 200
"""Newest decisions that `GET /scaling` shows; the log has all of them."""

ENDING: Final = frozenset({InstanceLife.FAILED, InstanceLife.LEAVING})
"""Instances that a fleet does not have for long."""


class FleetController(Protocol):
    """The controller of one model's fleet (`goodput.controller`)."""

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold one event in."""

    def next_wakeup(self) -> float | None:
        """When it wants to look again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledFleet:
    """The pools of one model, and the machine that resizes them."""

    model: str
    """The model's name in the API; empty: the only model."""
    pools: Mapping[str, tuple[Role, bool]]
    """By name: the role that instances start in, and whether they may take another role."""
    machine: FleetController
    footprints: Mapping[str, Footprint] = field(default_factory=dict)
    """By pool, what one of its instances uses."""
    check: Callable[[Check], Awaitable[Checked]] | None = None
    """Simulates a fleet on requests like recent ones; None: the machine's formulas decide alone."""


@dataclass(frozen=True, slots=True)
class KeptDecision:
    """One decision, with when it was made in Unix seconds."""

    at: float
    model: str
    decision: Decision


class Scaler:
    """One controller process. It is long and has many attributes: the parts of a look (registry, lease, actuator,
    members), orders of operators, and what `GET /scaling` shows.
    """

    def __init__(
        self,
        registry: Registry,
        lease: LeaderClaim,
        actuator: Actuator,
        fleets: tuple[ScaledFleet, ...],
        journal: Journal | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] | None = None,
        at_start: Mapping[str, int] | None = None,
    ) -> None:
        """For these fleets.

        Args:
            registry: the fleet's registry.
            lease: this controller's claim to lead, on that registry.
            actuator: carries actions out.
            fleets: each with its machine.
            journal: the kept log; None: no log.
            say: prints one line for people.
            clock: seconds that never go back, also from one controller to the next; None: made from this machine's.
            at_start: by pool, how many instances are started before anything is decided, if the pool has none; None:
                the program that starts the fleet starts them.
        """
        self.registry: Final = registry
        self.lease: Final = lease
        self.actuator: Final = actuator
        self.fleets: Final = fleets
        self.decisions: Final[deque[KeptDecision]] = deque(maxlen=DECISIONS_KEPT)
        self.last: Final[dict[str, Decision]] = {}
        """By model, the newest decision, held ones included."""
        self.seen: Final[dict[str, tuple[InstanceSeen, ...]]] = {}
        self.counts: Final[dict[What, int]] = dict.fromkeys(What, 0)
        self.paused = False
        self.sizes: Final[dict[tuple[str, Role], int]] = {}
        """What operators have asked for, by model and role."""
        self.beats: dict[str, Heartbeat] = {}
        """Last heartbeats, by engine."""
        self._journal: Final = journal
        self._say: Final = say
        self._clock: Final = clock or _steady()
        self._instances: Final = Membership(registry.ttl_s)
        self._routers: Final = Membership(registry.ttl_s)
        self._memberships: Final = {MemberKind.INSTANCE: self._instances, MemberKind.ROUTER: self._routers}
        self._left: tuple[Member, ...] = ()
        """Routers that have said goodbye since the look before, with their last counts."""
        self._others: Final = OtherModels({each.model: each.footprints for each in fleets})
        self._readiness: Final = {each.model: Readiness() for each in fleets}
        self._at_start = dict(at_start or {})
        self._begins, self._ending = False, frozenset[str]()
        """When this controller began to lead: whether no instance existed, and the instances that were ending."""
        self._lacking: list[str] | None = None
        """Pools to bring up; None: not known yet."""
        self._held_said = False
        """Whether people know that a pause keeps `_lacking` from being started."""
        self._nudge: Final = asyncio.Event()
        self._turn: Final = asyncio.Lock()
        self._tracing: Final = tracing("baton-controller")
        self._to_check: Final[asyncio.Queue[tuple[ScaledFleet, Check]]] = asyncio.Queue()

    async def run(self) -> None:
        """Run until cancelled; then leave the registry."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.lease.keep(), name="lease")
                group.create_task(self._look_forever(), name="looks")
                group.create_task(self._check_forever(), name="checks")
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACTION_S):
                    await self.lease.leave()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    async def _look_forever(self) -> None:
        while True:
            await self.look()
            self._nudge.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._until_next()):
                    await self._nudge.wait()

    def _until_next(self) -> float:
        dues = [each.machine.next_wakeup() for each in self.fleets]
        wanted = min((due for due in dues if due is not None), default=self._clock() + LOOK_S)
        return max(0.05, wanted - self._clock())

    # --- orders of operators ------------------------------------------------------------------------------------------

    async def pause(self, *, paused: bool, who: str) -> None:
        """Observe and carry nothing out, until called with False. `who`: the operator, for the log."""
        self.paused = paused
        for fleet in self.fleets:
            await self._tell(fleet, Pause(paused, who))
        self._nudge.set()

    async def resize(self, model: str, role: Role, count: int | None, who: str) -> None:
        """Keep `count` instances of a role; None: the controller decides again. `who`: the operator, for the log."""
        if count is None:
            self.sizes.pop((model, role), None)
        else:
            self.sizes[model, role] = count
        for fleet in self.fleets:
            if fleet.model == model:
                await self._tell(fleet, Resize(role, count, who))
        self._nudge.set()

    async def renew(self, promises: Mapping[str, ClassPromise]) -> None:
        """Go by other targets from now on. `promises`: by class, all that there are."""
        for fleet in self.fleets:
            await self._tell(fleet, Renewed(dict(promises)))

    # --- a look -------------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Look once, and carry out the decisions that follow."""
        heard = await self._hear()
        existing = await self._observe()
        if self._at_start:
            if self.lease.holder:
                self._lacking = None  # that controller changes the fleet meanwhile
            elif existing is None or not self.lease.held or await self._bring_up(existing):
                return
        for fleet in self.fleets:
            await self._tell(fleet, Observed(self._observation(fleet, existing, heard=heard)))

    async def _bring_up(self, existing: Existing) -> bool:
        """Start the instances that a fleet begins with, in pools without any when this controller begins to lead. The
        other pools have been sized before, and are not brought back to that size. Instances that have failed or leave
        by then count for nothing, but keep their names. A pause holds a fleet that exists then, not one that begins.

        Returns:
            Whether a pool had none; if not, the machine decides at this very look.
        """
        there: dict[str, set[str]] = {}
        staying = Counter(each.pool for each in existing.instances if each.life not in ENDING)
        for each in existing.instances:
            there.setdefault(each.pool, set()).add(str(each.instance))
        if self._lacking is None:
            self._lacking, self._begins = [pool for pool in self._at_start if not staying[pool]], not there
            self._ending = frozenset(str(each.instance) for each in existing.instances if each.life in ENDING)
        if self._lacking and self.paused and not self._begins:
            self._say_held(self._lacking)
            return True
        for pool in self._lacking:
            names = there.get(pool, set())
            free = (name for number in count() if (name := f"{pool}-{number}") not in names)
            for name in islice(free, max(0, self._at_start[pool] - len(names - self._ending))):
                start = Start(instance=InstanceId(name), pool=pool, because="the fleet begins")
                because = (await self._act(start)).refusal
                if because:
                    self._say(f"{name} cannot be started: {because}")
                    return True  # the next look tries again
        self._at_start.clear()
        return bool(self._lacking)

    def _say_held(self, pools: list[str]) -> None:
        """Say, once, which pools a pause keeps from being started."""
        if not self._held_said:
            self._held_said = True
            self._say(
                f"scaling is paused, so pools without an instance ({', '.join(pools)}) are not started: "
                "`baton scale --resume` starts them"
            )

    async def _hear(self) -> bool:
        """Read the registry. Returns whether it could be read."""
        now = self._clock()
        try:
            async with asyncio.timeout(ACTION_S):
                heard = await read_members(self.registry, self._memberships)
        except (RegistryDown, TimeoutError) as error:
            logger.warning("the registry is not heard: %s", error)
            return False
        routers = heard[MemberKind.ROUTER]
        self._instances.fold(heard[MemberKind.INSTANCE], now)
        changes = self._routers.fold(routers, now)
        left = {each.id for each in changes if each.what is ChangeKind.LEFT}
        last = {each.id: each for each in routers if each.id in left and each.state is MemberState.GONE}
        self._left = tuple(Member(beat=each, heard_at=now, joined_at=now) for each in last.values())
        self.beats = by_engine(member.beat for member in self._instances.snapshot())
        return True

    async def _observe(self) -> Existing | None:
        try:
            async with asyncio.timeout(2 * ACTION_S):
                return await self.actuator.observe()
        except (Unobservable, TimeoutError) as error:
            logger.warning("the fleet cannot be observed: %s", error)
            return None

    def _observation(self, fleet: ScaledFleet, existing: Existing | None, *, heard: bool) -> Observation:
        now = self._clock()
        instances = None
        if existing is not None and heard:
            readiness = self._readiness[fleet.model]
            instances = seen_all(existing, self.beats, fleet.pools, readiness, now)
            self.seen[fleet.model] = instances
        there = () if existing is None else existing.instances
        self._others.see(there, now)
        return Observation(
            at_s=now,
            routers=self._counts(fleet, instances or ()) if heard else (),
            instances=instances,
            leads=self.lease.held,
            elsewhere=self._others.gpus(fleet.model, there),
        )

    def _counts(self, fleet: ScaledFleet, instances: tuple[InstanceSeen, ...]) -> tuple[RouterCounts, ...]:
        queued = sum(each.waiting or 0 for each in instances)
        return tuple(counts_of((*self._routers.snapshot(), *self._left), fleet.model, queued))

    # --- effects ------------------------------------------------------------------------------------------------------

    async def _tell(self, fleet: ScaledFleet, event: Event) -> None:
        """Give the machine an event, and carry out all effects, one event at a time."""
        async with self._turn:
            events: deque[Event] = deque([event])
            while events:
                each = events.popleft()
                now = self._clock()
                effects = fleet.machine.handle(each, now)
                if self._journal is not None:
                    self._journal.add(fleet.model, now, each, effects)
                for effect in effects:
                    answer = await self._carry_out(fleet, effect)
                    if answer is not None:
                        events.append(answer)

    async def _carry_out(self, fleet: ScaledFleet, effect: Effect) -> Event | None:
        match effect:
            case Told(decision):
                self._keep(fleet, decision)
                return None
            case Act(action):
                return await self._act(action)
            case Check(number=number):
                if fleet.check is None:
                    return Checked(number, None, "nothing here simulates")
                self._to_check.put_nowait((fleet, effect))
                return None

    async def _check_forever(self) -> None:
        """Run simulations, one after another; looks go on meanwhile."""
        while True:
            fleet, asked = await self._to_check.get()
            assert fleet.check is not None
            await self._tell(fleet, await fleet.check(asked))

    async def _act(self, action: Action) -> Answered:
        if not self.lease.held:
            return Answered(action, "this controller does not lead any more", unsure=True)
        what = type(action).__name__.lower()
        if self._tracing is None:
            answered = await self._done(action)
        else:
            told = {"baton.instance": str(action.instance), "baton.because": action.because}
            with self._tracing.asking(f"baton.scaling.{what}", told) as span:
                answered = await self._done(action)
                span.end("refused" if answered.refusal else "", {"baton.refusal": answered.refusal or None})
        refusal = answered.refusal
        if isinstance(action, Start) and not refusal:
            self._others.began(action.instance, action.pool, self._clock())
        logger.info("%s %s: %s%s", what, action.instance, action.because, f" - refused: {refusal}" if refusal else "")
        return answered

    async def _done(self, action: Action) -> Answered:
        """Carry an action out within `ACTION_S`."""
        try:
            async with asyncio.timeout(ACTION_S):
                return Answered(action, await carry_out(self.actuator, action))
        except TimeoutError:
            return Answered(action, f"no answer within {ACTION_S:g} s", unsure=True)
        except Unobservable as error:
            return Answered(action, str(error), unsure=True)

    def _keep(self, fleet: ScaledFleet, decision: Decision) -> None:
        before = self.last.get(fleet.model)
        self.last[fleet.model] = decision
        if decision.what is not What.HOLD:
            self.counts[decision.what] += 1
        news = before is None or (before.what, _gist(before)) != (decision.what, _gist(decision))
        if decision.what is not What.HOLD or news:
            self.decisions.append(KeptDecision(time.time(), fleet.model, decision))  # noqa: TID251 - people read it
        if decision.what is not What.HOLD:
            named = ", ".join(f"{type(each).__name__.lower()} {each.instance}" for each in decision.actions)
            self._say(
                f"scaling: {named or decision.what.value}{' (dry run)' if decision.dry else ''}: {decision.because}"
            )


def _steady() -> Callable[[], float]:
    """A clock that starts at Unix time and then counts as the monotonic clock: names of instances are made from it."""
    ahead_s = time.time() - time.monotonic()  # noqa: TID251 - see above
    return lambda: time.monotonic() + ahead_s


def _gist(decision: Decision) -> tuple[object, ...]:
    """The parts of a held decision whose change is worth keeping: figures are left out."""
    return (decision.dry, decision.conditions, tuple((role, need.ahead) for role, need in decision.needs.items()))
