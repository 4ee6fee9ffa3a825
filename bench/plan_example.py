"""A plan put to the test: the example is planned, started on mocks as planned, loaded with its own load, and compared.

    make plan-example                        about two minutes; keep the machine quiet meanwhile
    make plan-example ARGS="--effort 5000"   flags for `baton plan`

`baton plan` makes `planned.yaml` of `examples/plan.yaml` and `examples/plan-workload.yaml`, `baton up --engine mock`
starts it, and `baton load` sends the very requests that were planned for, each in its class. A mock takes for each step
what the cost model says, as the planner does; router, admission and agents are the real ones, on the wall clock.

"Seen" is the sender's measurement, "predicted" the plan's; both with their 95 % interval (`sim.evaluate.interval`).
Ends with 1 if a class attains less than its target.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from baton.clusterfile import read
from baton.simulated import targets_of
from baton.workload import workload
from bench.processes import BATON_COMMAND, ROOT, Running, cores, stopping
from cluster.spec import SloClass
from loadgen.arrival import Arrival
from loadgen.record import Record
from loadgen.report import met
from sim.evaluate import interval

FILE = ROOT / "examples" / "plan.yaml"
WORKLOAD = ROOT / "examples" / "plan-workload.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, start, load, compare; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _, words = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory(prefix="plan-example-") as folder:
        return _run(Path(folder), words)


def _run(folder: Path, words: Sequence[str]) -> int:
    arrivals = workload(WORKLOAD, 0)
    plan, planned = _planned(folder, words)
    print(f"planned: {plan['best']['fleet']}, {plan['best']['price_per_hour']:.2f} an hour", file=sys.stderr)
    (folder / "trace.jsonl").write_text("".join(f"{json.dumps(_row(each))}\n" for each in arrivals))
    told = _loaded(folder, planned)
    promised = read(str(planned)).usable().slo
    rows = [_compared(name, each, plan["best"]["attainment"].get(name), told) for name, each in promised.items()]
    print(f"{'class':<14} {'promised':>9} {'predicted':>27} {'seen':>27} {'requests':>9}")
    for row in rows:
        shares = " ".join(f"{_told(row[name]):>27}" for name in ("predicted", "seen"))
        print(f"{row['class']:<14} {row['promised']:>9.1%} {shares} {row['requests']:>9}")
    kept = all(row["seen"]["share"] >= row["promised"] for row in rows)
    print(json.dumps({"benchmark": "plan-example", "fleet": plan["best"]["fleet"], "kept": kept, "classes": rows}))
    return 0 if kept else 1


def _planned(folder: Path, words: Sequence[str]) -> tuple[dict[str, Any], Path]:
    out = folder / "planned.yaml"
    command = [
        *BATON_COMMAND,
        "plan",
        str(FILE),
        "--workload",
        str(WORKLOAD),
        "--no-steps",
        "--json",
        "--out",
        str(out),
    ]
    done = subprocess.run([*command, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout), out


def _loaded(folder: Path, planned: Path) -> list[Record]:
    """Records of all requests, from the planned fleet on mocks."""
    words = ["up", str(planned), "--engine", "mock", "--port", "0", "--admin-port", "0", "--cluster", "plan-example"]
    out = folder / "run.jsonl"
    fleet = Running("baton up", [*BATON_COMMAND, *words, "--json"], cores().measured | cores().engines)
    with stopping([fleet]):
        endpoint = _ready(fleet)
        command = [
            *BATON_COMMAND,
            "load",
            endpoint,
            "--trace",
            str(folder / "trace.jsonl"),
            "--out",
            str(out),
            "--json",
        ]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return [msgspec.json.decode(line, type=Record) for line in out.read_text().splitlines()]


def _ready(fleet: Running) -> str:
    while True:
        said = json.loads(fleet.line())
        if said.get("event") == "ready" and "instances" in said:
            return str(said["endpoint"])


def _row(arrival: Arrival) -> dict[str, Any]:
    names = ("at_s", "input_tokens", "output_tokens", "slo_class")
    return {name: getattr(arrival, name) for name in names}


def _compared(name: str, promised: SloClass, predicted: Any, told: Sequence[Record]) -> dict[str, Any]:
    mine = sorted((each for each in told if each.slo_class == name), key=lambda each: each.request)
    targets = targets_of(promised)
    good = np.array([met(each, targets) for each in mine])
    low, high = interval(good)
    return {
        "class": name,
        "promised": promised.attainment,
        "predicted": {side: predicted[side] for side in ("share", "low", "high")},
        "seen": {"share": float(good.mean()), "low": low, "high": high},
        "requests": len(mine),
    }


def _told(share: Mapping[str, float]) -> str:
    return f"{share['share']:.1%} ({share['low']:.1%} to {share['high']:.1%})"


if __name__ == "__main__":
    sys.exit(main())
