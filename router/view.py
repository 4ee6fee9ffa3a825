"""What the router knows of its fleet, folded from probes and its own traffic; read by policies as a frozen snapshot.

Pure: the prober and the exchanges report, this module remembers.
"""

from __future__ import annotations

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
    draining: bool = False
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
        return self.up and not self.draining


class View:
    """The fleet, instance by instance, in the order in which they were added."""

    def __init__(self) -> None:
        self._instances: dict[InstanceId, InstanceView] = {}
        self._warm: set[tuple[str, InstanceId]] = set()

    def add(self, instance: Instance) -> None:
        """A new instance, or a new incarnation of a known one."""
        known = self._instances.get(instance.id)
        if known is None:
            self._instances[instance.id] = InstanceView(instance=instance)
        elif known.instance != instance:
            self._instances[instance.id] = InstanceView(instance=instance, inflight=known.inflight, sent=known.sent)

    def all(self) -> tuple[InstanceView, ...]:
        """Every instance."""
        return tuple(self._instances.values())

    def get(self, instance: InstanceId) -> InstanceView:
        """One instance.

        Raises:
            KeyError: it was never added.
        """
        return self._instances[instance]

    def seen(self, instance: InstanceId, models: tuple[dict[str, object], ...] | None, load: Load | None) -> None:
        """A probe succeeded; what it learned replaces what was known."""
        view = self._instances[instance]
        view.failures = 0
        view.up = True
        if models is not None:
            view.models_json = models
            view.models = tuple(str(entry["id"]) for entry in models if "id" in entry)
        if load is not None:
            view.load = load

    def probe_failed(self, instance: InstanceId) -> None:
        """A probe failed."""
        view = self._instances[instance]
        view.failures += 1
        if view.failures >= FAILURES_UNTIL_DOWN:
            self._down(view)

    def unreachable(self, instance: InstanceId) -> None:
        """A leg could not connect: out at once, until a probe succeeds."""
        view = self._instances[instance]
        view.failures = max(view.failures, FAILURES_UNTIL_DOWN)
        self._down(view)

    def _down(self, view: InstanceView) -> None:
        view.up = False
        self._warm = {pair for pair in self._warm if pair[1] != view.id}  # a new engine knows no handshake

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

    def models(self) -> tuple[str, ...]:
        """Names of all models that some ready instance serves, in order, once each."""
        return tuple(dict.fromkeys(name for view in self.all() if view.ready for name in view.models))
