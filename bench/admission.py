"""Whether admission keeps its promises: the share of admitted requests, and of all arrivals, that meet their targets.

    make bench-admission                      simulated (minutes), then six runs on mocks on the wall clock (5 minutes)
    make bench-admission ARGS="--only mocks"
    make bench-admission ARGS="--only simulated"
    make bench-admission ARGS=--publish       writes docs/benchmarks

A run on mocks is void if the sender sent late, the mocks' clocks woke late, or an instance was slowed down late: then
the machine missed targets.

Two classes that refuse (`when_missed: shed`) come faster than the fleet can serve: one prefill instance, one decode
instance and one of role both, Llama-3.1-8B on H100s. Each scenario of `sim.experiments.overload` runs with the same
arrivals with each of two rules and without. Three run on mocks with both rules and with neither: two classes, answers
longer than foretold, and a decode instance that slows down (`bench.admission_mocks`). Margins are learned
(`router.predict.margins`) instead of the widest throughout, and prompts count an answer that they make late
`SHED_WEIGHT` times instead of once. Attainment is of all arrivals: refused ones count as missed. The gains of the
margins and the weight were chosen on other draws.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bench.admission_mocks import (
    COMMANDS,
    KEPT,
    LESS_BEFORE,
    NEITHER,
    NO_LOWER,
    NOW,
    ON_MOCKS,
    around_row,
    kept_name,
    on_mocks,
    row_on_mocks,
    targets_on_mocks,
)
from bench.published import Table, machine, note_of, publish, result, say, show, target
from costs import shipped
from loadgen.report import Targets
from sim.experiments import overload
from sim.experiments.overload import PARTS_OF_SLOW, SCENARIOS, URGENT, Kept, Overload
from sim.experiments.systems import Shelf
from sim.result import Result

SEEDS: Final = tuple(range(3, 15))
"""Twelve: with three, the longest decile's distance to the middle ones is anything from 5 to 14 points."""
APART: Final = 0.10
RULES: Final = {NEITHER: (False, False), "margins": (True, False), "weight": (False, True), NOW: (True, True)}
"""Whether margins are learned, and whether prompts of classes that refuse weigh the answers that they make late."""
PARTS: Final = ("simulated", "mocks")


@dataclass(frozen=True, slots=True)
class Ran:
    """All seeds of one scenario with one rule."""

    results: tuple[Result, ...]

    def kept(self, name: str = "", part: str = "", scenario: Overload | None = None) -> Kept:
        """Counts of a class's requests, in one of `PARTS_OF_SLOW`; empty `name`: of all classes, empty `part`: of the
        whole run.
        """
        parts = []
        for each in self.results:
            among = np.ones(len(each.columns), dtype=np.bool_)
            if name:
                among &= overload.of_class(each, name)
            if part and scenario is not None:
                among &= overload.around(scenario, each)[part]
            parts.append(overload.kept(each, among))
        return sum(parts, Kept(0, 0, 0))

    def deciles(self) -> list[list[float]]:
        """Attainment by decile of prompt length, of each seed."""
        return [
            [
                float(one)
                for one in overload.by_decile(each.columns["input_tokens"], each.met(Targets(), overload.targets()))
            ]
            for each in self.results
        ]


def apart(by_decile: Sequence[float]) -> float:
    """How much more of the two middle deciles of prompt length attains than of the longest."""
    return (by_decile[4] + by_decile[5]) / 2 - by_decile[9]


def simulated(scenario: Overload, shelf: Shelf, seeds: Sequence[int]) -> dict[str, Ran]:
    """One scenario with each rule."""
    found = {}
    for rule, (learns, weighs) in RULES.items():
        results = tuple(overload.run(scenario, shelf, seed, learns=learns, weighs=weighs) for seed in seeds)
        found[rule] = Ran(results)
        urgent, overall = found[rule].kept(URGENT), found[rule].kept()
        say(f"  {scenario.name}, {rule}: kept {urgent.kept:.3f}, attained {overall.attained:.3f}")
    return found


def figures_of(ran: dict[str, Ran], scenario: Overload) -> dict[str, Any]:
    """The figures of one scenario for the published file, by rule."""
    found: dict[str, Any] = {}
    for rule, each in ran.items():
        urgent, overall = each.kept(URGENT), each.kept()
        found[rule] = {
            "arrived": overall.arrived,
            "interactive": {"arrived": urgent.arrived, "admitted": urgent.admitted, "met": urgent.met},
            "kept": round(urgent.kept, 4),
            "kept_of_all": round(overall.kept, 4),
            "attained_interactive": round(urgent.attained, 4),
            "attained": round(overall.attained, 4),
        }
        if scenario.slow:
            found[rule]["around"] = {part: round(each.kept(URGENT, part, scenario).kept, 4) for part in PARTS_OF_SLOW}
        if scenario.prompts[0] != scenario.prompts[1]:
            seeds = each.deciles()
            found[rule]["by_decile"] = [round(float(one), 3) for one in np.mean(seeds, axis=0)]
            found[rule]["longest_behind_by_seed"] = [round(apart(one), 3) for one in seeds]
    return found


