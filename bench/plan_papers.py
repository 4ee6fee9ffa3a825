"""Papers' claims through `baton plan` itself: a mix of GPU types against the best single type (Mélange), prompts and
answers on machines of their own at equal load (Splitwise), power (POLCA, Towards Greener LLMs). `bench.plan`'s parts.

The papers compare throughput at one cost; a planner finds the cost of one load. Where a claim is a ratio of
throughputs, its inverse is the claim on cost: 1.4 × the throughput at equal cost is 0.71 of the cost at equal load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from baton.planning import FleetResults, Planner, Searched, Task, plan
from bench.plan_loads import goal, task_of, traces
from bench.published import Table, say, target
from cluster.instance import Role
from cluster.spec import Model, Pools
from costs.hardware import gpu_named
from costs.shipped import model_named
from goodput.candidates import Arrangement, arrangements

PAPERS_EFFORT: Final = 16_000
"""Requests that a plan may simulate here: loads are a third as long, and plans are many."""

# --- Mélange ----------------------------------------------------------------------------------------------------------

MELANGE_MODEL: Final = "meta-llama/Llama-2-7b-hf"
MELANGE_TYPES: Final = ("L4", "A10G", "A100-80G-SXM", "H100-SXM")
MELANGE_TPOT_MS: Final = (120.0, 40.0)
MELANGE_RATES: Final = (1.0, 4.0, 12.0)
MELANGE_REQUESTS: Final = 300
MELANGE_LENGTH: Final = 4096
"""Of Llama-2: prompt and answer; longer requests are cut."""
MELANGE_ATTAINMENT: Final = 0.995
MOST: Final = 12
"""GPUs of each type."""
THEIRS_MELANGE: Final = "up to 77 % (chat), 33 % (documents), 51 % (both) below one type"


def of_melange(data: Path) -> list[dict[str, Any]]:
    """Azure's conversation at two rates, two promises: one type alone, and any mix."""
    (trace,) = traces(["Azure conversation"])
    base = task_of(trace, data)
    rows = []
    for tpot_ms in MELANGE_TPOT_MS:
        for rate in MELANGE_RATES:
            task = replace(
                base,
                model=Model(name=MELANGE_MODEL, pools=Pools()),
                shape=model_named(MELANGE_MODEL),
                arrivals=tuple(_requests(base, rate)),
                goals={"all": goal(None, tpot_ms, MELANGE_ATTAINMENT)},
                effort=PAPERS_EFFORT,
            )
            rows.append({"tpot_ms": tpot_ms, "rate": rate, **_mixed(task)})
            say(f"Mélange: {rows[-1]}")
    return rows


