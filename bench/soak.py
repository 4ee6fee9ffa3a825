"""Half an hour at 70 % load, with instances coming and going and hostile clients beside the honest ones. It checks that
memory stays flat, that nothing is held at the end, and that the honest clients do not notice.

    make soak                       30 minutes
    make soak ARGS="--minutes 5"

Two routers share a fleet of mock engines with their real agents, through a registry; each has half of the load. Every
`TURN_S` one instance is drained and started anew, or killed and started anew, in turns, never two at once. Load is 70 %
of what all decode instances together can do, by their mocks' settings.

Memory is each router's resident memory every 5 s, after a warm-up; its slope is fitted to means of half-minute blocks
(single readings depend on each other), with the 95 % interval of Student's t. A run that is too short for the whole
warm-up shows it, and does not judge it: what it sees is caches that fill. At the end, when the load has stopped,
nothing may be open in a router and no KV block in use in an engine, and the routers' counters together must say what
the load generators say. In every second phase of 40 s hostile clients are there (`bench/soak_hostile.py`;
`--no-hostile` leaves them out); the p99 of honest clients' TTFT with them may be 1.5 times that without. Ends with 1
where a target is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import soak_hostile
from bench.processes import BATON_COMMAND, Running, asked, page, stopping
from bench.published import Table, machine, note_of, publish, result, say, show, target
from cluster.registry.launch import RegistryCommand, registry_command

PREFILLS, DECODES, ROUTERS = 2, 4, 2
STEP_MS, SEATS, OUTPUT_TOKENS, INPUT_TOKENS = 12.0, 6, 40, 200
SHARE = 0.7
CAPACITY = DECODES * SEATS / (OUTPUT_TOKENS * STEP_MS / 1000)
"""Requests a second that decode can serve with all instances. 70 % of this is 93 % of what three of the four serve."""

TURN_S = 20.0
READ_S = 5.0
BLOCK_S = 30.0
WARM_UP_S = 330.0
"""Seconds until `/ui` has five minutes and, at this load, `/explain` a thousand requests; half of the run at most."""

JUDGED_MIN = 2 * WARM_UP_S / 60
"""Minutes of a run whose memory is judged."""

GROWTH_MAX = 0.05
"""Largest growth of memory in an hour: less is not worth a restart in weeks."""

SETTLE_S = 45.0
"""Pause at the end: a mock's lease is 30 s, so a hold that no router could release is free then."""

T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04}


@dataclass(slots=True)
class Slope:
    """Megabytes an hour, and its 95 % interval."""

    mb_per_hour: float
    half_width: float
    mean_mb: float
    blocks: int


