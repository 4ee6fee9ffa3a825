"""Scenarios of `bench.scaling`, fixed before their first result.

Engines are Qwen3-32B on two A100 each, so that eight of them are a fleet and a run takes seconds: a load of 0.16 to
3.84 req/s of 8,000/1,000 tokens is to them what 1 to 24 req/s is to faster ones. The day of the default matrix lasts
four hours; the whole one is a day (`--full`). Every load of one scenario and seed is the same for all systems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from loadgen import servegen
from loadgen.arrival import Arrival
from loadgen.traces import azure, mooncake
from sim.experiments import scaling_loads as loads

HOUR: Final = 3600.0
STARTUPS: Final = (30.0, 60.0, 180.0, 300.0)
USUAL: Final = 180.0
SEEDS: Final = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One load."""

    name: str
    make: Callable[[Path | None, int], Sequence[Arrival]]
    needs_data: bool = False
    caching: bool = False

    def arrivals(self, data: Path | None, seed: int) -> Sequence[Arrival]:
        """Its requests."""
        return self.make(data, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A scenario with a start-up time."""

    scenario: Scenario
    startup_s: float
    seed: int = 1
    rivals: bool = True
    """Whether all rivals run, or only Baton and the bound."""

    @property
    def name(self) -> str:
        """`step, 180 s, seed 1`."""
        return f"{self.scenario.name}, {self.startup_s:g} s, seed {self.seed}"


def _made(name: str, rate: loads.Rate, most: float, span_s: float) -> Scenario:
    return Scenario(name=name, make=lambda _, seed: loads.poisson(rate, most, span_s, seed, loads.fixed))


def made_up(hours: float) -> list[Scenario]:
    """The scenarios that need no trace."""
    span_s = hours * HOUR
    drift = lambda _, seed: loads.poisson(  # noqa: E731 - one line of a table
        loads.steady(1.5), 1.5, span_s, seed, loads.Drift((12_000, 300), (2500, 1800), span_s, seed).sizes()
    )
    return [
        _made("steady", loads.steady(2.0), 2.0, span_s),
        _made("step", loads.step(0.8, 2.4, span_s / 3), 2.4, span_s),
        _made("on/off", loads.on_off(0.5, 3.0, 1800.0), 3.0, span_s),
        _made("sinusoid", loads.sinusoid(0.16, 3.84, 2400.0), 3.84, span_s),
        Scenario(name="drifting lengths", make=drift),
    ]


def traced(day_s: float) -> list[Scenario]:
    """The scenarios that are made from traces."""
    return [
        Scenario(name="Azure's curve", make=lambda data, seed: _azure(data, seed, day_s), needs_data=True),
        Scenario(name="ServeGen's day", make=lambda data, seed: _servegen(data, seed, day_s), needs_data=True),
        Scenario(name="Mooncake", make=_mooncake, needs_data=True, caching=True),
    ]


def _azure(data: Path | None, seed: int, day_s: float) -> list[Arrival]:
    assert data is not None
    path = next((data / "traces" / "azure2023").glob("*conv*.csv"))
    with path.open() as lines:
        rows = [each for each in azure.read(lines, np.random.default_rng(1), None) if isinstance(each, Arrival)]
    first_s = rows[0].at_s
    rate = loads.curve([each.at_s - first_s for each in rows], day_s, 2.6)
    return loads.poisson(rate, 2.6, day_s, seed, loads.fixed)


def _servegen(data: Path | None, seed: int, day_s: float) -> list[Arrival]:
    assert data is not None
    folder = data / "traces" / "servegen-deepseek-r1"
    pool = servegen.read({each.name: each.read_text().splitlines() for each in folder.iterdir() if "-" in each.name})
    rng = np.random.default_rng(seed)
    keep = 1.0 * day_s / (16.0 * 24 * HOUR)
    drawn = servegen.arrivals(pool, rng)
    kept = [each for each in drawn if each.output_tokens and rng.random() < keep]
    return loads.stretched(kept, day_s, len(kept) / day_s, seed, 16_384)


def _mooncake(data: Path | None, seed: int) -> list[Arrival]:
    """Prompts that one idle instance computes in half of the TTFT target: with longer ones no fleet attains 95 %."""
    assert data is not None
    with (data / "traces" / "mooncake" / "conversation_trace.jsonl").open() as lines:
        rows = (each for each in mooncake.read(lines, np.random.default_rng(seed), None) if isinstance(each, Arrival))
        kept = [*islice((each for each in rows if each.output_tokens and each.input_tokens <= 16_000), 12_000)]
    return loads.stretched(kept, kept[-1].at_s - kept[0].at_s, 0.8, seed, 32_768)


def cells(*, quick: bool, full: bool, data: Path | None) -> list[Cell]:
    """The cells to run."""
    if quick:
        return [Cell(scenario=made_up(1.0)[1], startup_s=60.0)]
    listed = [each for each in [*made_up(2.0), *traced(24 * HOUR if full else 4 * HOUR)] if data or not each.needs_data]
    if full:
        return [
            Cell(scenario=each, startup_s=startup_s, seed=seed)
            for each in listed
            for startup_s in STARTUPS
            for seed in SEEDS
        ]
    found = [Cell(scenario=each, startup_s=USUAL) for each in listed]
    swept = [each for each in listed if each.name in ("step", "sinusoid")]
    others = [startup_s for startup_s in STARTUPS if startup_s != USUAL]
    return found + [Cell(scenario=each, startup_s=each_s, rivals=False) for each in swept for each_s in others]
