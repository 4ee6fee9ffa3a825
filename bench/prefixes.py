"""How well the prefix-cache index knows what engines hold, and its cost.

    BATON_DATA=/path/to/data make bench-prefixes      about a minute; ARGS=--quick a quarter of the trace
    make bench-prefixes ARGS=--publish                writes docs/benchmarks

Mooncake's conversation trace goes through a fleet of engines that prefill one prompt at a time and decode any number,
with vLLM's block pool (`engine.twin.blocks`) of a stated size; blocks are Mooncake's, 512 tokens. The index is told
what a router sees and nothing else. At each request what it expects of the chosen engine is compared with what the
engine finds when the request's turn comes:

    precision   of the cached tokens that were expected, the share that was there
    recall      of the cached tokens that were there, the share that was expected

Requests go to the engine with the least unfinished prefill (`least load`), or with the least once what the index
expects to be cached is taken off the new prompt (`prefix`), or what is really there is (`oracle`).
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import heapq
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np

from bench import inputs
from bench.published import Table, machine, note_of, publish, result, say, show, target
from engine.twin.blocks import BlockPool
from engine.twin.tokens import Text
from loadgen.arrival import Arrival
from loadgen.traces import mooncake
from router.core.values import Sent
from router.predict.chunks import CHUNK_BYTES, Hasher, prompt_text
from router.predict.prefix_cache import PrefixCacheIndex

TRACE = "traces/mooncake/conversation_trace.jsonl"
BLOCK = mooncake.BLOCK_TOKENS
BYTES_PER_TOKEN = CHUNK_BYTES / BLOCK
"""Chosen so that a block of the trace is a chunk of the index."""

INSTANCES = 8
PREFILL_TOKENS_S, DECODE_TOKEN_S = 10_000.0, 0.025
"""About a 30-billion model on one H100; only the order of events depends on it."""


class Blocks:
    """A prompt for the pool: its blocks' names."""

    def __init__(self, names: list[int]) -> None:
        self.names = names

    def chains(self, first: int, last: int) -> list[int]:
        """Names of the blocks from `first` to before `last`."""
        return self.names[first:last]


@dataclass
class Engine:
    """One engine: a pool, a prefill at a time."""

    pool: BlockPool
    free_at: float = 0.0
    """When it has prefilled all its requests, by the router's estimate."""
    waiting: list[tuple[Any, ...]] = field(default_factory=list)
    busy: bool = False

    def hits(self, names: list[int]) -> list[int]:
        """Blocks of this prompt that are cached."""
        return self.pool.hits(cast("Text", Blocks(names)), len(names))


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    policy: str
    blocks: int
    told: float = 1.0
    """Capacity that the index is given, as a share of the real one."""
    reports: bool = True
    """Whether engines report `cached_tokens`."""
    every: int = 1
    """The index sees one of this many requests; another router sends the others, by least load."""
    forgets: bool = True
    """Whether the index forgets. Without, it keeps everything, as a routing tree without feedback does."""


@dataclass
class Seen:
    """Counts in blocks of prompts."""

    prompt: int = 0
    cached: int = 0
    expected: int = 0
    there: int = 0
    both: int = 0
    entries_max: int = 0


