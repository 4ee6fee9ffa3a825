"""The product's controller in the setting that all scalers share (`sim.experiments.scaling`)."""

from __future__ import annotations

from typing import Any

from goodput.control_rules import Rules
from goodput.controller import Controller
from goodput.demand import Promise
from sim.controlled import Ours
from sim.experiments.scaling import ATTAINMENT, TARGETS, Setting, measure


def ours(setting: Setting, rules: Rules | None = None) -> Ours:
    """The product's controller."""
    promise = Promise(ttft_ms=TARGETS.ttft_ms, tpot_ms=TARGETS.tpot_ms, attainment=ATTAINMENT)
    return Ours(Controller([*setting.pools().values()], {"": promise}, rules or Rules()))


def run(setting: Setting) -> dict[str, Any]:
    """As the other systems are run."""
    return measure(setting, ours(setting), setting.first())
