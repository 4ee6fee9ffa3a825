"""Sentences of docs/benchmarks.md, README and other pages say what docs/benchmarks/*.json say; generated tables are
made from these.

A sentence is found in its section by its words, outside generated tables; `{}` stands for a figure. If a benchmark is
published again, with other figures, its sentences fail here until they are written anew.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench import breakeven, compare_tables, plan, policy_tables, real_tables, scaling
from bench.published import Table

DOCS = Path(__file__).resolve().parents[2] / "docs"
README = "README"
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FIGURE = rf"((?:\d[\d,]*(?:\.\d+)?)|(?i:{'|'.join(WORDS)}))"
GENERATED = re.compile(r"<!-- (\S+): begin -->.*?<!-- \1: end -->", re.DOTALL)

Targets = Mapping[str, Mapping[str, Any]]


@cache
def published(bench: str) -> dict[str, Any]:
    """A benchmark's file: `figures` and `targets`."""
    found: dict[str, Any] = json.loads((DOCS / "benchmarks" / f"{bench}.json").read_text())
    return found


@cache
def sections() -> dict[str, str]:
    """The prose of each section of docs/benchmarks.md by its heading, without generated tables; other pages whole, by
    their names. Each is on one line.
    """
    page = GENERATED.sub("", (DOCS / "benchmarks.md").read_text())
    parts = re.split(r"^##+ (.+)$", page, flags=re.MULTILINE)[1:]
    pages = {**dict(zip(parts[::2], parts[1::2], strict=True)), README: (DOCS.parent / "README.md").read_text()}
    pages |= {name: (DOCS / name).read_text() for name in ("admission.md", "policy.md")}
    return {name: " ".join(text.split()) for name, text in pages.items()}


def as_number(word: str) -> float:
    return float(WORDS.index(word.lower())) if word.lower() in WORDS else float(word.replace(",", ""))


def says(word: str, value: float) -> bool:
    """Whether the word is the value, rounded to as many digits as the word has."""
    digits = len(word.partition(".")[2])
    return abs(as_number(word) - value) <= 0.5 * 10**-digits + 1e-9


def differences(text: str, sentence: str, expected: Sequence[float]) -> list[str]:
    """What the text says otherwise than the figures; a sentence that it does not have is one difference."""
    assert sentence.count("{}") == len(expected), f"{sentence}: figures for {len(expected)} places"
    found = re.search(FIGURE.join(map(re.escape, sentence.split("{}"))), text)
    if found is None:
        return [f"no such sentence: {sentence}"]
    return [
        f"{sentence}: says {word}, the figures {value:g}"
        for word, value in zip(found.groups(), expected, strict=True)
        if not says(word, value)
    ]


# -- what the figures say --


def of(targets: Targets, pattern: str) -> list[Mapping[str, Any]]:
    """The targets whose whole name the pattern matches."""
    found = [each for name, each in targets.items() if re.fullmatch(pattern, name)]
    assert found, pattern
    return found


def span(found: Sequence[Mapping[str, Any]]) -> list[float]:
    """Least and most of some targets' values."""
    values = [each["value"] for each in found]
    return [min(values), max(values)]


def met(found: Sequence[Mapping[str, Any]]) -> list[float]:
    """How many of some targets are met, and how many there are."""
    return [sum(each["met"] for each in found), len(found)]


def up(value: float, digits: int = 0) -> float:
    """Rounded up: for "within" and "no more than"."""
    return math.ceil(value * 10**digits - 1e-9) / 10**digits


SLOWS = "a decode instance slows down"


def admission_result(figures: Any, targets: Targets) -> Iterator[float]:
    kept = of(targets, ".*: kept of what was let in(, 5 s .*)?")
    (slow,) = of(targets, f"{SLOWS}: kept of what was let in, 5 s .*")
    whole = [100 * each["value"] for each in of(targets, ".*: kept of what was let in")]
    gains = of(targets, ".*: attainment, less that before")
    yield from (min(whole), max(whole), len(of(targets, "(?!mocks).*: kept of what was let in")))
    yield from (100 * figures["a decode instance slows down"]["both"]["kept"], 100 * slow["value"])
    yield from (100 * slow["target"], *met(kept)[:1], *(100 * each for each in span(gains)), *met(gains)[:1])
    (bound,) = of(targets, ".*: attainment of the middle deciles less that of the longest")
    yield from (100 * bound["value"], 100 * bound["target"])


def admission_margins(figures: Any, targets: Targets) -> Iterator[float]:
    """What is kept with both rules and with neither: of the loads in which no instance changes, then of the one that
    slows down.
    """
    steady = [found for name, found in figures.items() if name not in {SLOWS, "mocks"}]
    for rules in ("both", "neither"):
        yield from span([{"value": found[rules]["kept"]} for found in steady])
    slow = figures[SLOWS]
    yield from (slow["both"]["kept"], slow["neither"]["kept"])
    yield from (slow[rules]["around"]["later"] for rules in ("both", "neither"))


