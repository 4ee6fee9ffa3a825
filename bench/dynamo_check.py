"""Checks that Dynamo's planner reads what `sim.baselines.scaling.dynamo` sends: values sent beside values reported.

    .venv/bin/python -m bench.dynamo_check        half a minute; installs .bench/scaling first if need be

A steady load on a fixed fleet for twenty minutes: the planner's own diagnostics must name the rate and the lengths that
were sent, and a rate of one engine that agrees with Baton's costs. `make bench-scaling` publishes no row of a planner
that read something else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from bench import published, scaling
from cluster.instance import Role
from costs import shipped
from goodput.sizing import LoadToServe, RecentLengths, Sizer
from goodput.sketch import sketch_of
from sim.baselines.scaling.dynamo import DynamoPlanner
from sim.experiments import scaling as experiment
from sim.experiments.scaling_loads import ANSWER, PROMPT, fixed, poisson, steady
from sim.experiments.systems import Shelf

RATE: Final = 1.2
SPAN_S: Final = 1200.0
OFF: Final = 0.2
"""Allowed difference between a value sent and the value read: forecasts of a Poisson load, and regressions over
points."""


def compared(answers: list[Mapping[str, Any]], setting: experiment.CellSetting) -> list[tuple[str, float, float]]:
    """Name of a value, its value as sent or by Baton's costs, the planner's value."""
    last: dict[str, float] = {}
    for each in answers:
        last |= each.get("read", {})
    law = setting.law()
    lengths = RecentLengths(prompts=sketch_of([PROMPT]), answers=sketch_of([ANSWER]))
    load = LoadToServe(rate=RATE, lengths={"": lengths}, promises={})
    prefill = Sizer(law.pools[Role.PREFILL].engine)
    return [
        ("requests in 180 s", RATE * 180, last.get("predicted_num_req", 0.0)),
        ("prompt tokens", PROMPT, last.get("predicted_isl", 0.0)),
        ("answer tokens", ANSWER, last.get("predicted_osl", 0.0)),
        ("prompts a second of one engine", RATE / prefill.prompt_work(load), last.get("engine_rps_prefill", 0.0)),
    ]


def main() -> int:
    """Run, and say."""
    arrivals = poisson(steady(RATE), RATE, SPAN_S, 1, fixed)
    setting = experiment.CellSetting(
        shelf=Shelf(shipped.models(), shipped.profiles()), arrivals=arrivals, startup_s=30.0
    )
    answers: list[Mapping[str, Any]] = []
    with scaling.planner(setting) as (ask, first):

        def noted(look: Mapping[str, Any]) -> Mapping[str, Any]:
            answers.append(ask(look))
            return {**answers[-1], "target_prefill": None, "target_decode": None}

        experiment.measure(setting, DynamoPlanner(setting.law(), noted, first), {Role.PREFILL: 4, Role.DECODE: 4})
    rows = compared(answers, setting)
    for name, sent, read in rows:
        published.say(f"{name}: {sent:.4g} sent, {read:.4g} read")
    return int(any(abs(read / sent - 1) > OFF for _, sent, read in rows))


if __name__ == "__main__":
    sys.exit(main())