def _requests(base: Task, rate: float) -> Sequence[Any]:
    kept = base.arrivals[:MELANGE_REQUESTS]
    scale = (len(kept) - 1) / (kept[-1].at_s - kept[0].at_s) / rate
    return [
        msgspec.structs.replace(
            each,
            at_s=(each.at_s - kept[0].at_s) * scale,
            input_tokens=min(each.input_tokens, MELANGE_LENGTH - min(each.output_tokens, MELANGE_LENGTH // 2)),
        )
        for each in kept
    ]


def _mixed(task: Task) -> dict[str, Any]:
    """The price of the load on each type alone, and on the best mix."""
    types = {name: gpu_named(name) for name in MELANGE_TYPES}
    alone = {name: _best(replace(task, gpus=((gpu, MOST),))) for name, gpu in types.items()}
    mix = _best(replace(task, gpus=tuple((gpu, MOST) for gpu in types.values())))
    prices = {name: None if best is None else round(best.price_per_hour, 2) for name, best in alone.items()}
    served = [price for price in prices.values() if price is not None]
    price = None if mix is None else round(mix.price_per_hour, 2)
    return {
        "alone": prices,
        "mix": "none" if mix is None else str(mix),
        "mix_usd_per_hour": price,
        "below_best_single": _below(price, min(served, default=None)),
        "below_worst_single": _below(price, max(served, default=None)),
    }


def _below(price: float | None, other: float | None) -> float | None:
    return None if price is None or other is None else round(1 - price / other, 4)


def _best(task: Task) -> FleetResults | None:
    return plan(task, lambda *_: None).best


def table_of_melange(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of the part `melange`."""
    columns = ["TPOT, req/s", *MELANGE_TYPES, "best mix", "$/h", "below the best type", "below the dearest", "theirs"]
    shown = [
        [
            f"{row['tpot_ms']:g} ms, {row['rate']:g}",
            *(_price(row["alone"][name]) for name in MELANGE_TYPES),
            row["mix"],
            _price(row["mix_usd_per_hour"]),
            _percent(row["below_best_single"]),
            _percent(row["below_worst_single"]),
            THEIRS_MELANGE if not at else "",
        ]
        for at, row in enumerate(rows)
    ]
    return Table(
        "Mélange: Llama-2-7b, Azure conversation's lengths, 99.5 % within TPOT; $/h of each type alone", columns, shown
    )


def _price(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


# --- Splitwise --------------------------------------------------------------------------------------------------------

SPLITWISE_MODEL: Final = "meta-llama/Llama-2-70b-hf"
SPLITWISE_RATE: Final = 12.0
SPLITWISE_REQUESTS: Final = 500
SPLITWISE_GOAL: Final = (3000.0, 100.0, 0.9)
"""TTFT, TPOT, attainment: three times a middle prompt and about 1.5 × a lone decode step on eight A100s."""
NODES: Final = 64
"""GPUs of each type."""
A100, H100 = "A100-80G-SXM", "H100-SXM"
SPLITWISE: Final[Mapping[str, tuple[str, str, bool, str, str]]] = MappingProxyType(
    {
        "AA over Baseline-A100, watts": (A100, A100, True, A100, "0.47 (2.15 × the throughput)"),
        "AA over Baseline-H100, $/h": (A100, A100, False, H100, "0.71 (1.4 ×)"),
        "HA over Baseline-H100, watts": (H100, A100, True, H100, "0.85 (1.18 ×)"),
    }
)
"""GPUs for prompts and for answers, whether watts count, GPUs of the aggregated baseline, theirs."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to ask for Splitwise's claims."""

    name: str
    tp: int | None = None
    """Tensor parallel size of every instance; None: the plan chooses."""
    times: int = 1
    """The load's rate, times this."""


SETTINGS: Final = (Setting("the plan chooses"), Setting("tp 8, as theirs", tp=8), Setting("tp 8, 4 × the rate", 8, 4))
"""The second has their machines of eight GPUs; in the third a machine is a smaller part of the fleet."""


def of_splitwise(data: Path) -> list[dict[str, Any]]:
    """The cost of the same load with roles apart and together, in each setting."""
    rows = []
    for setting in SETTINGS:
        base = _splitwise_load(data, setting)
        for name, (prompts, answers, watts, baseline, theirs) in SPLITWISE.items():
            task = replace(base, objective="power" if watts else "cost")
            split = _of_roles(task, setting, (Role.PREFILL, prompts), (Role.DECODE, answers))
            whole = _of_roles(task, setting, (Role.BOTH, baseline))
            ratio = None
            if split is not None and whole is not None:
                ratio = split.power_w / whole.power_w if watts else split.price_per_hour / whole.price_per_hour
            row = {"setting": setting.name, "claim": name, "theirs": theirs, "split": str(split), "whole": str(whole)}
            rows.append({**row, "ratio": None if ratio is None else round(ratio, 3)})
            say(f"Splitwise: {rows[-1]}")
    return rows


def _splitwise_load(data: Path, setting: Setting) -> Task:
    """Azure's conversation on Llama-2-70B."""
    (trace,) = traces(["Azure conversation"])
    base = task_of(trace, data)
    kept = base.arrivals[: SPLITWISE_REQUESTS * setting.times]
    scale = (len(kept) - 1) / (kept[-1].at_s - kept[0].at_s) / (SPLITWISE_RATE * setting.times)
    return replace(
        base,
        model=Model(name=SPLITWISE_MODEL, pools=Pools()),
        shape=model_named(SPLITWISE_MODEL),
        arrivals=tuple(msgspec.structs.replace(each, at_s=each.at_s * scale) for each in kept),
        goals={"all": goal(*SPLITWISE_GOAL)},
        effort=PAPERS_EFFORT,
    )


def _of_roles(task: Task, setting: Setting, *pools: tuple[Role, str]) -> FleetResults | None:
    """The best fleet of these roles, each on one GPU type, without caps."""
    types = dict.fromkeys(gpu for _, gpu in pools)
    asked = replace(task, gpus=tuple((gpu_named(name), NODES) for name in types))
    wanted = [(role, gpu_named(name).name) for role, name in pools]
    only = [
        each
        for each in arrangements(asked.shape, asked.gpus)
        if [(kind.role, kind.gpu.name) for kind in each] == wanted
        and all(setting.tp in {None, kind.tp} for kind in each)
    ]
    return best_of(asked, only)


def rule_of_thumb(task: Task) -> FleetResults | None:
    """What APEX calls the heuristic: tensor parallel over whole nodes, of one GPU type, that do both; the cheapest."""
    only = [
        each
        for each in arrangements(task.shape, task.gpus)
        if len(each) == 1 and each[0].role is Role.BOTH and each[0].tp == each[0].gpu.node_gpus
    ]
    return best_of(task, only)


def best_of(task: Task, only: Sequence[Arrangement]) -> FleetResults | None:
    """The best fleet of these arrangements; None: none holds."""
    searched = Searched(Planner(task, only))
    searched.run(lambda *_: None, effort=task.effort, on=None, processes=None)
    best = searched.found.best
    return None if best is None else searched.answer(best)


def table_of_splitwise(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of the part `splitwise`."""
    columns = ["claim: cost of one load", "setting", "theirs", "ours", "split", "aggregated"]
    shown = [
        [
            row["claim"],
            row["setting"],
            row["theirs"],
            "–" if row["ratio"] is None else f"{row['ratio']:.2f}",
            row["split"],
            row["whole"],
        ]
        for row in rows
    ]
    told = f"Splitwise: Llama-2-70B on its profiles, Azure conversation's lengths at {SPLITWISE_RATE:g} req/s and 4 ×"
    return Table(told, columns, shown)


# --- power ------------------------------------------------------------------------------------------------------------

POWER_TRACES: Final = ("Azure conversation",)


def of_power(data: Path) -> list[dict[str, Any]]:
    """Watts to provision and joules a token: planned for price, for watts with caps, for energy."""
    rows = []
    for trace in traces(POWER_TRACES):
        task = replace(task_of(trace, data), effort=PAPERS_EFFORT)
        for objective in ("cost", "power", "energy"):
            best = _best(replace(task, objective=objective))
            rows.append({"trace": trace.name, "objective": objective, **_drawn(best)})
            say(f"power: {rows[-1]}")
    return rows


def _drawn(best: FleetResults | None) -> dict[str, Any]:
    if best is None:
        return {"plan": "none"}
    seen = best.seen
    return {
        "plan": str(best),
        "gpus": best.gpus,
        "provisioned_w": round(best.power_w),
        "mean_w": round(seen.energy_j / seen.seconds),
        "joules_per_token": round(seen.energy_j / seen.output_tokens, 4),
        "usd_per_hour": round(best.price_per_hour, 2),
        "share": round(min(each.share for each in seen.classes.values()), 4),
    }


def table_of_power(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The table of the part `power`."""
    columns = ["trace, made small", "plan", "W provisioned", "W on average", "J an output token", "$/h", "attained"]
    shown = []
    for row in rows:
        head = [f"{row['trace']}, {row['objective']}", row["plan"]]
        if row["plan"] == "none":
            shown.append([*head, *(["–"] * 5)])
            continue
        figures = [f"{row['provisioned_w']:,}", f"{row['mean_w']:,}", f"{row['joules_per_token']:.2f}"]
        shown.append([*head, *figures, f"{row['usd_per_hour']:.2f}", f"{row['share']:.1%}"])
    return Table(
        "Power: the same load and promise, planned for price, for watts under caps, for energy", columns, shown
    )


MELANGE_BELOW: Final = 0.51
"""Theirs on a mix of short and long requests, of which Azure's conversations are nearest."""


def targets(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The papers' figures beside Baton's, of the parts that ran."""
    told = {}
    if "melange" in figures:
        below = [row["below_worst_single"] for row in figures["melange"] if row["below_worst_single"] is not None]
        best = max(below, default=None)
        told["Mélange: a mix below the dearest type, at most"] = target(best, MELANGE_BELOW, at_most=False)
    for row in (each for each in figures.get("splitwise", ()) if each["setting"] == SETTINGS[0].name):
        told[f"Splitwise: {row['claim']}, of the baseline's"] = target(row["ratio"], float(row["theirs"].split()[0]))
    if "power" in figures:
        joules = {row["objective"]: row.get("joules_per_token") for row in figures["power"]}
        least = min((each for name, each in joules.items() if name != "energy" and each is not None), default=None)
        value = joules["energy"] / least if least and joules.get("energy") else None
        told["joules a token of the plan for energy, over the least of other plans"] = target(value, 1.0)
    return told


TABLES: Final[Mapping[str, Callable[[Any], Table]]] = MappingProxyType(
    {"melange": table_of_melange, "splitwise": table_of_splitwise, "power": table_of_power}
)