def admission_shed(figures: Any, targets: Targets) -> Iterator[float]:
    kept = [found["both"]["kept"] for name, found in figures.items() if name != "mocks"]
    kept += [found["both"]["kept"] for found in on_mocks(figures).values()]
    yield from (100 * min(kept), 100 * max(kept))


def on_mocks(figures: Any) -> Mapping[str, Any]:
    """The runs on mocks by scenario and rules."""
    found: Mapping[str, Any] = figures["mocks"]
    return found


SURE = 0.988
"""What the weight alone keeps where margins matter little."""


def admission_weight(figures: Any, targets: Targets) -> Iterator[float]:
    """Points that margins add to the weight, of what is kept; where it keeps `SURE`: by how much they change that, and
    what they cost of all arrivals.
    """
    pairs = [(found["weight"], found["both"]) for name, found in figures.items() if name != "mocks"]
    yield 100 * max(both["kept"] - weight["kept"] for weight, both in pairs)
    sure = [(weight, both) for weight, both in pairs if weight["kept"] >= SURE]
    yield 100 * SURE
    yield 100 * max(abs(both["kept"] - weight["kept"]) for weight, both in sure)
    yield 100 * max(weight["attained"] - both["attained"] for weight, both in sure)


def admission_deciles(figures: Any, targets: Targets) -> Iterator[float]:
    by = figures["prompts of all lengths"]["both"]["by_decile"]
    yield from (by[9], *sorted(by[4:6]))


def admission_mocks(figures: Any, targets: Targets) -> Iterator[float]:
    found = on_mocks(figures)["two classes"]
    yield from (100 * found[rules]["kept"] for rules in ("both", "neither"))
    yield from (found[rules]["attained"] for rules in ("both", "neither"))


def chaos_result(figures: Any, targets: Targets) -> Iterator[float]:
    for name in ("baton", "vllm-router"):
        rows = [cells[name] for cells in figures.values()]
        yield sum(row["served right"] for row in rows)
        yield sum(row[kind] for row in rows for kind in ("served right", "true error", "wrong text", "hung"))


def scaling_result(figures: Any, targets: Targets) -> Iterator[float]:
    cells = [scaling.judged(rows) for rows in figures["cells"].values()]
    assert all(each["attains"] for each in cells)
    yield len(cells)
    for name in ("over_clairvoyant", "over_best_rival"):
        limit = targets[f"gpu_hours_{name}"]["target"]
        ratios = [each[name] for each in cells if each[name] is not None]
        yield from (limit, sum(each <= limit for each in ratios), len(ratios))


def scaling_readme(figures: Any, targets: Targets) -> Iterator[float]:
    cells = [scaling.judged(rows) for rows in figures["cells"].values()]
    ratios = [each["over_clairvoyant"] for each in cells]
    yield from (sum(each["attains"] for each in cells), len(cells), min(ratios), max(ratios))


def router_readme(figures: Any, targets: Targets) -> Iterator[float]:
    for name in ("baton, policies on: ", "baton, default policy: ", ""):
        yield from span(of(targets, f"{name}{REQUESTS}"))


MANY = r"(4\+4|16\+16), sessions.*: "
ELSEWHERE = r"(?!(4\+4|16\+16), sessions).*: mean.*"


def defaults_result(figures: Any, targets: Targets) -> Iterator[float]:
    many, p99, rest = of(targets, f"{MANY}mean.*"), of(targets, f"{MANY}p99.*"), of(targets, ELSEWHERE)
    yield up(100 * (span(rest)[1] - 1))
    yield from (*span(many), *span(rest), *met(rest))
    yield from (many[0]["target"], *met(many), p99[0]["target"], *met(p99))


REQUESTS = "CPU to vllm-router's, requests .*"


def router_result(figures: Any, targets: Targets) -> Iterator[float]:
    least, default = of(targets, REQUESTS), of(targets, f"baton, default policy: {REQUESTS}")
    assert not any(each["met"] for each in default)
    yield from (*span(least), *met(least), *span(default))
    yield from span(of(targets, f"baton, policies on: {REQUESTS}"))
    yield from span(of(targets, "(baton, .*: )?CPU to vllm-router's, chunks .*"))


def router_seeding(figures: Any, targets: Targets) -> Iterator[float]:
    ratios = [
        cell["baton_to"]["baton, seeding / vllm-router"]
        for name, cell in figures.items()
        if name.startswith("requests")
    ]
    yield from (min(ratios), max(ratios))