def slope_of(readings: Sequence[tuple[float, float]], block_s: float = BLOCK_S) -> Slope | None:
    """Slope of (seconds, megabytes); None with fewer than four blocks."""
    blocks: dict[int, list[tuple[float, float]]] = {}
    for at, memory in readings:
        blocks.setdefault(int((at - readings[0][0]) // block_s), []).append((at, memory))
    points = [
        (statistics.fmean(at for at, _ in each), statistics.fmean(mb for _, mb in each)) for each in blocks.values()
    ]
    if len(points) < 4:
        return None
    fit = statistics.linear_regression([at for at, _ in points], [mb for _, mb in points])
    mean_at, mean_mb = statistics.fmean(at for at, _ in points), statistics.fmean(mb for _, mb in points)
    free = len(points) - 2
    left = math.sqrt(sum((mb - fit.intercept - fit.slope * at) ** 2 for at, mb in points) / free)
    error = left / math.sqrt(sum((at - mean_at) ** 2 for at, _ in points))
    factor = T_95[max(each for each in T_95 if each <= free)]  # a smaller count's is larger: on the safe side
    return Slope(fit.slope * 3600, factor * error * 3600, mean_mb, len(points))


@dataclass(slots=True)
class Fleet:
    """Engines with their agents, started and ended by name."""

    registry: RegistryCommand
    running: list[Running]
    mine: dict[str, Running] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """Flags that name the registry."""
        return ["--registry", self.registry.url, "--registry-password-file", str(self.registry.password_file)]

    def start(self, *names: str) -> None:
        """Instances join; returns when they take work."""
        for name in names:
            self._begin(name)
        for name in names:
            self.urls[name] = self.mine[name].line().split()[-1]  # ready NAME URL

    def _begin(self, name: str) -> None:
        role = name.partition("-")[0]
        contexts = SEATS if role == "decode" else 64
        mock = ["--step-ms", f"{STEP_MS:g}", "--prefill-ms-per-1k", "20", "--max-num-seqs", str(contexts)]
        words = [*BATON_COMMAND, "engine", "--role", role, "--name", name, "--engine", "mock", *self.words, "--", *mock]
        self.mine[name] = engine = Running(name, words, frozenset(os.sched_getaffinity(0)))
        self.running.append(engine)

    def drain(self, name: str) -> None:
        """Let an instance leave in order: its requests end first."""
        self.mine[name].process.send_signal(signal.SIGTERM)
        self.mine[name].process.wait(60)
        self._forget(name)

    def kill(self, name: str) -> None:
        """Kill an instance at once."""
        self.mine[name].process.kill()
        self.mine[name].process.wait(10)
        self._forget(name)

    def _forget(self, name: str) -> None:
        engine = self.mine.pop(name)
        self.running.remove(engine)
        engine.stop()

    def held(self) -> float:
        """Shares of KV blocks in use, summed."""
        return sum(_sample(page(f"{url}/metrics"), "vllm:kv_cache_usage_perc") for url in self.urls.values())


def _sample(text: str, name: str, *labels: str) -> float:
    """The sum of a metric's samples that have all these labels."""
    lines = (line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))


@dataclass(slots=True)
class Front:
    """One router and its load."""

    router: Running
    endpoint: str
    admin: str
    load: subprocess.Popen[str] | None = None
    began: float = 0.0
    """When its load was started."""
    out: Path = Path()
    """The file of its load's records."""
    readings: list[tuple[float, float]] = field(default_factory=list)


def start_router(fleet: Fleet, number: int) -> Front:
    """A router of the fleet, on free ports."""
    words = [*BATON_COMMAND, "router", "--port", "0", "--admin-port", "0", "--json", *fleet.words]
    router = Running(f"router-{number}", words, frozenset(os.sched_getaffinity(0)))
    fleet.running.append(router)
    said = json.loads(router.line())
    router.wait_for(f"{said['admin']}/ready")
    return Front(router, said["endpoint"], said["admin"])


def start_load(front: Front, rate: float, seconds: float, seed: int) -> None:
    """Half of the load, for so long."""
    words = ["--rate", f"{rate / ROUTERS:g}", "--duration-s", f"{seconds:g}", "--seed", str(seed), "--json"]
    words += ["--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS), "--token-ids", "1000-20000"]
    words += ["--out", str(front.out)]
    front.began = time.monotonic()
    front.load = subprocess.Popen(
        [*BATON_COMMAND, "load", front.endpoint, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def start_hostile(fronts: Sequence[Front], running: list[Running], seconds: float, seed: int) -> tuple[Running, float]:
    """Hostile clients of all routers, and when they began."""
    words = [sys.executable, "-m", "bench.soak_hostile", *(each.endpoint for each in fronts)]
    words += ["--seconds", f"{seconds:g}", "--seed", str(seed)]
    hostile = Running("hostile", words, frozenset(os.sched_getaffinity(0)))
    running.append(hostile)
    hostile.line()
    return hostile, time.monotonic()


def run(minutes: float, rate: float, seed: int, *, with_hostile: bool) -> dict[str, Any]:
    """Run everything; the observations."""
    chance, running = random.Random(seed), list[Running]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        ending.enter_context(stopping(running))
        registry = registry_command(Path(folder))
        server = Running("registry", registry.argv, frozenset(os.sched_getaffinity(0)))
        running.append(server)
        while registry.ready_line not in server.line():
            pass
        fleet = Fleet(registry, running)
        names = [*(f"prefill-{n}" for n in range(PREFILLS)), *(f"decode-{n}" for n in range(DECODES))]
        fleet.start(*names)
        fronts = [start_router(fleet, number) for number in range(ROUTERS)]
        say(f"{len(names)} instances, {ROUTERS} routers, {rate:.1f} requests/s for {minutes:g} minutes")
        hostile = start_hostile(fronts, running, minutes * 60, seed) if with_hostile else None
        for number, front in enumerate(fronts):
            front.out = Path(folder) / f"load-{number}.jsonl"
            start_load(front, rate, minutes * 60, seed + number)
        turns = go_on(fleet, fronts, names, minutes * 60, chance)
        sent_by_hostile = None if hostile is None else json.loads(hostile[0].line())
        seen = {"turns": turns, **settle(fleet, fronts)}
        if hostile is not None:
            records = [each for front in fronts for each in soak_hostile.honest(front.out, front.began - hostile[1])]
            seen["hostile"] = {"sent": sent_by_hostile, **soak_hostile.judged(records)}
        return seen


def go_on(
    fleet: Fleet, fronts: Sequence[Front], names: list[str], seconds: float, chance: random.Random
) -> dict[str, int]:
    """Instances come and go until the load has ended."""
    began = time.monotonic()
    next_turn, next_read = began + TURN_S, began + min(WARM_UP_S, seconds / 2)
    turns = {"drained": 0, "killed": 0}
    kinds = itertools.cycle(["drained", "killed"])
    while time.monotonic() < began + seconds:
        now = time.monotonic()
        if now >= next_read:
            for front in fronts:
                front.readings.append((now, front.router.memory_mb()))
            next_read = now + READ_S
        if now >= next_turn and now < began + seconds - 2 * TURN_S:
            name, kind = chance.choice(names), next(kinds)
            (fleet.drain if kind == "drained" else fleet.kill)(name)
            fleet.start(name)
            turns[kind] += 1
            say(f"{now - began:5.0f} s: {name} {kind} and started anew; memory {_memories(fronts)}")
            next_turn = now + TURN_S
        time.sleep(0.2)
    return turns


def _memories(fronts: Sequence[Front]) -> str:
    return ", ".join(f"{front.router.memory_mb():.1f} MB" for front in fronts)


def settle(fleet: Fleet, fronts: Sequence[Front]) -> dict[str, Any]:
    """The load's own reports, what is still held, and whether counters add up."""
    reports = []
    for front in fronts:
        assert front.load is not None
        out, _ = front.load.communicate(timeout=900)
        reports.append(json.loads(out.strip().splitlines()[-1]))
    until = time.monotonic() + SETTLE_S
    while (held := fleet.held()) > 0 and time.monotonic() < until:
        time.sleep(0.5)
    texts = [page(f"{front.admin}/metrics") for front in fronts]
    both = page(f"{fronts[0].admin}/metrics?all=1")
    slopes = [slope_of(front.readings) for front in fronts]
    return {
        "held": held,
        "open": sum(_sample(text, "baton_open_requests") + _sample(text, "baton_waiting_requests") for text in texts),
        "legs": sum(_sample(text, "baton_instance_inflight") for text in texts),
        "counted": _sample(both, "baton_requests_total", 'path="/v1/completions"'),  # hostile clients ask for chats
        "connections": sum(_sample(text, "baton_client_connections") for text in texts),
        "uploads": sum(_sample(text, "baton_upload_bytes") for text in texts),
        "silent": _sample(both, "baton_routers_silent"),
        "reports": reports,
        "slopes": slopes,
        "outcomes": {
            name: _sample(both, "baton_requests_total", f'outcome="{name}"')
            for name in ("served", "refused", "failed", "expired", "client_left")
        },
        "bottleneck": asked(f"{fronts[0].admin}/ui/data")["bottleneck"]["where"],
    }


def arguments() -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=30.0, help=f"default %(default)g; below {JUDGED_MIN:g} memory is not judged"
    )
    parser.add_argument("--share", type=float, default=SHARE, help="of what decode can do (default %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-hostile", dest="hostile", action="store_false", help="honest clients alone")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks.md and docs/benchmarks/soak.json")
    return parser.parse_args()


def table_of(slopes: Sequence[Slope]) -> Table:
    """Memory by router, for people."""
    rows = [
        [
            f"router {number}",
            f"{each.mean_mb:.1f}",
            f"{each.mb_per_hour:+.2f} ± {each.half_width:.2f}",
            str(each.blocks),
        ]
        for number, each in enumerate(slopes)
    ]
    return Table("Resident memory", ("router", "mean MB", "slope, MB/hour, 95 %", "blocks"), rows)


def as_json(slope: Slope) -> dict[str, float]:
    """For the published figures."""
    return {
        "mean_mb": round(slope.mean_mb, 2),
        "mb_per_hour": round(slope.mb_per_hour, 2),
        "half_width": round(slope.half_width, 2),
    }


def targets_of(seen: dict[str, Any], sent: int, slopes: Sequence[Slope], minutes: float) -> dict[str, dict[str, Any]]:
    """The targets of a run, and their results."""
    targets = {
        **_memory_targets(slopes, minutes),
        "shares of KV blocks held at the end": target(seen["held"], 0.0),
        "requests and legs open at the end": target(seen["open"] + seen["legs"], 0.0),
        "connections and bytes of uploads at the end": target(seen["connections"] + seen["uploads"], 0.0),
        "requests the routers counted less those sent": target(abs(seen["counted"] - sent), 0.0),
        "routers that did not answer": target(seen["silent"], 0.0),
    }
    if "hostile" in seen:
        ratio = seen["hostile"]["ratio"]
        if ratio is None:
            say(f"honest clients' TTFT is not judged: fewer than {soak_hostile.JUDGED_REQUESTS_MIN} requests a phase")
        else:
            name = "honest clients' p99 TTFT beside hostile ones, over that without"
            targets[name] = target(ratio, soak_hostile.RATIO_MAX)
    return targets


def _memory_targets(slopes: Sequence[Slope], minutes: float) -> dict[str, dict[str, Any]]:
    if minutes < JUDGED_MIN:
        say(f"memory is not judged: {minutes:g} minutes are warm-up, {JUDGED_MIN:g} would do")
        return {}
    least = max((each.mb_per_hour - each.half_width for each in slopes), default=None)
    most = max(((each.mb_per_hour + each.half_width) / each.mean_mb for each in slopes), default=None)
    return {
        "memory grows for certain, MB/hour (lower end of the interval)": target(least, 0.0),
        "memory may grow, part of it an hour (upper end of the interval)": target(most, GROWTH_MAX),
    }


def _note(seen: dict[str, Any], sent: int, minutes: float, targets: dict[str, dict[str, Any]]) -> str:
    """One line beside the published figures."""
    missed = [name for name, each in targets.items() if not each["met"]]
    outcome = f"missed: {', '.join(missed)}" if missed else "all targets met"
    turns = f"{seen['turns']['drained']} instances drained and {seen['turns']['killed']} killed"
    return f"{minutes:g} minutes, {sent:,} requests, {turns}; {outcome}"


def main() -> int:
    """Run the soak and report."""
    args = arguments()
    facts = machine()
    rate = args.share * CAPACITY
    seen = run(args.minutes, rate, args.seed, with_hostile=args.hostile)
    slopes = [each for each in seen.pop("slopes") if each is not None]
    sent = sum(each["sent"] for each in seen.pop("reports"))
    table = table_of(slopes)
    show([table])
    figures = {
        **seen,
        "minutes": args.minutes,
        "rate": round(rate, 2),
        "sent": sent,
        "routers": [as_json(each) for each in slopes],
    }
    targets = targets_of(seen, sent, slopes, args.minutes)
    told = result("soak", figures, targets)
    if args.publish:
        publish(told, [table], facts, note_of(facts, _note(seen, sent, args.minutes, targets)))
    return 0 if all(each["met"] for each in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
