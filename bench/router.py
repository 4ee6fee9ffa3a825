"""The cost of a router: Baton, vllm-router and a bare relay, in turns, on the same mock engines in one run.

    make bench-router                  every cell, three rounds, about 15 minutes; ARGS=--publish writes docs/benchmarks
    make bench-router ARGS=--quick     the two cells of the targets and one of latency, about two minutes

CPU time is the router process's own (user and system, all threads), so that figures hold on a noisy machine; the ratio
to the rival of the same round is what counts.

Baton runs in five settings. Three choose by `--policy least_load`, since rivals hand every request over: with nothing
more; with its policies on (keys, a class with promises, so that prefixes, lengths and admission work for every request;
traces of one in 100); and with engines that can be told their first token, so that clients have it from P. Two have the
default policy, which hands over where that costs least: Baton as it starts, and as it starts with its policies on. The
table says how often they hand over.

Cells:

requests   closed loop, an answer's 16 tokens in one write: CPU per disaggregated request (both legs)
chunks     64 streams, every token a write of its own: CPU beyond that of the requests, per token
rates      open loop: how much later than from the engine itself the first token comes, at p50 and p99
streams    2,000 answers open at once: CPU per token, memory
twins      the same on `baton mock`, whose engines take the time of real ones: what a client sees
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from bench.contestants import DEFAULT, DIRECT, RELAY, VARIANTS, Contestants, contestants
from bench.processes import Cores, Failed, Running, cores, stopping
from bench.published import machine, note_of, publish, result, say, show
from bench.router_cells import Cell, Measured, cells
from bench.router_field import Field, measure
from bench.router_tables import Results, cost_tables, memory_table, rate_table, text, trust_table, twin_table


def run(taking: Contestants, chosen: Sequence[Cell], rounds: int, where: Cores) -> Results:
    """All cells; within a round every router takes its turn before the next cell."""
    results: Results = {}
    total = rounds * sum(len(list(_turns(taking, cell))) for cell in chosen)
    step = 0
    for instances, twins in dict.fromkeys((cell.instances, cell.kind == "twins") for cell in chosen):
        running: list[Running] = []
        with stopping(running), told_if_failed():
            ground = Field(taking, instances, where, running, twins=twins)
            for number in range(rounds):
                for cell in (each for each in chosen if (each.instances, each.kind == "twins") == (instances, twins)):
                    for name in _turns(taking, cell):
                        step += 1
                        found = measure(ground, cell, name)
                        results.setdefault((cell, name), []).append(found)
                        say(f"[{step}/{total}] round {number + 1}, {cell.name}, {name}: {_told(found)}")
    return results


@contextlib.contextmanager
def told_if_failed() -> Iterator[None]:
    """A failure with one size of fleet must not cost the figures of the others."""
    try:
        yield
    except Failed as error:
        say(f"bench-router: these cells are left out: {error}")


def _turns(taking: Contestants, cell: Cell) -> Iterator[str]:
    if cell.rate:
        yield DIRECT
    kinds = {name: {"requests", "chunks"} | ({"rates"} if name == DEFAULT else set()) for name in VARIANTS}
    yield from (name for name in taking.starts if name not in kinds or cell.kind in kinds[name])


def _told(found: Measured) -> str:
    failed = f", {found.failed} FAILED ({found.examples[0] if found.examples else ''})" if found.failed else ""
    cpu = f", {found.cpu_us:,.0f} µs of CPU each" if found.cpu_us else ""
    first = f", TTFT p50 {text(found.ttft_ms['p50'])} ms" if found.ttft_ms else ""
    return f"{found.done} answers in {found.elapsed_s:.1f} s{cpu}{first}{failed}"


def main() -> int:
    """Measure, report, and with --publish write it down."""
    parser = argparse.ArgumentParser(
        prog="bench-router", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three cells, one round, about two minutes")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 3, with --quick 1")
    parser.add_argument("--only", metavar="KIND", choices=("requests", "chunks", "rates", "streams", "twins"))
    parser.add_argument(
        "--publish", action="store_true", help="write docs/benchmarks/router.json and the page's tables"
    )
    args = parser.parse_args()
    facts, where, taking = machine(), cores(), contestants()
    if taking.missing:
        say(f"bench-router: {taking.missing}")
    os.sched_setaffinity(0, where.sender)  # requests are sent from here; else the router's core is shared
    say(f"{where}; load {facts['load_before']}")
    first, *others = cells(quick=args.quick)  # the cost of chunks is counted beyond the first cell's
    chosen = [first, *(each for each in others if args.only in {None, each.kind})]
    results = run(taking, chosen, args.rounds or (1 if args.quick else 3), where)
    names = list(taking.starts)
    costs, figures, targets = cost_tables(results, names)
    memory, memory_figures, memory_targets = memory_table(results, names)
    rates, rate_figures, rate_targets = rate_table(results, names)
    twins, twin_figures = twin_table(results, names)
    trust, trust_figures = trust_table(results, names)
    targets |= memory_targets | rate_targets
    figures = {
        **figures,
        **rate_figures,
        **twin_figures,
        "memory": memory_figures,
        "answers": trust_figures,
        "versions": taking.versions,
    }
    figures["cells"] = {cell.name: asdict(cell) for cell in dict.fromkeys(cell for cell, _ in results)}
    tables = [each for each in (costs, memory, rates, twins, trust) if each.rows]
    show(tables)
    told = result("router", figures, targets)
    if args.publish:
        versions = ", ".join(f"{name} {version}" for name, version in taking.versions.items())
        publish(told, tables, facts, note_of(facts, f"{versions}; {where}"))
    return 1 if any(each["failed"] for name, each in trust_figures.items() if name != RELAY) else 0


if __name__ == "__main__":
    sys.exit(main())