def connectors_result(figures: Any, targets: Targets) -> Iterator[float]:
    choice, pull = of(targets, r"\w+_choice_over_best"), of(targets, r"\w+_over_tuned")
    missed = [each for each in choice if not each["met"]]
    yield from (*span([each for each in choice if each["met"]]), *met(choice))
    yield from (len(missed), *span(missed), choice[0]["target"])
    yield from (sum(each["low"] > each["target"] for each in missed), *span(pull), *met(pull))


def real_result(figures: Any, targets: Targets) -> Iterator[float]:
    tiny = figures["tiny"]
    slow, fast = tiny["rates"]

    def over(name: str, rate: float, factor: str) -> dict[str, Any]:
        found = real_tables.ratio(tiny, name, rate, factor)
        assert found is not None
        return found

    plain = [over("plain", rate, factor) for rate in (slow, fast) for factor in ("5", "10")]
    whole = [over("whole-512", rate, "5") for rate in (slow, fast)]
    assert len({round(each["median"], 2) for each in plain}) == 1, "one figure stands for four"
    yield from (plain[0]["median"], min(each["low"] for each in plain), max(each["high"] for each in plain))
    yield from (each["median"] for each in whole)
    yield from (min(each["low"] for each in whole), max(each["high"] for each in whole))
    for rate in (fast, slow):
        told = over("plain", rate, "2")
        yield from (rate, told["median"], told["low"], told["high"])
    yield from met(list(targets.values()))


def real_costs(figures: Any, targets: Targets) -> Iterator[float]:
    """Medians of repeats: TPOT over plain's in percent, and TTFT beyond it in ms, of Baton's choice at both rates; of
    the two that serve whole at the higher one.
    """
    tiny = figures["tiny"]

    def p50(name: str, rate: float, what: str) -> float:
        cells = real_tables.counted(tiny, name, rate)
        return sorted_middle([cell[what]["p50"] for cell in cells])

    slow, fast = tiny["rates"]
    longer = {
        (name, rate): 100 * (p50(name, rate, "tpot_ms") / p50("plain", rate, "tpot_ms") - 1)
        for name in ("baton", "whole-512")
        for rate in (slow, fast)
    }
    later = {
        (name, rate): p50(name, rate, "ttft_ms") - p50("plain", rate, "ttft_ms")
        for name in ("baton", "whole-512")
        for rate in (slow, fast)
    }
    yield from (longer["baton", slow], slow, longer["baton", fast], fast, later["baton", slow], later["baton", fast])
    yield from (longer["whole-512", fast], later["whole-512", fast], fast)


def sorted_middle(values: Sequence[float]) -> float:
    found = real_tables.middle(values)
    assert found is not None
    return float(found["median"])


def breakeven_result(figures: Any, targets: Targets) -> Iterator[float]:
    worse = [breakeven.worse_by(row["modes"])[0] for row in figures["traces"]]
    limit = targets["worse_attainment"]["target"]
    yield from (sum(each <= limit for each in worse), len(worse), 100 * limit)
    gains = [row["gain"] for row in figures["mixed"] if row["rival"] == "round_robin"]
    yield from (100 * min(gains), 100 * max(gains), 100 * targets["latency_gain"]["target"])
    yield sum(not each["met"] for each in targets.values())


def breakeven_misses(figures: Any, targets: Targets) -> Iterator[float]:
    limit = targets["worse_attainment"]["target"]
    for row in figures["traces"]:
        lost, half, _ = breakeven.worse_by(row["modes"])
        if lost > limit:
            yield from (100 * lost, 100 * half)


def plan_result(figures: Any, targets: Targets) -> Iterator[float]:
    ours = [row for name, row in figures["traces"].items() if name.endswith(", baton plan")]
    others = [row for name, row in figures["traces"].items() if not name.endswith(", baton plan")]
    fail = sum(not row["on_trace"]["keeps"] for row in others)
    yield from (sum(row["on_trace"]["keeps"] for row in ours), len(ours), fail, len(others), len(others))
    yield targets["64 GPUs of three types, seconds"]["value"]


def plan_rates(figures: Any, targets: Targets) -> Iterator[float]:
    fails = {row["trace"]: 100 * row["fails_at"] for row in figures["averages"]}
    yield from (fails[name] for name in ("Azure code", "Mooncake conversation", "ServeGen R1", "Azure conversation"))


def plan_search(figures: Any, targets: Targets) -> Iterator[float]:
    search = figures["search"]
    yield from (search["simulations"], search["requests"], search["ruled_out"], search["arrangements"])


def lengths_result(figures: Any, targets: Targets) -> Iterator[float]:
    yield 100 * max(each["value"] for each in of(targets, ".*: coverage off by"))
    yield targets["loss to all alike, geometric mean"]["value"]
    yield targets["loss to all alike, worst of all traces and levels"]["value"]


