"""What `baton router` is worth without settings, with URLs alone, beside vllm-router with each of its policies.

    make bench-defaults                       about two hours; installs vllm-router into .bench/ first
    make bench-defaults ARGS=--quick          one round of the first fleet: does it work?
    make bench-defaults ARGS=--publish        writes docs/benchmarks

Mock engines with prefix caches stand for the fleet: what a router chooses is all that differs. Sessions come in an open
loop (`bench.chats`): four system prompts are shared by sessions of several turns, cold first, then by other users with
the same system prompts; in other phases every request is alone with its text (`bench.defaults_rows`). All have the same
arrivals, the same pauses and texts of their own, on engines that have just been started; contestants follow one another
within a round, each round in another order.

A sample is void if the sender, the mocks or the machine's cores were the limit; a row is void if no round has a valid
sample of ours and of a rival. A finished round of a fleet is kept in .bench/defaults.jsonl, and not run again while the
sources are the same; `--fresh` forgets them. Ends with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Final

import uvloop

from bench.chats import Seen, hold
from bench.contestants import baton, rival
from bench.defaults_rows import FLEETS, OURS, PLAIN, RIVALS, Fleet, Phase, Rounds, Sample
from bench.defaults_tables import Rows, figures_of, tables_of, targets_of
from bench.processes import BATON_COMMAND, ROOT, Failed, Running, asked, page, stopping
from bench.published import machine, note_of, publish, result, say, show
from bench.rivals import NotInstalled, environment, version_of
from bench.sources import below, digest_of

MODEL: Final = "meta-llama/Llama-3.1-8B"
KEPT: Final = ROOT / ".bench" / "defaults.jsonl"
SOURCES: Final = ("router", "engine/mock", "engine/twin", "cluster", "kvtransfer", "bench/chats.py",
                  "bench/contestants.py", "bench/defaults_rows.py")  # fmt: skip
"""Sources that results depend on."""


@dataclass(frozen=True, slots=True)
class Started:
    """Fresh engines and a contestant before them."""

    endpoint: str
    engines: tuple[str, ...]
    router: Running

    def computed(self) -> float:
        """Prompt tokens that engines have computed so far."""
        name, found = 'source="local_compute"', 0.0
        for url in self.engines:
            lines = page(f"{url}/metrics").splitlines()
            found += sum(float(line.rpartition(" ")[2]) for line in lines if name in line and not line.startswith("#"))
        return found

    def late(self) -> tuple[float, float]:
        """Wakeups of the mocks' clocks so far, and by how many milliseconds these were late in all."""
        told = [asked(f"{url}/mock/state")["lateness"] for url in self.engines]
        return sum(each["wakeups"] for each in told), sum(each["wakeups"] * each["mean_ms"] for each in told)


def started(stack: ExitStack, contestant: str, fleet: Fleet) -> Started:
    """Start the fleet's engines and the contestant; the stack ends them."""
    everywhere, running = frozenset(os.sched_getaffinity(0)), list[Running]()
    stack.enter_context(stopping(running))
    mocks = Running("mock", [*BATON_COMMAND, "mock", *fleet.flags(), "--port", "0", "--model", MODEL], everywhere)
    running.append(mocks)
    urls: dict[str, list[str]] = {"prefill": [], "decode": [], "both": []}
    for role, count in fleet.roles:
        urls[role] += [mocks.line().split()[-1] for _ in range(count)]
    if contestant in (OURS, PLAIN):
        both = [word for url in urls["both"] for word in ("--both-url", url)]
        router, endpoint = baton(urls["prefill"], urls["decode"], everywhere, [*both, *contestant.split()[1:]])
    else:
        program = str(environment("router") / "vllm-router")
        router, endpoint = rival(program, urls["prefill"], urls["decode"], everywhere, contestant, urls["both"])
    running.append(router)
    return Started(endpoint, tuple(url for each in urls.values() for url in each), router)


def run(contestant: str, fleet: Fleet, number: int) -> dict[str, Sample]:
    """One contestant's part of a round, by phase."""
    found = {}
    with ExitStack() as stack:
        try:
            here = started(stack, contestant, fleet)
        except Failed as error:  # power_of_two with one instance: a user would take another policy
            if contestant in (OURS, PLAIN):
                raise
            say(f"  {contestant} does not start on {fleet.name} and is left out there: {error}"[:300])
            return {}
        for at, phase in enumerate(fleet.phases):
            shared = f"{phase.shared} {number}"
            found[phase.name] = sample = measured(here, phase, f"{contestant} {number}", shared, 1000 * number + at)
            void = f", void: {sample.void()}" if sample.void() else ""
            say(
                f"  {contestant}, {fleet.name}, {phase.name}: {sample.ttft_ms:.1f} ms, p99 {sample.p99_ms:.0f},"
                f" computed {sample.computed:.2f}, {sample.failed} failed{void}"
            )
    return found


def measured(here: Started, phase: Phase, salt: str, shared: str, seed: int) -> Sample:
    """One phase."""
    tokens, wakes, cpu_s, waited_s = here.computed(), here.late(), here.router.cpu_s(), here.router.waited_s()
    seen = uvloop.run(hold(here.endpoint, MODEL, phase.scenario, f"{salt} {phase.name}", shared, seed))
    for why in seen.failed[:3]:
        say(f"    failed: {why}")
    later, count = here.late(), max(1, len(seen.ttft_ms) + len(seen.failed))
    return sample_of(
        seen,
        computed=here.computed() - tokens,
        engines_late_ms=(later[1] - wakes[1]) / max(1.0, later[0] - wakes[0]),
        cpu_ms=(here.router.cpu_s() - cpu_s) * 1000 / count,
        waited_ms=(here.router.waited_s() - waited_s) * 1000 / count,
    )


