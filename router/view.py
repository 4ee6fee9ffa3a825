"""What the router knows of its fleet, folded from probes, heartbeats and its own traffic; read by policies.

Pure: the prober, the registry's reader and the exchanges report, this module remembers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cluster.ids import InstanceId
from cluster.instance import Instance, Load, Role

FAILURES_UNTIL_DOWN = 2
"""Probes in a row that must fail before an instance is taken out: one lost probe on a busy machine is noise."""


@dataclass(slots=True, kw_only=True)
class InstanceView:
    """One instance as the router sees it."""

    instance: Instance
    up: bool = False
    """It answers us."""
    accepting: bool = True
    """Its own word: ready, and not draining. Always true for engines without an agent."""
    state: str = ""
    """Its agent's word for its state; empty without an agent."""
    credits: int | None = None
    """Legs it lets all routers together have in flight; None: no agent says."""
    load: Load = field(default_factory=Load)
    inflight: int = 0
    """Legs of ours that are running there now."""
    sent: int = 0
    """Legs ever sent there: breaks ties, so that equal instances take turns."""
    failures: int = 0
    """Probes failed in a row."""
    models: tuple[str, ...] = ()
    models_json: tuple[dict[str, object], ...] = ()
    """The engine's own ``/v1/models`` entries."""

    @property
    def id(self) -> InstanceId:
        """Its name in the fleet."""
        return self.instance.id

    @property
    def role(self) -> Role:
        """Which legs it runs."""
        return self.instance.role

    @property
    def ready(self) -> bool:
        """Whether new legs may be sent."""
        return self.up and self.accepting

    def has_place(self, routers: int) -> bool:
        """Whether our share of its credits is not used up. Each of `routers` may use an equal part, one at least."""
        return self.credits is None or self.inflight < max(1, math.ceil(self.credits / max(1, routers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """An instance's own word, as its heartbeat brings it."""

    instance: Instance
    state: str
    accepting: bool
    credits: int
    load: Load
    models: tuple[dict[str, object], ...]


class View:
    """The fleet, instance by instance, in the order in which they were added."""

    def __init__(self) -> None:
        self._instances: dict[InstanceId, InstanceView] = {}
        self._warm: set[tuple[str, InstanceId]] = set()
        self.routers = 1
        """Routers that share the fleet, this one included."""

    def add(self, instance: Instance) -> None:
        """A new instance, or a new incarnation of a known one."""
        known = self._instances.get(instance.id)
        if known is None:
            self._instances[instance.id] = InstanceView(instance=instance)
        elif known.instance != instance:
            self._instances[instance.id] = InstanceView(instance=instance, inflight=known.inflight, sent=known.sent)
            self._forget_handshakes(instance.id)

    def fold(self, reported: tuple[Reported, ...]) -> frozenset[InstanceId]:
        """What the whole fleet says of itself now; who is not in it has left.

        Returns the instances on which legs of ours can no longer end well: gone, or started anew.
        """
        lost = {view.id for view in self.all() if view.id not in {each.instance.id for each in reported}}
        for each in reported:
            known = self._instances.get(each.instance.id)
            if known is not None and known.instance != each.instance:
                lost.add(each.instance.id)
            self.add(each.instance)
            view = self._instances[each.instance.id]
            if each.state != view.state and each.accepting:
                view.up, view.failures = True, 0  # its agent has just seen it answer
            view.state, view.accepting, view.credits, view.load = each.state, each.accepting, each.credits, each.load
            self._learn_models(view, each.models)
        for gone in lost - {each.instance.id for each in reported}:
            self._instances[gone].accepting = False
            self._instances[gone].state = "gone"
            if self._instances[gone].inflight == 0:
                del self._instances[gone]
        return frozenset(lost)

    def all(self) -> tuple[InstanceView, ...]:
        """Every instance."""
        return tuple(self._instances.values())

    def get(self, instance: InstanceId) -> InstanceView:
        """One instance.

        Raises:
            KeyError: it was never added, or has left.
        """
        return self._instances[instance]

    def knows(self, instance: InstanceId) -> bool:
        """Whether it is there at all."""
        return instance in self._instances

    def seen(self, instance: InstanceId, models: tuple[dict[str, object], ...] | None, load: Load | None) -> None:
        """A probe succeeded; what it learned replaces what was known."""
        view = self._instances[instance]
        view.failures = 0
        view.up = True
        if models is not None:
            self._learn_models(view, models)
        if load is not None:
            view.load = load

    @staticmethod
    def _learn_models(view: InstanceView, models: tuple[dict[str, object], ...]) -> None:
        if models != view.models_json:
            view.models_json = models
            view.models = tuple(str(entry["id"]) for entry in models if "id" in entry)

    def probe_failed(self, instance: InstanceId) -> bool:
        """A probe failed; whether the instance went down by it."""
        view = self._instances[instance]
        view.failures += 1
        return view.failures >= FAILURES_UNTIL_DOWN and self._down(view)

    def unreachable(self, instance: InstanceId) -> bool:
        """A leg could not connect: out at once, until a probe succeeds. Whether it went down by it."""
        view = self._instances[instance]
        view.failures = max(view.failures, FAILURES_UNTIL_DOWN)
        return self._down(view)

    def _down(self, view: InstanceView) -> bool:
        was_up, view.up = view.up, False
        self._forget_handshakes(view.id)
        return was_up

    def _forget_handshakes(self, decode: InstanceId) -> None:
        self._warm = {pair for pair in self._warm if pair[1] != decode}  # a new engine has met nobody

    def pair_met(self, producer: str, decode: InstanceId) -> None:
        """A decode instance has pulled from a producer (named by its engine id, which is new at every start)."""
        self._warm.add((producer, decode))

    def pair_warm(self, producer: str, decode: InstanceId) -> bool:
        """Whether the two have shaken hands."""
        return (producer, decode) in self._warm

    def leg_started(self, instance: InstanceId) -> None:
        """A leg of ours goes there."""
        view = self._instances[instance]
        view.inflight += 1
        view.sent += 1

    def leg_ended(self, instance: InstanceId) -> None:
        """That leg is over, however it ended."""
        view = self._instances[instance]
        assert view.inflight > 0, f"{instance}: a leg ended that never started"
        view.inflight -= 1
        if view.inflight == 0 and view.state == "gone":
            del self._instances[instance]

    def models(self) -> tuple[str, ...]:
        """Names of all models that some instance serves, ready or not, in order, once each."""
        return tuple(dict.fromkeys(name for view in self.all() for name in view.models))