def load_result(figures: Any, targets: Targets) -> Iterator[float]:
    yield up(100 * max(each["value"] for each in of(targets, ".*(tpot_ms|rate): off .*")), 1)
    late = of(targets, ".*ttft_ms: off .*")
    yield from (100 * span(late)[1], 100 * late[0]["target"], targets["1000 streams/s: of one core"]["value"])


def handoff_result(figures: Any, targets: Targets) -> Iterator[float]:
    yield from (figures[tokens]["seeded_first_over_alone"] for tokens in ("1000", "1900", "250"))


def soak_result(figures: Any, targets: Targets) -> Iterator[float]:
    slopes = sorted(each["mb_per_hour"] for each in figures["routers"])
    yield from (*met(list(targets.values())), *slopes, 100 * targets[SOAK_GROWS]["value"])


SOAK_GROWS = "memory may grow, part of it an hour (upper end of the interval)"


def vidur_result(figures: Any, targets: Targets) -> Iterator[float]:
    cost = of(targets, "Vidur's CPU to ours.*")
    yield from (*span(cost), cost[0]["target"], *met(cost), 100 * span(of(targets, "mean E2E off by.*"))[1])


def policy_cells(figures: Any, targets: Targets) -> Iterator[float]:
    cells = figures["cells"]
    as_it_is = [cell["over_rival"]["blind"] for cell in cells]
    yield from (sum(cell["over_admitted"]["blind"] >= 1 for cell in cells), len(cells), min(as_it_is), max(as_it_is))
    equal = [cell["over_admitted"]["blind"] for cell in cells if cell["fleet"] == "A"]
    yield from (min(equal), max(equal))


def policy_gap(figures: Any, targets: Targets) -> Iterator[float]:
    for serves_reasoning in (False, True):
        bounds = [
            cell["bound_over_admitted"]["blind"]
            for cell in figures["cells"]
            if cell["trace"].startswith("ServeGen") is serves_reasoning
        ]
        yield from (min(bounds), max(bounds))
    closed = [100 * cell["gap_closed"] for cell in figures["cells"]]
    yield from (-min(closed), max(closed))


def policy_shares(figures: Any, targets: Targets) -> Iterator[float]:
    """Goodput at 95 and 99 %, over the best admitted rival's, where both reach it."""
    for share in ("0.95", "0.99"):
        told = [cell["at_shares"][share] for cell in figures["cells"]]
        found = [each["blind"] for each in told if each is not None]
        yield from (statistics.geometric_mean(found), len(found), min(found), max(found))


def policy_fleets(figures: Any, targets: Targets) -> Iterator[float]:
    found = [cell["over_admitted"]["blind"] for cell in figures["cells"] if cell["fleet"] == "B"]
    yield from (min(found), max(found))


def policy_worlds(figures: Any) -> dict[str, list[list[float]]]:
    """By world, the last four columns of its table: what the rival keeps, what ours keeps, the ratios."""
    rows = next(each.rows for each in policy_tables.tables(figures) if each.title.startswith("Less obliging worlds"))
    found: dict[str, list[list[float]]] = {}
    for _, world, *values in rows:
        found.setdefault(world, []).append([float(each) for each in values])
    return found


def policy_harder(figures: Any, targets: Targets) -> Iterator[float]:
    rough, several, slower = policy_worlds(figures).values()
    for world in (rough, several):
        for column in (1, 0):
            kept = [row[column] for row in world]
            yield from (min(kept), max(kept))
    yield 2.5
    yield from (row[1] for row in slower)
    yield from (row[0] for row in slower)
    yield slower[1][3]


def policy_several(figures: Any, targets: Targets) -> Iterator[float]:
    code, conversations, mooncake, _ = policy_worlds(figures)["three routers"]
    yield from (code[1], conversations[1], mooncake[1], mooncake[0])


