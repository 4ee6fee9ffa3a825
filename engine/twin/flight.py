"""Steps that are under way: when they began, how many there will be, and when each is over."""

from __future__ import annotations

from dataclasses import dataclass

from costs.step import Work
from engine.twin.config import StepCosts


@dataclass(slots=True)
class Flight:
    """One run. All but its last step are trivial (see `runs.py`); `done` of them are in the books already."""

    number: int
    start_ns: int
    work: Work
    """Of the first step."""
    steps: int
    done: int = 0

    def end_ns(self, costs: StepCosts) -> int:
        """When the last step is over."""
        if self.work.new_tokens:
            return self.start_ns + max(1, costs.step_ns(self.work))
        return self.start_ns + costs.decode_run_ns(self.work.batch, self.work.sum_context, self.steps)

    def steps_over(self, costs: StepCosts, now_ns: int) -> int:
        """How many steps are over at a time before the end."""
        if self.steps == 1:
            return 0
        batch, sum_context, gone_ns = self.work.batch, self.work.sum_context, now_ns - self.start_ns
        begun = costs.decode_steps_for(batch, sum_context, gone_ns)
        return begun if costs.decode_run_ns(batch, sum_context, begun) <= gone_ns else begun - 1
