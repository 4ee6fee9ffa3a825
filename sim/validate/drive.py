"""One twin on virtual time: requests in, the times of each out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cluster.errors import UsageError
from cluster.ids import RequestId
from cluster.instance import Load
from engine.twin.config import StepCosts, TwinConfig
from engine.twin.events import (
    Effect,
    Event,
    LoadIs,
    ReadLoad,
    RequestFinished,
    RequestRefused,
    StartEngine,
    StepRun,
    Submit,
)
from engine.twin.machine import Twin
from engine.twin.request import TwinRequest
from sim.validate.times import Array, RequestTimes
from sim.validate.workloads import PlannedRequest


@dataclass(frozen=True, slots=True)
class Driven:
    """The results of a driven twin."""

    times: RequestTimes
    """In the order of the requests."""
    preemptions: int
    loads: tuple[Load, ...]
    """The twin's load at each of `samples_ns`."""


@dataclass(slots=True)
class _Notes:
    costs: StepCosts
    first_ns: dict[RequestId, int] = field(default_factory=dict)
    over: dict[RequestId, RequestFinished] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)

    def take(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case StepRun():
                    self._run(effect)
                case RequestFinished():
                    self.over[effect.request] = effect
                case LoadIs():
                    self.loads.append(effect.load)
                case RequestRefused():
                    raise UsageError(f"the engine would refuse request {effect.request}: {effect.because}")

    def _run(self, run: StepRun) -> None:
        starting = [share.request for share in run.shares if share.first == 0]
        if starting:
            end_ns = run.end_ns
            if run.steps > 1:  # the last token of a prompt, computed like a decoding request's
                end_ns = run.at_ns + self.costs.decode_run_ns(run.batch, run.sum_context, 1)
            self.first_ns.update(dict.fromkeys(starting, end_ns))


END: Final = 1 << 62
"""Beyond every run, in ns: 146 years."""


def drive(
    config: TwinConfig, costs: StepCosts, planned: Sequence[PlannedRequest], samples_ns: Sequence[int] = ()
) -> Driven:
    """Let one twin serve these requests, in order of time, and read its load at the times `samples_ns`.

    Raises:
        UsageError: the engine would refuse a request.
    """
    twin, notes = Twin(config, costs), _Notes(costs)
    notes.take(twin.handle(StartEngine(1), 0))
    submits: list[tuple[int, int, Event]] = [
        (each.at_ns, number, Submit(_request(number, each))) for number, each in enumerate(planned)
    ]
    reads: list[tuple[int, int, Event]] = [(at_ns, len(planned), ReadLoad()) for at_ns in samples_ns]
    for at_ns, _, event in sorted([*submits, *reads], key=lambda item: item[:2]):
        notes.take(twin.handle(event, at_ns))  # after all that was due before
    notes.take(twin.handle(ReadLoad(), END))
    assert notes.loads.pop() == Load(kv_usage=0.0), "requests are left that never end"
    ids = [RequestId(str(number)) for number in range(len(planned))]
    over = [notes.over[each] for each in ids]

    def ms(times: Iterable[int | None]) -> Array:
        return np.array(list(times), dtype=np.float64) / 1e6

    times = RequestTimes(
        arrived=ms(each.at_ns for each in planned),
        started=ms(each.first_run_ns for each in over),
        first=ms(notes.first_ns[each] for each in ids),
        last=ms(each.at_ns for each in over),
        outputs=np.array([each.outputs for each in over], dtype=np.float64),
    )
    return Driven(times, sum(each.preemptions for each in over), tuple(notes.loads))


def _request(number: int, planned: PlannedRequest) -> TwinRequest:
    return TwinRequest(id=RequestId(str(number)), prompt=planned.prompt, max_tokens=planned.output_tokens)