def policy_cell(figures: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(cell for cell in figures["cells"] if cell["cell"] == name)
    return found


def policy_lives(cell: Mapping[str, Any], *, blind: bool) -> list[float]:
    """The least and most mean answers that the compared runs of a cell last, or those on blind windows."""
    found = [
        window[whose]["there"]["lives"]
        for window in cell["windows"]
        for whose in ("ours", "rival_admitted")
        if not (blind and window["number"] % 2)
    ]
    return [min(found), max(found)]


def policy_mooncake(figures: Any, targets: Targets) -> Iterator[float]:
    cell = policy_cell(figures, "Mooncake conversation, 10 ×, fleet B")
    yield from (1024, cell["by_policy"]["blind"], 512, cell["by_arrangement"]["blind"])
    yield from policy_lives(cell, blind=True)


def policy_short(figures: Any, targets: Targets) -> Iterator[float]:
    for name in ("Azure conversation, 5 ×, fleet B", "Mooncake conversation, 10 ×, fleet B"):
        yield from (float(name.split()[2]), *policy_lives(policy_cell(figures, name), blind=False))
    fewer = [cell["cell"] for cell in figures["cells"] if policy_lives(cell, blind=False)[0] < 4]
    assert len(fewer) == 2, fewer


def router_p99(figures: Any, targets: Targets) -> Iterator[float]:
    ours, least = (of(targets, f"{name}: ms added .*")[0] for name in ("baton, default policy", "baton"))
    rival = figures["1,000 req/s"]["vllm-router"]["added_ms"]["p99"]
    yield from (rival, -least["value"], -ours["value"], ours["target"])


def policy_lost(figures: Any, targets: Targets) -> Iterator[float]:
    gate = targets["least_ratio_over_any_rival"]["target"]
    yield from (len(figures["below_gate"]), gate, 100 * max(cell["gap_closed"] for cell in figures["cells"]))


def gpu_pull(figures: Any, targets: Targets) -> Iterator[float]:
    over = of(targets, ".*_over_tuned")
    yield from (*span(over), len(over), statistics.median(each["value"] for each in over))
    assert all(each["low"] <= 1 <= each["high"] for each in over), "all intervals contain 1"


def choose_result(figures: Any, targets: Targets) -> Iterator[float]:
    yield from (targets["workload_16_us"]["value"], targets["workload_1000_us"]["value"])


def compare_beside(figures: Any, targets: Targets) -> Iterator[float]:
    """By how much the ratio grows where decodes suffer more beside prompts, in percent; and of how many scenarios."""
    ratios = {row["scenario"]: row["ratio"] for row in figures["scenarios"]}
    gains = [100 * (row["ratio"] / ratios[row["scenario"]] - 1) for row in figures["beside"]]
    assert all("H200" in row["scenario"] for row in figures["beside"])
    yield from (min(gains), max(gains), len(gains))


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence with figures, and what they are by the benchmark's file."""

    section: str
    bench: str
    sentence: str
    """`{}` for each figure."""
    figures: Callable[[Any, Targets], Iterator[float]]


CLAIMS = (
    Claim(
        "Defaults",
        "defaults",
        "nowhere more than {} % slower than the best simple rule: mean TTFT is {} to {} × with sessions on many "
        "instances, and {} to {} × elsewhere: met in {} of {} rows. With sessions on many instances the aim is {} × "
        "in the mean, met in {} of {}, and {} × at p99, met in {} of {}.",
        defaults_result,
    ),
    Claim(
        "Router",
        "router",
        "CPU per request is {} to {} × vllm-router's with `least_load`: met in {} of {} cells. It is {} to {} × with "
        "the default policy, {} to {} × with policies on, and {} to {} × per chunk: missed.",
        router_result,
    ),
    Claim("Router", "router", "With seeding it is {} to {} ×.", router_seeding),
    Claim(
        "Router",
        "router",
        "vllm-router adds {} ms to the engine's p99, `least_load` {} ms less than that, and the default policy {} ms "
        "less; {} ms more are allowed.",
        router_p99,
    ),
    Claim(
        "Router",
        "router",
        "{} ms less than vllm-router's with `least_load` and {} ms less with the default policy, where {} ms more are "
        "allowed: met by both,",
        lambda _, targets: (
            *(
                -each["value"]
                for name in ("baton", "baton, default policy")
                for each in of(targets, f"{name}: ms added .*")
            ),
            of(targets, "baton: ms added .*")[0]["target"],
        ),
    ),
    Claim(
        "Hand-over",
        "handoff",
        "A seeded first token takes {} and {} × the time of one engine alone, with prompts of 1,000 and 1,900 "
        "tokens: both targets missed. With 250 tokens, which have no target, it takes {} ×. From there to the second "
        "token it takes {} and {} × a step and what a plain hand-over adds: both met.",
        lambda figures, targets: iter(
            [*handoff_result(figures, targets), *(each["value"] for each in of(targets, r"tt2t_\w+"))]
        ),
    ),
    Claim(
        "vLLM's connectors and ours",
        "connectors",
        "takes {} to {} × the time of the better of vLLM's tuned pull and push in {} of {} places. In {} it takes {} "
        "to {} ×, where {} × is the target; {} of these has an interval above it: alone at 1,900 tokens with little "
        "KV, where push is faster. Baton's pull without early legs takes {} to {} × the time of vLLM's tuned pull "
        "({} of {} targets met)",
        connectors_result,
    ),
    Claim(
        "vLLM's connectors and ours",
        "connectors",
        "What a client leaves behind is free within {} s: met.",
        lambda _, targets: iter([up(span(of(targets, r"\w+_(free|left)_after_s"))[1], 2)]),
    ),
    Claim(
        "vLLM's connectors and ours",
        "connectors",
        "*An early leg* takes {} to {} × the time of Baton's pull alone",
        lambda _, targets: iter(span(of(targets, r"\w+_early_over_pull_alone"))),
    ),
    Claim(
        "vLLM's connectors and ours",
        "connectors",
        "With eight at once it takes {} to {} × on the tiny model, {} to {} × on the fat one.",
        lambda _, targets: (
            value for model in ("tiny", "fat") for value in span(of(targets, rf"{model}_\d+_eight_over_tuned"))
        ),
    ),
    Claim(
        "Real engines",
        "real",
        "as many requests in time as plain vLLM behind round robin ({} × at both rates, intervals {} to {}); over "
        "the same router before engines that serve whole it has {} and {} × at 5 times (intervals {} to {}). At 2 "
        "times it serves fewer than plain vLLM at {} a second ({} ×, interval {} to {}); at {} no difference is "
        "shown ({} ×, interval {} to {}). It hands nothing over here. The target, not below any other contestant, "
        "is met in {} of {}.",
        real_result,
    ),
    Claim(
        "Real engines",
        "real",
        "A token takes {} % longer at {} a second and {} % longer at {} (p50), the first token {} and {} ms. "
        "Engines without Baton's connector behind the same router, with steps of 512 tokens, take {} % longer a "
        "token and the same {} ms at {}.",
        real_costs,
    ),
    Claim(
        "Load generator",
        "load",
        "are within {} % of the other tools': met. Time to the first token is up to {} % lower: {} % is missed. "
        "1,000 streams a second take {} of a core: met.",
        load_result,
    ),
    Claim(
        "Soak",
        "soak",
        "{} of {} targets are met. Memory grows by {} and {} MB an hour, by {} % at most",
        soak_result,
    ),
    Claim(
        "Beside Vidur",
        "vidur",
        "Vidur takes {} to {} × Baton's CPU; {} × is met in {} of {} loads. Mean E2E is within {} %.",
        vidur_result,
    ),
    Claim(
        "Aggregated, disaggregated, rivals",
        "compare",
        "disaggregation gains another {} to {} % in the {} scenarios that were tried so",
        compare_beside,
    ),
    Claim(
        "Plans",
        "plan",
        "keeps its promise on the trace it was made for: {} of {}, met. Plans from averages fail on {} of {}: the "
        "target of all {} is missed. 64 GPUs of three types take {} s: met.",
        plan_result,
    ),
    Claim(
        "Plans",
        "plan",
        "breaks its promise at {} % of these rates on the code trace, at {} % on Mooncake, at {} % on ServeGen and "
        "at {} % on the conversations.",
        plan_rates,
    ),
    Claim(
        "Plans",
        "plan",
        "simulates {} fleets on {} requests (6 s of load: fewer than a plan should rest on). It ends by its effort "
        "and proves nothing. Bounds alone rule out little ({} of {} arrangements)",
        plan_search,
    ),
    Claim(
        "Lengths",
        "lengths",
        "Coverage within {} points; loss {} × that of all alike (geometric mean); p99 of Azure's code trace is {} "
        "×: missed.",
        lengths_result,
    ),
    Claim(
        "What a choice costs",
        "choose",
        "One choice of `workload` takes {} µs among 16 instances and {} µs among 1,000: both targets met.",
        choose_result,
    ),
    Claim(
        "Admission",
        "admission",
        "{} to {} % of the admitted requests meet their targets in {} simulated overloads and on mocks. While a decode "
        "instance slows down, {} % do; from five seconds after, which is what the target counts, {} % do. The target "
        "of {} % is met in all {}. {} to {} points more of all arrivals attain than with neither of the two rules that "
        "protect answers: met in all {}. The bound on lengths is met at its edge: {} points, target {}.",
        admission_result,
    ),
    Claim(
        "Admission",
        "admission",
        "Margins add up to {} points of what is kept. Where the weight alone keeps {} % or more they change it by {} "
        "points at most, and cost up to {} points of all arrivals.",
        admission_weight,
    ),
    Claim(
        "Admission",
        "admission",
        "those of the next five seconds, are not protected: {} % are kept, {} % with neither rule.",
        lambda figures, _: (
            100 * figures[SLOWS][rules]["around"]["in flight, and 5 s after"] for rules in ("both", "neither")
        ),
    ),
    Claim(
        "Admission",
        "admission",
        "Without a bound on lengths, which is the default, the longest decile attains {}, the middle ones {} and {}.",
        admission_deciles,
    ),
    Claim(
        "Admission",
        "admission",
        "On mocks, two classes: {} % are kept with both rules and {} % with neither; of all arrivals of both classes "
        "{} attain with both and {} with neither.",
        admission_mocks,
    ),
    Claim(
        "policy.md",
        "admission",
        "together with the weight of answers (above) {} to {} of what is let in is kept instead of {} to {} with "
        "neither; where a decode instance slows down, {} of the whole run instead of {}, and from five seconds after "
        "{} instead of {} (simulated",
        admission_margins,
    ),
    Claim(
        "admission.md",
        "admission",
        "the aim is that 97 % of what is let in keep their targets; {} to {} % did in overloads",
        admission_shed,
    ),
    Claim(
        "Chaos",
        "chaos",
        "{} of {} requests were served right, {} of {} by vllm-router.",
        chaos_result,
    ),
    Claim(
        "Bodies",
        "bodies",
        "Slowest `/health` {} ms; memory {} × a large body's size: both targets met.",
        lambda _, targets: (each["value"] for each in of(targets, "slowest .*|memory .*")),
    ),
    Claim(
        "Simulator",
        "sim",
        "A million requests took {} s and {} GB: both targets met.",
        lambda _, targets: (targets[name]["value"] for name in ("wall_s", "peak_gb")),
    ),
    Claim(
        "Prefixes",
        "prefixes",
        "Precision {} %, recall {} %, hit rate {} × the oracle's: all targets met.",
        lambda _, targets: iter(
            [
                *(100 * targets[f"{name} at the small cache"]["value"] for name in ("precision", "recall")),
                targets["hit rate to the oracle's"]["value"],
            ]
        ),
    ),
    Claim(
        "Choosing",
        "policy",
        "Both aims are missed: {} cells are below {} × some rival, and the gap closes nowhere by more than {} %.",
        policy_lost,
    ),
    Claim(
        "Choosing",
        "policy",
        "ours serves as much as the best of twelve rivals or more in {} cells of {}. ",
        lambda figures, targets: iter(list(policy_cells(figures, targets))[:2]),
    ),
    Claim(
        "Choosing",
        "policy",
        "Over the best rivals as they are, without admission, ours serves {} to {} ×. On equal GPUs (fleet A) ours is "
        "at {} to {} ×; ",
        lambda figures, targets: iter(list(policy_cells(figures, targets))[2:]),
    ),
    Claim("Choosing", "policy", "on unequal ones (fleet B) at {} to {} ×.", policy_fleets),
    Claim(
        "Choosing",
        "policy",
        "In the rival's arrangement ({} tokens a step) ours is at {} ×, in its own ({}) {} times that. The compared "
        "runs last {} to {} mean answers here,",
        policy_mooncake,
    ),
    Claim(
        "Choosing",
        "policy",
        "conversations at {} × ({} to {}) and Mooncake at {} × ({} to {}), both on fleet B",
        policy_short,
    ),
    Claim(
        "Choosing",
        "policy",
        "goodput at 95 % is {} × the best admitted rival's (geometric mean of the {} cells in which both reach it, {} "
        "to {} ×), at 99 % {} × ({} cells, {} to {} ×)",
        policy_shares,
    ),
    Claim(
        "Choosing",
        "policy",
        "In the rough world (last table) ours keeps {} to {} of its goodput, the best rivals {} to {}. With three "
        "routers, which tell each other of their load in flight ([policy.md](policy.md#several-routers)), ours keeps "
        "{} to {}, and rivals behind the same admission (its limits count the same notes) {} to {}. Where answers are "
        "{} times slower beside prompts than the router believes, ours keeps {}, {}, {} and {}, the rivals {}, {}, {} "
        "and {}: on Azure's conversations ours is then at {} × the best rival;",
        policy_harder,
    ),
    Claim(
        "policy.md",
        "policy",
        "three routers keep {} of one router's goodput on Azure's code, {} on its conversations and {} on Mooncake's, "
        "where the best rival behind the same admission keeps {},",
        policy_several,
    ),
    Claim(
        "Choosing",
        "policy",
        "the bound is {} to {} times the best admitted rival on Azure's and Mooncake's traces, and {} to {} times on "
        "ServeGen's reasoning traces, where it says nothing; ours closes −{} to {} % of the distance.",
        policy_gap,
    ),
    Claim(
        "vLLM's connectors and ours",
        "connectors-gpu",
        "Baton's pull takes {} to {} × the time of vLLM's tuned pull in the {} places (a length of prompt and a way of "
        "handing over), the median {} ×, and all twelve intervals contain 1.",
        gpu_pull,
    ),
    Claim(
        "Scaling",
        "scaling",
        "On seed 1 Baton attains in all {} cells. GPU-hours are within {} × the clairvoyant's in {} of {} cells, and "
        "within {} × the best rival's in {} of {}: both targets missed.",
        scaling_result,
    ),
    Claim(
        README,
        "defaults",
        "mean TTFT of chats {} to {} × that of vllm-router's best policy on many instances, at most {} × in every "
        "other case",
        lambda _, targets: iter([*span(of(targets, f"{MANY}mean.*")), span(of(targets, ELSEWHERE))[1]]),
    ),
    Claim(
        README,
        "chaos",
        "{} kinds of fault on mock engines: {} of {} requests served right, {} by vllm-router",
        lambda figures, targets: iter([len(figures), *list(chaos_result(figures, targets))[:3]]),
    ),
    Claim(
        README,
        "handoff",
        "TTFT {} and {} × that of one engine alone with prompts of 1,000 and 1,900 tokens, {} × with 250",
        handoff_result,
    ),
    Claim(
        README,
        "plan",
        "`baton plan`: {} of {} plans keep their promise on their trace",
        lambda figures, targets: iter(list(plan_result(figures, targets))[:2]),
    ),
    Claim(
        README,
        "scaling",
        "targets kept in {} of {} loads of one seed, with {} to {} × a clairvoyant's GPU-hours",
        scaling_readme,
    ),
    Claim(
        README,
        "router",
        "takes {} to {} × vllm-router's CPU per request with keys, admission and predictions on, {} to {} × with the "
        "default policy, and {} to {} × with `least_load`",
        router_readme,
    ),
    Claim(
        "Hand over or not",
        "breakeven",
        "In {} of {} runs attainment is at most {} % below the better of always and never handing over; latency "
        "without targets is {} to {} % below round robin's ({} % is the aim): all {} targets missed.",
        breakeven_result,
    ),
    Claim(
        "Hand over or not",
        "breakeven",
        "ServeGen on two pools is {} % ± {} % below never handing over: a miss for certain.",
        breakeven_misses,
    ),
)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.section}: {claim.sentence[:40]}")
def test_a_sentence_says_what_the_published_figures_say(claim: Claim) -> None:
    told = published(claim.bench)
    expected = list(claim.figures(told["figures"], told["targets"]))
    assert differences(sections()[claim.section], claim.sentence, expected) == []


