"""Steps under way: when they began, how many there will be, and when each is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from costs.step import StepWork
from engine.twin.batch import Batch
from engine.twin.config import StepCosts


@dataclass(slots=True)
class Flight:
    """One run. All but its last step are trivial (see `runs.py`); `done` of them are counted already."""

    costs: StepCosts
    number: int
    start_ns: int
    batch: int
    """The number of requests that decode."""
    sum_context: int
    """The context tokens of the first step."""
    new_tokens: int
    area: int
    longest_cached: int
    steps: int
    done: int = 0
    end_ns: int = field(init=False)
    """The end of the last step."""

    @classmethod
    def of(cls, batch: Batch, costs: StepCosts, number: int, start_ns: int, steps: int) -> Flight:
        """The steps that begin with this batch."""
        prompts = batch.new_tokens, batch.area, batch.longest_cached
        return cls(costs, number, start_ns, batch.decodes, batch.sum_context, *prompts, steps)

    def __post_init__(self) -> None:
        if not self.new_tokens:
            self.end_ns = self.start_ns + self.costs.decode_run_ns(self.batch, self.sum_context, self.steps)
            return
        work = StepWork(
            new_tokens=self.new_tokens,
            area=self.area,
            batch=self.batch,
            sum_context=self.sum_context,
            longest_cached=self.longest_cached,
        )
        self.end_ns = self.start_ns + max(1, self.costs.step_ns(work))

    def cut(self, steps: int) -> None:
        """End the run after `steps` steps."""
        self.steps = steps
        self.end_ns = self.start_ns + self.costs.decode_run_ns(self.batch, self.sum_context, steps)

    def steps_over(self, now_ns: int) -> int:
        """The number of steps that are over at a time before the end."""
        if self.steps == 1:
            return 0
        gone_ns = now_ns - self.start_ns
        begun = self.costs.decode_steps_for(self.batch, self.sum_context, gone_ns)
        return begun if self.costs.decode_run_ns(self.batch, self.sum_context, begun) <= gone_ns else begun - 1
