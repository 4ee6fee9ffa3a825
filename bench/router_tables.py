"""Sums up the router benchmark: rounds are compared within themselves, then the median is taken."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.contestants import BATON, DEFAULT, DIRECT, POLICIES, POLICIES_PAIRED, RIVAL, VARIANTS
from bench.published import Table, target
from bench.router_cells import Cell, Measured

LIMITS = {BATON: 0.7, DEFAULT: 1.0, POLICIES: 1.0, POLICIES_PAIRED: 1.0}
"""Targets: CPU per request over the rival's, at most."""
CHUNK = 0.8
"""Target of every setting: CPU per chunk over the rival's, at most."""
LATER_MS = 0.5
"""Target, ms: the delay added to p99 of first tokens, less the rival's added delay, at `BUSY` requests a second."""
BUSY = 1000.0

Results = dict[tuple[Cell, str], list[Measured]]


def per_request(results: Results, cell: Cell, name: str) -> list[float | None]:
    """CPU per request in µs, round by round."""
    return [each.cpu_us for each in results.get((cell, name), [])]


def per_chunk(results: Results, cell: Cell, name: str) -> list[float | None]:
    """CPU per token in µs, round by round, without the requests' own cost."""
    base = next(each for each, _ in results if each.kind == "requests" and each.prompt_bytes == cell.prompt_bytes)
    found: list[float | None] = []
    for each, request_us in zip(results.get((cell, name), []), per_request(results, base, name), strict=False):
        events = each.done * (cell.tokens - 1)  # the first token comes with the head
        found.append((each.cpu_s * 1e6 - each.done * (request_us or 0.0)) / events if events else None)
    return found


def middle(values: Sequence[float | None]) -> float | None:
    """The median of the values that exist."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """Median of the rounds' ratios: each round compares runs within the same minute."""
    return middle([a / b for a, b in zip(ours, theirs, strict=False) if a is not None and b])


def cost_tables(results: Results, names: Sequence[str]) -> tuple[Table, dict[str, Any], dict[str, Any]]:
    """CPU cells: the table, the figures, the targets."""
    rows, figures, targets = [], {}, {}
    for cell in dict.fromkeys(cell for cell, _ in results if not cell.rate):
        of = per_request if cell.kind == "requests" else per_chunk
        values = {name: of(results, cell, name) for name in names}
        against = {(one, name): ratio(values[one], values[name]) for one, name in _pairs(names)}
        figures[cell.name] = {"cpu_us": {name: shown(middle(values[name])) for name in names}, "rounds": values}
        figures[cell.name]["baton_to"] = {f"{one} / {name}": shown(each, 3) for (one, name), each in against.items()}
        rows.append(
            [cell.name, *(text(middle(values[name])) for name in names), *(text(each, 2) for each in against.values())]
        )
        if cell.kind != "streams":
            for name in (each for each in LIMITS if each in names):
                what = f"CPU to {RIVAL}'s, {cell.name}" if name == BATON else f"{name}: CPU to {RIVAL}'s, {cell.name}"
                limit = LIMITS[name] if cell.kind == "requests" else CHUNK
                targets[what] = target(against.get((name, RIVAL)), limit)
    columns = ["CPU, µs per request or chunk", *names, *(f"{one} / {name}" for one, name in _pairs(names))]
    return Table("What a router costs", columns, rows), figures, targets


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs to compare: Baton in all its variants with the rival, and plain Baton with the floor."""
    ours = [name for name in names if name == BATON or name in VARIANTS]
    found = [(one, RIVAL) for one in ours if RIVAL in names]
    return [*found, *((BATON, name) for name in names if name not in {*ours, RIVAL})]


STREAM_KB = 64
"""Largest memory of an open stream in the router."""


def memory_table(results: Results, names: Sequence[str]) -> tuple[Table, dict[str, Any], dict[str, Any]]:
    """Memory of open streams: the most of all rounds, since a process may not give memory back."""
    rows, figures, targets = [], {}, {}
    for cell in dict.fromkeys(cell for cell, _ in results if cell.kind == "streams"):
        entry = figures[cell.name] = {name: stream_kb(results, cell, name) for name in names}
        rows += [[f"{cell.connections:,}", name, text(value)] for name, value in entry.items() if value is not None]
        targets[f"KB per open stream, {cell.connections:,} open"] = target(entry.get(BATON), STREAM_KB)
    columns = ["streams open", "router", "memory per stream, KB"]
    return Table("What open streams take", columns, rows), figures, targets


def stream_kb(results: Results, cell: Cell, name: str) -> float | None:
    """KiB of memory for each of a cell's open streams."""
    grown = [each.grown_mb for each in results.get((cell, name), []) if each.grown_mb is not None]
    return round(max(grown) * 1000 / cell.connections, 1) if grown else None


