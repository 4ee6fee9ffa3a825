"""The product's controller as a scaler of a simulated fleet: the same machine, driven on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from goodput.controller import Controller
from goodput.decision import Act, Answered, Check, Checked, Decision, Effect, Observed, Told
from goodput.observation import Observation
from sim.scaling import Sight


class Ours:
    """The product's controller behind `sim.scaling.SimulatedScaler`."""

    def __init__(
        self,
        controller: Controller,
        *,
        check: Callable[[Check], Checked] | None = None,
        leads: Callable[[], bool] = lambda: True,
        heard: Callable[[float], bool] = lambda _now_s: True,
        keep: Callable[[float, Observed | Answered | Checked, tuple[Effect, ...]], None] | None = None,
    ) -> None:
        """Drive a controller.

        Args:
            controller: the machine.
            check: answers whether a fleet would suffice, where `ControlRules.checks` is set; None: no verdict.
            leads: whether the lock is held.
            heard: whether the router's metrics can be read at a time.
            keep: gets every event with its effects: a decision log.
        """
        self.controller: Final = controller
        self._check: Final = check
        self._leads: Final = leads
        self._heard: Final = heard
        self._keep: Final = keep
        self._looked_s = 0.0
        self.decisions: Final[list[Decision]] = []
        """The decisions with actions, and the last one if it has none."""

    @property
    def every_s(self) -> float:
        """Seconds until the controller's next look."""
        due_s = self.controller.next_wakeup()
        return self.controller.rules.every_s if due_s is None else max(0.05, due_s - self._looked_s)

    def act(self, sight: Sight) -> None:
        """Look once: give the controller an observation, and carry out its effects."""
        now_s = self._looked_s = sight.now_s
        routers = (sight.meters.counts(),) if self._heard(now_s) else ()
        seen = Observation(at_s=now_s, routers=routers, instances=sight.actuator.observe(), leads=self._leads())
        self._feed(Observed(seen), sight)

    def _feed(self, event: Observed | Answered | Checked, sight: Sight) -> None:
        effects = self.controller.handle(event, sight.now_s)
        if self._keep is not None:
            self._keep(sight.now_s, event, effects)
        for effect in effects:
            match effect:
                case Told(decision):
                    if self.decisions and not self.decisions[-1].actions:
                        self.decisions.pop()
                    self.decisions.append(decision)
                case Act(action):
                    self._feed(Answered(action, sight.actuator.give(action)), sight)
                case Check():
                    checked = Checked(effect.number, None, "nothing here simulates")
                    self._feed(checked if self._check is None else self._check(effect), sight)
