"""The product's controller in the setting that all scalers share (`sim.experiments.scaling`)."""

from __future__ import annotations

from typing import Any

from goodput.control_rules import ControlRules
from goodput.controller import Controller
from goodput.demand import ClassPromise
from router.core.values import Promise as Promised
from sim.checked import checker
from sim.controlled import Ours
from sim.evaluate import Goal
from sim.experiments.scaling import ATTAINMENT, TARGETS, CellSetting, measure


def ours(setting: CellSetting, rules: ControlRules | None = None) -> Ours:
    """The product's controller."""
    promise = ClassPromise(ttft_ms=TARGETS.ttft_ms, tpot_ms=TARGETS.tpot_ms, attainment=ATTAINMENT)
    controller = Controller([*setting.pools().values()], {"": promise}, rules or ControlRules())
    members = {role.value: member for role, member in setting.members().items()}
    promised = Promised(ttft_ms=TARGETS.ttft_ms or 0.0, tpot_ms=TARGETS.tpot_ms or 0.0)
    check = checker(members, {"": Goal(targets=TARGETS, attainment=ATTAINMENT, promise=promised)}, "")
    return Ours(controller, check=check)


def run(setting: CellSetting) -> dict[str, Any]:
    """The figures of the controller's run, as of the other systems."""
    return measure(setting, ours(setting), setting.first())
