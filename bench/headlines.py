"""The table that opens docs/benchmarks.md: one line a figure, made from docs/benchmarks/*.json alone.

    python -m bench.headlines                   write the table anew; `--publish` of every benchmark does it as well

A line stands for one target of a benchmark, or for several of a kind: then it shows the worst of them, and how many are
met. A missed target is shown as missed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"
BEGIN, END = "<!-- headlines: begin -->", "<!-- headlines: end -->"


@dataclass(frozen=True, slots=True)
class Headline:
    """One line of the table."""

    says: str
    bench: str
    """Its file in docs/benchmarks/."""
    targets: str
    """A pattern that the whole name of each target matches."""
    command: str
    form: str = "{:.2f}"
    at_least: bool = False
    """The target is a least value, and the worst figure the least."""


HEADLINES: Sequence[Headline] = (
    Headline("mean TTFT of chats as Baton starts, over the best policy of vllm-router", "defaults",
             r"(4\+4|16\+16), sessions.*: (mean )?TTFT.*", "bench-defaults", "{:.2f} ×"),
    Headline("the same at p99", "defaults", r"(4\+4|16\+16), sessions.*: p99 of TTFT.*", "bench-defaults", "{:.2f} ×"),
    Headline("mean TTFT in all other rows, over the best simple rule", "defaults",
             r"(?!(4\+4|16\+16), sessions).*: (mean )?TTFT.*", "bench-defaults", "{:.2f} ×"),
    Headline("admitted requests that meet their targets, worst overload (a slow instance: from 5 s after)", "admission",
             r".*: kept of what was let in.*", "bench-admission", "{:.1%}", at_least=True),
    Headline("attainment of the longest tenth of prompts below the middle ones', lengths bounded", "admission",
             r".*: attainment of the middle deciles less that of the longest", "bench-admission", "{:.1%}"),
    Headline("cells with half of the gap closed between the best rival with our admission and a bound", "policy",
             "share_of_cells_with_half_the_gap_closed", "bench-policy", "{:.0%}", at_least=True),
    Headline("the same with a bound that a long load keeps", "policy-bound", "share_of_cells_with_half_the_gap_closed",
             "bench-bound", "{:.0%}", at_least=True),
    Headline("goodput over the best rival's, admitted or not, worst cell", "policy", "least_ratio_over_any_rival",
             "bench-policy", "{:.2f} ×", at_least=True),
    Headline("router's CPU per request over vllm-router's, `least_load`", "router", r"CPU to vllm-router's, requests.*",
             "bench-router", "{:.2f} ×"),
    Headline("the same with the default policy", "router", r"baton, default policy: CPU to vllm-router's, requests.*",
             "bench-router", "{:.2f} ×"),
    Headline("the same with policies on", "router", r"baton, policies on: CPU to vllm-router's, requests.*",
             "bench-router", "{:.2f} ×"),
    Headline("the same with policies on, each request handed over", "router",
             r"baton, policies on, least_load: CPU to vllm-router's, requests.*", "bench-router", "{:.2f} ×"),
    Headline("router's CPU per relayed chunk over vllm-router's", "router", r"CPU to vllm-router's, chunks.*",
             "bench-router", "{:.2f} ×"),
    Headline("the same with the default policy, and with policies on", "router",
             r"baton, (default policy|policies on.*): CPU to vllm-router's, chunks.*", "bench-router", "{:.2f} ×"),
    Headline("p99 of the first token at 1,000 requests a second, beyond vllm-router's", "router",
             r"baton.*: ms added at p99.*", "bench-router", "{:.2f} ms"),
    Headline("memory of an open stream", "router", r"KB per open stream.*", "bench-router", "{:.0f} KB"),
    Headline("one choice among 16 instances", "choose", "workload_16_us", "bench-choose", "{:.0f} µs"),
    Headline("one choice among 1,000 instances", "choose", "workload_1000_us", "bench-choose", "{:.0f} µs"),
    Headline("seeded TTFT of two engines over one engine alone, prompts of 1,000 and 1,900 tokens", "handoff",
             r"ttft_seeded_over_alone.*", "bench-handoff", "{:.2f} ×"),
    Headline("Baton's connector over vLLM's, tuned: small KV", "connectors", r"tiny_\d+_\w+_over_tuned",
             "bench-connectors", "{:.2f} ×"),
    Headline("the same with a large KV", "connectors", r"fat_\d+_\w+_over_tuned", "bench-connectors", "{:.2f} ×"),
    Headline("an early leg over Baton's own pull, alone", "connectors", r"\w+_early_over_pull_alone",
             "bench-connectors", "{:.2f} ×"),
    Headline("Baton's connector as it starts, over the better of vLLM's tuned pull and push", "connectors",
             r"\w+_choice_over_best", "bench-connectors", "{:.2f} ×"),
    Headline("the same on one H200", "connectors-gpu", r"\w+_choice_over_best", "bench-handoff", "{:.2f} ×"),
    Headline("Baton's connector over vLLM's, tuned, on one H200: one hand-over at a time", "connectors-gpu",
             r"8B_\d+_(alone|busy)_over_tuned", "bench-handoff", "{:.2f} ×"),
    Headline("the same with eight in flight", "connectors-gpu", r"8B_\d+_(eight|loop)_over_tuned", "bench-handoff",
             "{:.2f} ×"),
    Headline("an early leg over Baton's own pull, alone, on one H200", "connectors-gpu",
             r"8B_\d+_early_over_pull_alone", "bench-handoff", "{:.2f} ×"),
    Headline("KV blocks free after a client has left", "connectors", r"\w+_(free|left)_after_s", "bench-connectors",
             "{:.3f} s"),
    Headline("an evicted prompt's first token over its cold one, from host memory or disk", "tiers", r"(host|disk)_\w+",
             "bench-tiers", "{:.2f} ×"),
    Headline("the same from another engine: its host memory, its disk, its KV cache", "tiers", r"peer_\w+",
             "bench-tiers", "{:.2f} ×"),
    Headline("conversations beyond the KV caches, tiers known to the router over unknown: tokens computed, first token",
             "tiers", r"talks_\w+_over_unknown", "bench-tiers", "{:.2f} ×"),
    Headline("prompt tokens computed with tiers, over those without", "tiers", "talks_computed_over_no_tiers",
             "bench-tiers", "{:.2f} ×"),
    Headline("prefixes found on two data parallel ranks, off those on two instances by at most", "tiers",
             "hit_rate_of_ranks_off_instances", "bench-tiers", "{:.2%}"),
    Headline("requests in time on two real engines, over each other contestant's", "real", r"\w+_[\d.]+_over_.*",
             "bench-real", "{:.2f} ×", at_least=True),
    Headline("handing over as the policy chooses: worse than the better of always and never by", "breakeven",
             r"worse_(attainment|latency)", "bench-breakeven", "{:.1%}"),
    Headline("mean latency below round robin's, mixed traces without targets", "breakeven", "latency_gain",
             "bench-breakeven", "{:.1%}", at_least=True),
    Headline("predicted answer lengths: loss over that of all alike, worst trace and level", "lengths",
             r"loss to all alike, worst.*", "bench-lengths", "{:.2f} ×"),
    Headline("requests with wrong text, hung, or lost where another instance was", "chaos", r"(?!leaked).*",
             "chaos-table", "{:.0f}"),
    Headline("slowest `/health` beside the worst bodies of 33 MB", "bodies", r"slowest /health.*", "bench-bodies",
             "{:.0f} ms"),
    Headline("memory of a large body, times its size", "bodies", r"memory at its peak.*", "bench-bodies", "{:.1f} ×"),
    Headline("growth of a router's memory in an hour under load, at most", "soak", r"memory may grow.*", "soak",
             "{:.1%}"),
    Headline("growth of a router's memory for certain, each hour", "soak", r"memory grows for certain.*", "soak",
             "{:.1f} MB"),
    Headline("prefix index: hit rate over an oracle's", "prefixes", "hit rate to the oracle's", "bench-prefixes",
             "{:.3f} ×", at_least=True),
    Headline("plans that keep their promise on the trace they are made for", "plan", r"ours keeps its promise.*",
             "bench-plan", "{:.0%}", at_least=True),
    Headline("plans from averages that fail on the trace they are made for", "plan", r"plans from averages fail.*",
             "bench-plan", "{:.0%}", at_least=True),
    Headline("traces on which a plan from averages fails at more than 3 % of rates, of four", "plan",
             r"traces on which a plan from averages.*", "bench-plan", "{:.0f}", at_least=True),
    Headline("Splitwise's fleets through the planner: watts or $/h over its baselines'", "plan", r"Splitwise: .*",
             "bench-plan", "{:.2f} ×"),
    Headline("a plan for 64 GPUs of three types", "plan", r"64 GPUs of three types, seconds", "bench-plan", "{:.0f} s"),
    Headline("loads, seed 1, whose targets the controller keeps, of those that a clairvoyant can keep", "scaling",
             "attains_where_the_clairvoyant_does", "bench-scaling", "{:.0%}", at_least=True),
    Headline("GPU-hours over the clairvoyant's, worst load", "scaling", "gpu_hours_over_clairvoyant", "bench-scaling",
             "{:.2f} ×"),
    Headline("the same over the best rival that keeps targets", "scaling", "gpu_hours_over_best_rival", "bench-scaling",
             "{:.2f} ×"),
    Headline("load generator beside `vllm bench serve` and guidellm", "load", r".*: off .*by", "bench-load",
             "{:.1%} off"),
    Headline("Vidur's CPU over the simulator's, same requests", "vidur", r"Vidur's CPU to ours.*", "bench-vidur",
             "{:.1f} ×", at_least=True),
    Headline("a million requests on 1,000 simulated instances", "sim", "wall_s", "bench-sim", "{:.0f} s"),
)  # fmt: skip


def lines() -> Iterator[str]:
    """The table, as GitHub shows it. A benchmark without published figures has no line."""
    yield "| figure | seen | target | met | command |"
    yield "| --- | --- | --- | --- | --- |"
    for each in HEADLINES:
        path = DOCS / "benchmarks" / f"{each.bench}.json"
        if not path.exists():
            continue
        found = [
            target
            for name, target in json.loads(path.read_text())["targets"].items()
            if re.fullmatch(each.targets, name) and target["value"] is not None
        ]
        if found:
            yield _line(each, found)


def _line(each: Headline, found: Sequence[dict[str, Any]]) -> str:
    worst = (min if each.at_least else max)(
        found, key=lambda target: target["value"] / target["target"] if target["target"] else target["value"]
    )
    met = sum(target["met"] for target in found)
    told = ("yes" if met else "**no**") if len(found) == 1 else f"{met} of {len(found)}"
    told = told if met == len(found) else f"**{told.strip('*')}**"
    sign = "≥" if each.at_least else "≤"
    seen, wanted = each.form.format(worst["value"]), each.form.format(worst["target"])
    return f"| {each.says} | {seen} | {sign} {wanted} | {told} | `make {each.command}` |"


def renewed(page: str) -> str:
    """The page with the table as the files have it; a page without a place for it stays unchanged."""
    if BEGIN not in page:
        return page
    before, _, rest = page.partition(BEGIN)
    return "\n".join([before + BEGIN, "", *lines(), "", END]) + rest.partition(END)[2]


def write() -> None:
    """Renew the page."""
    PAGE.write_text(renewed(PAGE.read_text()))


if __name__ == "__main__":
    write()