def test_each_cell_below_the_gate_has_its_line() -> None:
    figures = published("policy")["figures"]
    text = (DOCS / "benchmarks.md").read_text()
    lines = {
        name.strip(): float(ratio.split("×")[0])
        for name, ratio in re.findall(
            r"^\| ([^|]*×, fleet [AB]) \| (\d[^|]*×[^|]*) \| [^|]*[a-z][^|]* \|", text, re.MULTILINE
        )
    }
    cells = [cell for cell in figures["cells"] if cell["cell"] in figures["below_gate"]]
    least = {cell["cell"]: min(cell["over_admitted"]["blind"], cell["over_rival"]["blind"]) for cell in cells}
    assert {name: lines.get(name) for name in least} == pytest.approx(least, abs=0.0051)


def test_the_policy_s_headline_is_what_its_figures_say() -> None:
    headline = policy_tables.said(published("policy")["figures"])
    assert headline in sections()["Choosing"] and headline in sections()[README]


def test_another_figure_or_another_sentence_is_a_difference() -> None:
    text = "It takes 0.63 × in three of 1,204 places."
    assert differences(text, "takes {} × in {} of {} places", [0.634, 3, 1204]) == []
    assert len(differences(text, "takes {} × in {} of {} places", [0.636, 4, 1205])) == 3
    assert differences(text, "takes {} ×: met", [0.63]) == ["no such sentence: takes {} ×: met"]
    assert up(1.6) == 2 and up(0.51, 1) == 0.6 and up(2.0) == 2


