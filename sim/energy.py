"""The power that a run's engines draw: watts of each step, by what it computes and reads (`costs.power`). Pure.

Steps that do the same for the same requests are one sum: their contexts grow evenly, and power is linear in what is
read, so the middle of a run represents all of it. Between steps a GPU draws its idle power. An engine whose costs are
not the cost model's has no known power and counts as nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from costs.cost import Costs
from costs.step import StepWork, kind_of
from engine.twin import events as ev
from sim.fleet import MS
from sim.kernel import NS

if TYPE_CHECKING:
    from sim.instance import SimInstance


class _Meter:
    """The meter of one instance."""

    __slots__ = ("busy_ns", "joules", "run", "steps")

    def __init__(self) -> None:
        self.joules = 0.0
        self.busy_ns = 0
        self.run: ev.StepRun | None = None
        """The run under way: its number of steps is known when the next one begins, or when it is cut."""
        self.steps = 0


class Energy:
    """The energy of one world."""

    def __init__(self) -> None:
        self._meters: Final[dict[SimInstance, _Meter]] = {}

    def ran(self, at: SimInstance, run: ev.StepRun) -> None:
        """Steps have begun."""
        meter = self._meters.get(at)
        if meter is None:
            meter = self._meters[at] = _Meter()
        self._close(at, meter)
        meter.run, meter.steps = run, run.steps

    def cut(self, at: SimInstance, cut: ev.Cut) -> None:
        """A run has fewer steps."""
        self._meters[at].steps = cut.steps

    def died(self, at: SimInstance) -> None:
        """The step under way counts as a whole: at most one in a life."""
        if at in self._meters:
            self._close(at, self._meters[at])

    def _close(self, at: SimInstance, meter: _Meter) -> None:
        run, meter.run = meter.run, None
        costs = at.member.costs
        if run is None or not isinstance(costs, Costs) or not meter.steps:
            return
        context = run.sum_context + run.batch * (meter.steps - 1) // 2
        work = StepWork(new_tokens=run.prompt_tokens, batch=run.batch, sum_context=context)
        if run.prompt_tokens:
            took_ns = run.end_ns - run.at_ns
            work = StepWork(
                new_tokens=run.prompt_tokens,
                area=_area(costs, work, took_ns / MS),
                batch=run.batch,
                sum_context=context,
            )
        else:
            took_ns = costs.decode_run_ns(run.batch, run.sum_context, meter.steps)
        meter.busy_ns += took_ns
        meter.joules += costs.power_w(work) * took_ns / NS

    def busy_s(self, at: SimInstance) -> float:
        """The seconds in which its engine computed."""
        meter = self._meters.get(at)
        return 0.0 if meter is None else meter.busy_ns / NS

    def joules(self, at: SimInstance, there_s: float) -> float:
        """The energy of all its GPUs over `there_s` seconds; without computing they draw their idle power."""
        costs = at.member.costs
        if not isinstance(costs, Costs):
            return 0.0
        self.died(at)  # no run follows the last one
        meter = self._meters.get(at, _Meter())
        idle_s = max(0.0, there_s - meter.busy_ns / NS)
        return meter.joules + idle_s * costs.gpu.idle_w * at.member.gpus


def _area(costs: Costs, work: StepWork, step_ms: float) -> int:
    """Σ(L² − p²) of a step from its known time: a run reports how many tokens it computes, not after how many.

    Time in which a short chunk reads its long prefix (`StepCost.cached_ms`) counts as arithmetic: an upper bound.
    """
    per_area = costs.by_kind.of(kind_of(work)).area_ms
    return max(0, round((step_ms - costs.step_ms(work)) / per_area)) if per_area > 0 else 0