def sample_of(seen: Seen, *, computed: float, engines_late_ms: float, cpu_ms: float, waited_ms: float) -> Sample:
    """The sample of a phase, from what clients saw; `computed`: prompt tokens that engines computed in it."""
    ttft_ms, late_ms = seen.ttft_ms or [math.inf], seen.late_ms or [0.0]
    return Sample(
        ttft_ms=statistics.fmean(ttft_ms),
        p99_ms=quantile(ttft_ms, 0.99),
        computed=computed / max(1, seen.prompt_tokens),
        late_ms=quantile(late_ms, 0.99),
        engines_late_ms=engines_late_ms,
        cpu_ms=cpu_ms,
        waited_ms=waited_ms,
        failed=len(seen.failed),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share does not exceed."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


# --- rounds, kept between runs ----------------------------------------------------------------------------------------


def digest() -> str:
    """The digest of the sources: kept rounds of other sources are not used."""
    return digest_of(below(SOURCES, ROOT), ROOT)


def kept(sources: str) -> Iterator[tuple[str, int, dict[str, dict[str, Sample]]]]:
    """Finished rounds of these sources: fleet, number, samples by contestant and phase."""
    for line in KEPT.read_text().splitlines() if KEPT.exists() else ():
        told = json.loads(line)
        if told["sources"] == sources:
            samples = {
                contestant: {phase: Sample(**each) for phase, each in of.items()}
                for contestant, of in told["samples"].items()
            }
            yield told["fleet"], told["round"], samples


def keep(sources: str, fleet: Fleet, number: int, samples: dict[str, dict[str, Sample]]) -> None:
    """Keep a finished round."""
    told = {contestant: {phase: asdict(each) for phase, each in of.items()} for contestant, of in samples.items()}
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a") as out:
        out.write(json.dumps({"sources": sources, "fleet": fleet.name, "round": number, "samples": told}) + "\n")


def one_round(fleet: Fleet, contestants: Sequence[str], number: int) -> dict[str, dict[str, Sample]]:
    """All contestants, in this round's order."""
    order = list(contestants)
    random.Random(number).shuffle(order)
    say(f"{fleet.name}, round {number + 1}: {', '.join(order)}")
    return {contestant: run(contestant, fleet, number) for contestant in order}


def contest(fleets: Sequence[Fleet], contestants: Sequence[str], rounds: int, sources: str) -> Rows:
    """Run the rounds that are missing; the samples of all."""
    done = {(fleet, number): samples for fleet, number, samples in kept(sources)}
    found: dict[tuple[str, str], dict[str, Rounds]] = {}
    for fleet in fleets:
        for number in range(rounds):
            samples = done.get((fleet.name, number))
            if samples is None or not samples.keys() >= set(contestants):
                samples = one_round(fleet, contestants, number)
                keep(sources, fleet, number, samples)
            for contestant in contestants:
                for phase, sample in samples[contestant].items():
                    row = found.setdefault((fleet.name, phase), {})
                    row.setdefault(contestant, Rounds()).samples[number] = sample
    return found


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench-defaults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of the first fleet")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/defaults.json and the tables")
    parser.add_argument("--fresh", action="store_true", help="forget finished rounds")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each fleet (default %(default)s)")
    parser.add_argument("--fleet", action="append", metavar="NAME", choices=[each.name for each in FLEETS],
                        help="only this fleet (repeatable)")  # fmt: skip
    parser.add_argument("--only", action="append", metavar="NAME", help="only this contestant (repeatable)")
    arguments = parser.parse_args(words)
    if arguments.publish and (arguments.only or arguments.fleet or arguments.quick):
        parser.error("only a whole run is published: leave out --quick, --fleet and --only")
    return arguments


def main(words: list[str]) -> int:
    """Measure, print, publish."""
    arguments, facts, contestants = parsed(words), machine(), [OURS, PLAIN, *RIVALS]
    try:
        environment("router")
    except NotInstalled as error:
        say(f"vllm-router cannot be installed here and is left out: {error}")
        contestants = [OURS, PLAIN]
    if arguments.fresh:
        KEPT.unlink(missing_ok=True)
    if arguments.only:
        contestants = [each for each in contestants if each in arguments.only]
    fleets = [each for each in FLEETS if each.name in (arguments.fleet or [each.name])]
    if arguments.quick:
        fleets, arguments.rounds = fleets[:1], 1
    rows = contest(fleets, contestants, arguments.rounds, digest())
    return tell(rows, facts, publishes=arguments.publish)


def tell(rows: Rows, facts: dict[str, Any], *, publishes: bool) -> int:
    """Tables, the last line, the pages."""
    tables, targets = tables_of(rows), targets_of(rows)
    show(tables)
    told = result("defaults", figures_of(rows), targets)
    if publishes:
        more = f"vllm-router {version_of('router', 'vllm-router')}, mock engines, all on one machine"
        publish(told, tables, facts, note_of(facts, more))
    return 0 if targets and all(each["met"] for each in targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