def rate_table(results: Results, names: Sequence[str]) -> tuple[Table, dict[str, Any], dict[str, Any]]:
    """Open loop: how much later the first token comes than from the engine itself."""
    rows, figures, targets = [], {}, {}
    for cell in dict.fromkeys(cell for cell, _ in results if cell.kind == "rates"):
        alone = results[cell, DIRECT]
        entry: dict[str, Any] = {"engine_ttft_ms": [each.ttft_ms for each in alone]}
        for name in (each for each in names if (cell, each) in results):
            found = results[cell, name]
            added = {
                at: middle([_less(each.ttft_ms[at], one.ttft_ms[at]) for each, one in zip(found, alone, strict=True)])
                for at in ("p50", "p99")
            }
            rate = middle([each.done / each.elapsed_s for each in found])
            late = middle([each.late_ms_p99 for each in found])
            entry[name] = {"added_ms": added, "completed_rate": shown(rate), "sent_late_ms_p99": shown(late)}
            rows.append([cell.name, name, text(added["p50"], 2), text(added["p99"], 2), text(rate, 0), text(late, 1)])
        figures[cell.name] = entry
        for name in (each for each in (BATON, DEFAULT) if cell.rate == BUSY and each in entry and RIVAL in entry):
            later = _less(entry[name]["added_ms"]["p99"], entry[RIVAL]["added_ms"]["p99"])
            targets[f"{name}: ms added at p99 beyond {RIVAL}'s, {cell.name}"] = target(later, LATER_MS)
    columns = ["offered", "router", "added TTFT p50, ms", "p99, ms", "completed req/s", "sent late p99, ms"]
    return Table("What a router adds to the first token", columns, rows), figures, targets


def twin_table(results: Results, names: Sequence[str]) -> tuple[Table, dict[str, Any]]:
    """Twins: clients' latencies, beside one engine that serves requests alone."""
    rows, figures = [], {}
    for cell in dict.fromkeys(cell for cell, _ in results if cell.kind == "twins"):
        entry: dict[str, Any] = {}
        for name in (each for each in (DIRECT, *names) if (cell, each) in results):
            found = results[cell, name]
            entry[name] = {at: shown(middle([each.ttft_ms[at] for each in found]), 2) for at in ("p50", "p99")}
            entry[name]["tt2t"] = shown(middle([each.tt2t_ms for each in found]), 2)
            entry[name]["tpot"] = shown(middle([each.tpot_ms for each in found]), 2)
            entry[name]["cpu_us"] = shown(middle([each.cpu_us or None for each in found]))
            label = "one engine alone" if name == DIRECT else name
            rows.append([cell.name, label, *(text(value, 1) for value in entry[name].values())])
        figures[cell.name] = entry
    columns = ["offered", "", "TTFT p50, ms", "p99, ms", "TT2T p50, ms", "TPOT p50, ms", "CPU µs per request"]
    return Table("On engine twins (`baton mock`: Llama-3.1-8B on H100), what a client sees", columns, rows), figures


def trust_table(results: Results, names: Sequence[str]) -> tuple[Table, dict[str, Any]]:
    """Answers counted, and memory."""
    rows, figures = [], {}
    for name in names:
        if all(whose != name for _, whose in results):
            continue
        found = [each for (_, whose), rounds in results.items() if whose == name for each in rounds]
        done, failed = sum(each.done for each in found), sum(each.failed for each in found)
        rewritten, memory = sum(each.rewritten for each in found), max(each.memory_mb for each in found)
        handed = _handed_over(results, name)
        examples = [why for each in found for why in each.examples][:3]
        counts = {"answers": done, "failed": failed, "rewritten": rewritten, "memory_mb": round(memory, 1)}
        figures[name] = {**counts, "handed_over": handed, "examples": examples}
        part = _span(handed)
        rows.append([name, f"{done:,}", f"{failed:,}", part, f"{rewritten:,}", f"{memory:,.0f}"])
    written = "of those right, an event written anew"
    columns = ["router", "answers right", "failed", "handed over, by cell", written, "memory at most, MB"]
    return Table("Whether answers were the engine's", columns, rows), figures


def _handed_over(results: Results, name: str) -> dict[str, float]:
    """By cell: the share of a router's answers that were handed over, median of the rounds. The twins' cell is left
    out: twins do not count answers that were handed over, but prompt tokens.
    """
    found: dict[str, float] = {}
    for cell in (cell for cell, router in results if router == name and cell.kind != "twins"):
        share = middle([each.handed_over / each.done for each in results[cell, name] if each.done])
        if share is not None:
            found[cell.name] = round(share, 3)
    return found


def _span(shares: Mapping[str, float]) -> str:
    """From the least to the most of these shares, and the cell with the most."""
    if not shares:
        return "–"
    highest = max(shares, key=lambda cell: shares[cell])
    least, most = f"{min(shares.values()):.0%}", f"{shares[highest]:.0%}"
    return most if least == most else f"{least} to {most} ({highest})"


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else round(one - other, 3)


def shown(value: float | None, digits: int = 1) -> float | None:
    """For JSON."""
    return None if value is None else round(value, digits)


def text(value: float | None, digits: int = 1) -> str:
    """For tables."""
    return "–" if value is None else f"{value:,.{digits}f}"
