"""The tables of `bench.compare`, made from its JSON alone, so that a page can be made again without a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.published import Table
from sim.experiments import splitwise_gap

THEIR_MODEL = "bigscience/bloom"
THEIR_POWER = {"Splitwise-AA": "2.15 × Baseline-A100", "Splitwise-HA": "1.18 × Baseline-H100 at 10 % less cost"}
THEIR_COST = {"Splitwise-AA": "1.4 × Baseline-H100"}


def line(row: dict[str, Any]) -> str:
    """Progress: one row in short."""
    name = row.get("scenario") or row.get("application") or row.get("design") or row.get("step")
    parts = [str(name), *(str(row[key]) for key in ("policy", "scale", "equal", "chunked") if key in row)]
    keys = [key for key in ("aggregated", "colocated_2023", "colocated_chunked", "disaggregated") if key in row]
    parts += [f"{key} {row[key]['per_gpu']:.3f}/s/GPU ({row[key]['system']})" for key in keys]
    parts += [f"{key} {found['rate']:.2f}/s" for key, found in row.get("rates", {}).items()]
    if "rate" in row:
        parts.append(f"{row['rate']:.2f}/s ({row['system']})")
    return ", ".join(parts)


def how(figures: dict[str, Any]) -> str:
    """Seeds and sizes, for the note above the tables."""
    return (
        f"simulated; seed {figures['seed']}, {figures['requests_min']} to {figures['requests_max']} requests a run "
        f"({figures['lives']:g} lives of a request that just meets its targets), searches end within 4 %"
    )


def tables(figures: dict[str, Any]) -> list[Table]:
    """Tables of the parts that ran."""
    found: list[Table] = []
    for name, make in (
        ("scenarios", _scenarios),
        ("beside", _beside),
        ("traces", _traces),
        ("rivals", _rivals),
        ("distserve", _distserve),
        ("splitwise", _splitwise),
        ("splitwise_gap", _splitwise_gap),
    ):
        if figures.get(name):
            found += make(figures[name])
    return found


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _scenarios(rows: list[dict[str, Any]]) -> list[Table]:
    def cells(row: dict[str, Any]) -> list[str]:
        out = row["tokens"]["out"]
        theirs = row["published"]
        return [
            row["scenario"],
            f"{row['aggregated']['per_gpu'] * out:.0f} ({row['aggregated']['system']})",
            f"{row['disaggregated']['per_gpu'] * out:.0f} ({row['disaggregated']['system']})",
            _ratio(row["ratio"]),
            f"{theirs[0]} / {theirs[1]}",
            _ratio(theirs[1] / theirs[0]),
        ]

    columns = ("in/out, TTFT/TPOT", "aggregated", "disaggregated", "ratio", "aiconfigurator's", "its ratio")
    title = "Ten scenarios: output tokens a second and GPU with nine in ten requests within both targets"
    return [Table(title, columns, [cells(row) for row in rows])]


def _beside(rows: list[dict[str, Any]]) -> list[Table]:
    shown = [[row["scenario"], row["aggregated"]["system"], _ratio(row["ratio"])] for row in rows]
    title = "The same where reading a decode's context takes twice as long beside a prompt"
    return [Table(title, ("scenario", "aggregated", "ratio"), shown)]


def _traces(rows: list[dict[str, Any]]) -> list[Table]:
    shown = [
        [
            row["scenario"],
            f"{_rate(row['aggregated']['per_gpu'])} ({row['aggregated']['system']})",
            f"{_rate(row['disaggregated']['per_gpu'])} ({row['disaggregated']['system']})",
            _ratio(row["ratio"]),
        ]
        for row in rows
    ]
    title = f"Traces, {rows[0]['model']} on {rows[0]['gpus']} {rows[0]['gpu']}: requests a second and GPU"
    return [Table(title, ("trace, TTFT/TPOT", "aggregated", "disaggregated", "ratio"), shown)]


def _rivals(rows: list[dict[str, Any]]) -> Iterator[Table] | list[Table]:
    found = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        mine = [row for row in rows if row["scenario"] == scenario]
        best = max(max(row["disaggregated"]["per_gpu"], row["aggregated"]["per_gpu"]) for row in mine)
        shown = [
            [
                row["policy"],
                f"{_rate(row['disaggregated']['per_gpu'])} ({row['disaggregated']['system']})",
                f"{_rate(row['aggregated']['per_gpu'])} ({row['aggregated']['system']})",
                _ratio(max(row["disaggregated"]["per_gpu"], row["aggregated"]["per_gpu"]) / best) if best else "–",
            ]
            for row in mine
        ]
        columns = ("policy", "disaggregated, own best split", "aggregated", "better of both / best")
        found.append(Table(f"Routing policies on {scenario}: requests a second and GPU", columns, shown))
    return found


def _distserve(rows: list[dict[str, Any]]) -> list[Table]:
    shown = [
        [
            f"{row['application']} × {row['scale']:g}",
            *(
                _rate(row[name]["per_gpu"])
                for name in ("colocated_2023", "colocated_same_engine", "colocated_chunked", "disaggregated")
            ),
            *(_ratio(row[f"over_{name}"]) for name in ("2023", "same_engine", "chunked")),
            row["theirs"] if row["scale"] == 1 else "",
        ]
        for row in rows
    ]
    columns = (
        "application × scale of targets",
        "colocated, vLLM 2023",
        "colocated, same engine",
        "colocated, chunked, tuned",
        "disaggregated",
        "/ 2023",
        "/ same engine",
        "/ chunked",
        "theirs (over vLLM 2023)",
    )
    return [Table("DistServe: requests a second and GPU as the targets tighten", columns, shown)]


def _splitwise(rows: list[dict[str, Any]]) -> list[Table]:
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for budget, theirs in (("power", THEIR_POWER), ("cost", THEIR_COST)):
            mine = [row for row in rows if row["equal"] == budget and row["model"] == model]
            found.append(_designs(model, budget, mine, theirs if model == THEIR_MODEL else {}))
    return found


def _splitwise_gap(rows: list[dict[str, Any]]) -> list[Table]:
    ratios = splitwise_gap.RATIOS

    def cells(row: dict[str, Any]) -> list[str]:
        rates = {name: found["rate"] for name, found in row["rates"].items()}
        over = [rates[each.name] / rates[each.over.name] if rates[each.over.name] else None for each in ratios]
        return [row["step"], *(_rate(rates[name]) for name in rates), *(_ratio(value) for value in over)]

    shown = [cells(row) for row in rows]
    shown.append(["theirs", *("" for _ in rows[0]["rates"]), *(_ratio(each.theirs) for each in ratios)])
    columns = ("assumption", *(f"{name}, req/s" for name in rows[0]["rates"]), *(each.said for each in ratios))
    title = f"Splitwise, {splitwise_gap.MODEL}: the paper's assumptions taken over, one after the other"
    return [Table(title, columns, shown)]


def _designs(model: str, budget: str, rows: list[dict[str, Any]], theirs: dict[str, str]) -> Table:
    rates = {row["design"]: row["rate"] for row in rows if not row["chunked"]}
    shown = [
        [
            row["design"] + (", chunked" if row["chunked"] else ""),
            " + ".join(f"{count} {kind}" for kind, count in row["machines"]),
            f"{row['power']:.0f}",
            f"{row['cost']:.1f}",
            _rate(row["rate"]),
            _ratio(row["rate"] / rates["Baseline-A100"] if rates.get("Baseline-A100") else None),
            _ratio(row["rate"] / rates["Baseline-H100"] if rates.get("Baseline-H100") else None),
            theirs.get(row["design"], "") if not row["chunked"] else "",
        ]
        for row in rows
    ]
    columns = ("design", "machines", "power", "cost", "req/s", "/ A100", "/ H100", "theirs")
    return Table(f"Splitwise, {model}, at equal {budget}: requests a second within nine targets", columns, shown)