def targets_of(name: str, figures: dict[str, Any], scenario: Overload) -> dict[str, Any]:
    """The targets of one scenario, with their values."""
    mine, before = figures[NOW], figures[NEITHER]
    kept = mine["around"]["later"] if scenario.slow else mine["kept"]
    found = {
        f"{name}: {kept_name(scenario)}": target(kept, KEPT, at_most=False),
        f"{name}: {LESS_BEFORE}": target(mine["attained"] - before["attained"], NO_LOWER, at_most=False),
    }
    if scenario.within < 1.0:
        longest = f"{name}: attainment of the middle deciles less that of the longest"
        found[longest] = target(apart(mine["by_decile"]), APART)
    return found


# --- what it comes to -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """All figures, targets and tables' rows, as the parts find them."""

    figures: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Any] = field(default_factory=dict)
    rows: list[list[str]] = field(default_factory=list)
    around: list[list[str]] = field(default_factory=list)
    deciles: list[list[str]] = field(default_factory=list)

    def simulate(self, seeds: int) -> None:
        """Simulate every scenario."""
        shelf = Shelf(shipped.models(), shipped.profiles())
        for scenario in SCENARIOS:
            told = figures_of(simulated(scenario, shelf, SEEDS[:seeds]), scenario)
            self.figures[scenario.name] = told
            self.targets |= targets_of(scenario.name, told, scenario)
            self.rows += [row(scenario.name, rule, told[rule]) for rule in RULES]
            for rule in RULES:
                if "around" in told[rule]:
                    self.around.append([rule, *(f"{each:.3f}" for each in told[rule]["around"].values())])
                if "by_decile" in told[rule]:
                    by = told[rule]["by_decile"]
                    self.deciles.append([f"{scenario.name}, {rule}", *(f"{each:.2f}" for each in by)])

    def play(self) -> None:
        """Run the scenarios of `ON_MOCKS` on mocks."""
        self.figures["mocks"] = {}
        for scenario in ON_MOCKS:
            found = {rules: on_mocks(scenario, SEEDS[0], rules) for rules in COMMANDS}
            self.figures["mocks"][scenario.name] = {rules: each.as_json() for rules, each in found.items()}
            self.targets |= targets_on_mocks(found, scenario)
            self.rows += [row_on_mocks(each, scenario, rules) for rules, each in found.items()]
            self.around += [around_row(each, rules) for rules, each in found.items() if each.around]

    def tables(self) -> list[Table]:
        """The tables; one without rows is left out."""
        columns = ["", "rules", "interactive", "let in", "kept of these", "attained", "attained of both classes"]
        deciles = ["", *(str(at) for at in range(1, 11))]
        found = [
            Table("Overloads", columns, self.rows),
            Table("Kept, a decode instance slows down", ["rules", *PARTS_OF_SLOW], self.around),
            Table("Attainment by decile of prompt length, both classes", deciles, self.deciles),
        ]
        return [each for each in found if each.rows]


def row(name: str, rule: str, told: dict[str, Any]) -> list[str]:
    """A row of the table: one scenario with one rule."""
    mine = told["interactive"]
    return [
        name,
        rule,
        f"{mine['arrived']}",
        f"{mine['admitted']}",
        f"{told['kept']:.3f}",
        f"{told['attained_interactive']:.3f}",
        f"{told['attained']:.3f}",
    ]


def main() -> None:
    """Measure, print, publish."""
    parser = argparse.ArgumentParser(
        prog="bench-admission", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/admission.json and the tables")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), metavar="N", help="loads drawn (default %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.seeds <= len(SEEDS):
        parser.error(f"--seeds {args.seeds}: there are 1 to {len(SEEDS)}")
    facts = machine()
    found = Found()
    if args.only != "mocks":
        found.simulate(args.seeds)
    if args.only != "simulated":
        found.play()
    tables = found.tables()
    show(tables)
    told = result("admission", found.figures, found.targets)
    if args.publish:
        publish(told, tables, facts, note_of(facts))
    if not all(each["met"] for each in found.targets.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