# -- tables that are made from the files alone (those of `connectors` are compared in test_bench_handoff.py) --

TABLES: Mapping[str, Callable[[Any], Sequence[Table]]] = {
    "breakeven": breakeven.tables_of,
    "compare": compare_tables.tables,
    "plan": plan.tables,
    "real": lambda figures: [table for name, found in figures.items() for table in real_tables.tables(found, name)],
    "scaling": lambda figures: scaling.tables(figures["cells"])[:1],
    "policy": policy_tables.tables,
}


@pytest.mark.parametrize("bench", TABLES)
def test_tables_are_what_the_benchmark_makes_of_its_file(bench: str) -> None:
    page = (DOCS / "benchmarks.md").read_text()
    left = page.partition(f"<!-- {bench}: begin -->")[2].partition(f"<!-- {bench}: end -->")[0]
    for table in TABLES[bench](published(bench)["figures"]):
        assert table.markdown() in left, table.title
        left = left.replace(table.markdown(), "")
    assert "|" not in left, "a table that the benchmark does not make"


def test_the_cells_below_the_gate_stand_in_their_table() -> None:
    """With their ratios over the best rival, with the same admission or without it."""
    figures = published("policy")["figures"]
    cells = {cell["cell"]: cell for cell in figures["cells"]}
    for name in figures["below_gate"]:
        least = min(cells[name][over]["blind"] for over in ("over_admitted", "over_rival"))
        assert not differences(sections()["Choosing"], f"| {name} | {{}} ×", [least])