class Fleet:
    """The fleet of one case, on virtual time."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.engines = [Engine(BlockPool(case.blocks, row)) for row in range(INSTANCES)]
        self.index = PrefixCacheIndex()
        for row in range(INSTANCES):
            tokens = case.blocks * BLOCK * case.told if case.forgets else 1 << 40
            self.index.join(row, int(tokens), 1)
        self.seen = Seen()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = self._arrived = 0

    def run(self, arrivals: list[Arrival]) -> Seen:
        """Play all arrivals, to the last event; the counts."""
        for arrival in arrivals:
            self._until(arrival.at_s)
            self._arrive(arrival)
        self._until(float("inf"))
        return self.seen

    def _until(self, at_s: float) -> None:
        while self._events and self._events[0][0] <= at_s:
            now, _, call, arguments = heapq.heappop(self._events)
            call(now, *arguments)

    def _at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, call, arguments))

    def _arrive(self, arrival: Arrival) -> None:
        ours = self._arrived % self.case.every == 0
        self._arrived += 1
        now, names = arrival.at_s, [each + 1 for each in arrival.prefix[: arrival.input_tokens // BLOCK]]
        match = self.index.match(names)
        expected = np.array([match.chunks_of(row) for row in range(INSTANCES)])
        left = np.array([max(0.0, engine.free_at - now) for engine in self.engines])
        cached = np.zeros(INSTANCES)
        if self.case.policy == "prefix" and ours:
            cached = expected.astype(np.float64)
        elif self.case.policy == "oracle":
            cached = np.array([len(engine.hits(names)) for engine in self.engines])
        cost = left + (arrival.input_tokens - cached * BLOCK) / PREFILL_TOKENS_S
        row = int(np.argmin(cost))
        engine = self.engines[row]
        engine.free_at = max(now, engine.free_at) + (cost[row] - left[row])
        sent = self.index.sent(row, names, now) if ours else None
        self.seen.entries_max = max(self.seen.entries_max, len(self.index))
        engine.waiting.append((arrival, names, int(expected[row]), sent))
        if not engine.busy:
            self._start(now, row)

    def _start(self, now: float, row: int) -> None:
        engine = self.engines[row]
        if engine.busy or not engine.waiting:
            return
        arrival, names, expected, sent = engine.waiting[0]
        hits = engine.hits(names)
        whole = -(-(arrival.input_tokens + arrival.output_tokens) // BLOCK)
        if whole > engine.pool.num_blocks:
            engine.waiting.pop(0)  # no engine of this size can take the request
            self._start(now, row)
            return
        if whole - len(hits) + engine.pool.unused(hits) > engine.pool.free_blocks:
            return  # until a request ends
        engine.waiting.pop(0)
        engine.busy = True
        engine.pool.touch(hits)
        blocks = hits + engine.pool.take(whole - len(hits))
        engine.pool.cache_row(blocks[len(hits) : len(names)], names[len(hits) :])
        seen = self.seen
        seen.prompt += len(names)
        seen.cached += len(hits)
        if sent is not None:
            seen.expected += expected
            seen.there += len(hits)
            seen.both += min(expected, len(hits))
        done = now + (arrival.input_tokens - len(hits) * BLOCK) / PREFILL_TOKENS_S
        self._at(done, self._prefilled, row, arrival, sent, len(hits) * BLOCK)
        self._at(
            done + arrival.output_tokens * DECODE_TOKEN_S, self._end, row, arrival, names if sent else None, blocks
        )

    def _prefilled(self, now: float, row: int, arrival: Arrival, sent: Sent | None, cached: int) -> None:
        if self.case.forgets and sent is not None:
            self.index.answered(
                sent,
                now,
                prompt_tokens=arrival.input_tokens,
                text_bytes=int(arrival.input_tokens * BYTES_PER_TOKEN),
                cached_tokens=cached if self.case.reports else None,
            )
        self.engines[row].busy = False
        self._start(now, row)

    def _end(self, now: float, row: int, arrival: Arrival, names: list[int] | None, blocks: list[int]) -> None:
        self.engines[row].pool.give_back(blocks)
        if self.case.forgets and names is not None:
            self.index.used(row, names, now)
            self.index.wrote(row, arrival.output_tokens, now)
        self._start(now, row)


SMALL, LARGE = 1250, 6250
CASES = [
    *(Case(policy, blocks) for blocks in (SMALL, LARGE) for policy in ("least load", "prefix", "oracle")),
    Case("prefix", SMALL, reports=False),
    Case("prefix", SMALL, told=2.0),
    Case("prefix", SMALL, told=2.0, reports=False),
    Case("prefix", SMALL, told=0.5),
    Case("prefix", SMALL, every=2),
    Case("prefix", SMALL, every=2, reports=False),
    Case("prefix", SMALL, forgets=False),
]


def told(case: Case) -> str:
    """What the index knows, in words."""
    if not case.forgets:
        return "never forgets"
    half = f", 1 of {case.every} requests" if case.every > 1 else ""
    size = "true size" if case.told == 1 else f"told {case.told:g} × the size"
    return f"{size}, {'cached_tokens' if case.reports else 'no reports'}{half}"


def quality(arrivals: list[Arrival]) -> tuple[Table, dict[str, Any]]:
    """Every case."""
    rows, figures = [], {}
    for case in CASES:
        seen = Fleet(case).run(arrivals)
        hit = seen.cached / seen.prompt
        precision, recall = seen.both / max(1, seen.expected), seen.both / max(1, seen.there)
        name = f"{case.policy}, {case.blocks * BLOCK:,} tokens, {told(case)}"
        figures[name] = {
            "hit_rate": round(hit, 4),
            "precision": round(precision, 4),
            "recall": round(recall, 4),
            "entries_max": seen.entries_max,
        }
        say(f"{name}: {figures[name]}")
        size = f"{case.blocks * BLOCK / 1e6:.2f} M"
        rows.append([case.policy, size, told(case), f"{hit:.1%}", f"{precision:.1%}", f"{recall:.1%}"])
    columns = ["routed by", "KV tokens each", "the index", "hit rate", "precision", "recall"]
    return Table(f"Mooncake conversations on {INSTANCES} engines, {len(arrivals):,} requests", columns, rows), figures


def microseconds(call: Callable[[], Any], calls: int = 200, rounds: int = 15) -> float:
    """CPU of one call, of the least disturbed round."""
    found = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        for _ in range(calls):
            call()
        found.append((time.thread_time_ns() - began) / calls / 1000)
    return min(found)


def cost() -> tuple[Table, dict[str, float]]:
    """CPU by prompt size and fleet, and memory of a full index."""
    hasher = Hasher(b"a key for the benchmark")
    scope = hasher.scope("model", "tenant")
    text = "".join(f"Sentence {number} of a prompt. " for number in range(5000))[: 100 * 1024]
    figures: dict[str, float] = {}
    for kb in (2, 10, 100):
        body = {"messages": [{"role": "user", "content": text[: kb * 1024]}]}
        read = prompt_text(body)
        figures[f"text of {kb} KB, us"] = microseconds(partial(prompt_text, body))
        figures[f"names of {kb} KB, us"] = microseconds(partial(hasher.names, scope, read))
    for name, digest in (("BLAKE2b", hashlib.blake2b), ("SHA-256", hashlib.sha256)):
        figures[f"the same with chained {name}, us"] = microseconds(partial(chained, digest, text.encode()))
    names = hasher.names(scope, text.encode())
    for instances in (16, 300, 1000):
        index = PrefixCacheIndex()
        for row in range(instances):
            index.join(row, 500_000, 1)
            index.sent(row, names[: 10 + row % 40], float(row))
        figures[f"match 100 KB among {instances}, us"] = microseconds(partial(index.match, names))
        figures[f"sent 100 KB, one of {instances}, us"] = microseconds(partial(index.sent, 7, names, 1e9))
    for millions in (0.5, 4):
        index = PrefixCacheIndex()
        index.join(0, int(millions * 1e6), 1)
        figures[f"sent 100 KB, new to a full index of {millions:g}M tokens, us"] = full_us(index)
    figures["MB of 500,000 entries, 50 instances"] = memory_mb()
    rows = [[name, f"{value:.1f}"] for name, value in figures.items()]
    return Table("What the index costs", ["what", "value"], rows), {k: round(v, 2) for k, v in figures.items()}


def full_us(index: PrefixCacheIndex) -> float:
    """Time of a prompt that is new to an instance whose KV cache is full, so that as much leaves. The mean: some make
    dicts grow.
    """
    draw, took = np.random.default_rng(1), 0
    prompts = [draw.integers(1 << 62, size=100).tolist() for _ in range(600)]
    for number, names in enumerate(prompts):
        if number == 300:
            took = 0
        began = time.thread_time_ns()
        index.sent(0, names, float(number))
        took += time.thread_time_ns() - began
    return took / 300 / 1000


def chained(digest: Callable[[bytes], Any], text: bytes) -> list[bytes]:
    """Names made with the standard library: each hash is of the one before it and a chunk."""
    found, last = [], b""
    for at in range(0, len(text) - CHUNK_BYTES + 1, CHUNK_BYTES):
        last = digest(last + text[at : at + CHUNK_BYTES]).digest()
        found.append(last)
    return found


def memory_mb() -> float:
    """Memory of a full index whose instances share half of what they hold."""
    gc.collect()
    tracemalloc.start()
    index = PrefixCacheIndex()
    for row in range(50):
        index.join(row, 10_000_000, 1)
    draw = np.random.default_rng(1)
    for row in range(50):
        shared = draw.integers(1 << 20, size=5000) * 977
        own = draw.integers(1 << 62, size=6000)
        for at in range(0, 11_000, 50):
            index.sent(row, np.concatenate([shared, own])[at : at + 50].tolist(), float(at))
    size = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    assert 490_000 <= len(index) <= 500_000, len(index)
    return size


def targets_of(figures: dict[str, Any], costs: dict[str, float]) -> dict[str, Any]:
    """The targets."""
    small = figures[f"prefix, {SMALL * BLOCK:,} tokens, true size, cached_tokens"]
    oracle = figures[f"oracle, {SMALL * BLOCK:,} tokens, true size, cached_tokens"]
    return {
        "precision at the small cache": target(small["precision"], 0.95, at_most=False),
        "recall at the small cache": target(small["recall"], 0.9, at_most=False),
        "hit rate to the oracle's": target(small["hit_rate"] / oracle["hit_rate"], 0.97, at_most=False),
        "names of 100 KB, us": target(costs["names of 100 KB, us"], 60),
    }


def main() -> int:
    """Measure, report, and with --publish write it down."""
    parser = argparse.ArgumentParser(
        prog="bench-prefixes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the first quarter of the trace")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/prefixes.json and the tables")
    args = parser.parse_args()
    path = inputs.required("bench-prefixes", [str(TRACE)], told_in="docs/load.md") / TRACE
    facts = machine()
    with path.open() as lines:
        found = mooncake.read(lines, np.random.default_rng(1))
        arrivals = [row for row in found if isinstance(row, Arrival)]
    if args.quick:
        arrivals = arrivals[: len(arrivals) // 4]
    costs_table, costs = cost()
    table, figures = quality(arrivals)
    show([table, costs_table])
    said = result("prefixes", {**figures, "cost": costs}, targets_of(figures, costs))
    if args.publish:
        publish(said, [table, costs_table], facts, note_of(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
