"""The cost of the engine twin: CPU microseconds of each leg, and the memory of an idle instance.

    python -m bench.twin [--only decode] [--settings simulation] [--legs 3000] [--seed 1] [--json] [--profile]

One twin on virtual time, Llama-3.1-8B on an H100 (the shipped profile), asynchronous scheduling as on GPUs:

    prefill   legs with max_tokens=1 and a hold, given back 50 ms later
    decode    legs that pull their prompt; about 40 decode at once
    whole     requests that are not handed off
    chat      conversations: a shared system prompt, each turn has all turns before it; the prefix cache is on

The time is that of the whole loop, the driver's heap included; requests are made before it starts. Lengths have the
mean and the percentiles of Azure's conversation trace of 2023. Each load runs with two settings: `simulation` is what a
simulator sets (no contents of blocks, shares for first tokens only; no prefix cache where nothing is shared), `mock`
keeps everything. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import heapq
import json
import math
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from cluster.ids import InstanceId, RequestId, TransferId
from cluster.instance import Role
from costs.cost import Costs, costs_of
from costs.hardware import gpu_named
from costs.shipped import model_named, profiles
from engine.twin import events as ev
from engine.twin.config import TwinConfig, Version
from engine.twin.machine import Twin
from engine.twin.request import HoldSource, TwinRequest
from engine.twin.tokens import Prompt, Segment, Text, answer_key
from kvtransfer.hold_marks import Slot

MS = 1_000_000
PULL_NS, RELEASE_NS = 5 * MS, 50 * MS
TARGETS = {
    "prefill_simulation_us": 120.0,
    "decode_simulation_us": 120.0,
    "whole_simulation_us": 120.0,
    "idle_kb": 1000.0,
}
"""1,000 instances and a million requests in ten minutes on one core: 600 µs a request, of which the twins get 240."""
PEER = InstanceId("peer")


@dataclass(frozen=True)
class Lengths:
    """A distribution by its median, 90th and 99th percentile; `bend` shapes the lower half, so that the mean is
    right.
    """

    p50: int
    p90: int
    p99: int
    bend: float

    def draw(self, chance: random.Random) -> int:
        quantile = chance.random()
        if quantile < 0.5:
            return max(1, round(self.p50 * math.pow(2 * quantile, self.bend)))
        if quantile < 0.9:
            return round(self.p50 * math.pow(self.p90 / self.p50, (quantile - 0.5) / 0.4))
        return round(self.p90 * math.pow(self.p99 / self.p90, (quantile - 0.9) / 0.09))


PROMPTS = Lengths(1020, 2735, 4142, 3.6)
"""Mean 1,155 tokens."""
ANSWERS = Lengths(129, 424, 601, 0.075)
"""Mean 211 tokens."""


@dataclass(frozen=True)
class Load:
    """Requests by arrival, for one instance."""

    config: TwinConfig
    arrivals: list[tuple[int, TwinRequest]]


class Driver:
    """One twin and the answers to it: pulls that arrive, holds that are given back."""

    def __init__(self, load: Load, costs: Costs, contents: Callable[[ev.PullBlocks], tuple[int, ...]]) -> None:
        self.twin = Twin(load.config, costs)
        self.said: Counter[type] = Counter()
        self._contents = contents
        self._queue: list[tuple[int, int, ev.Event]] = [
            (when, number, ev.Submit(request)) for number, (when, request) in enumerate(load.arrivals)
        ]
        self._count = self._left = len(self._queue)

    def play(self) -> None:
        """Run until every request is over; holds may be left."""
        twin, queue, tick = self.twin, self._queue, ev.Tick()
        self._take(twin.handle(ev.StartEngine(1), 0), 0)
        while self._left:
            wakeup = twin.next_wakeup()
            if queue and (wakeup is None or queue[0][0] < wakeup):
                when, _, event = heapq.heappop(queue)
                self._take(twin.handle(event, when), when)
            else:
                assert wakeup is not None, "requests are left, and nothing happens any more"
                self._take(twin.handle(tick, wakeup), wakeup)

    def _take(self, effects: Iterable[ev.Effect], now: int) -> None:
        for effect in effects:
            self.said[type(effect)] += 1
            if isinstance(effect, ev.RequestFinished):
                self._left -= 1
                if effect.hold is not None:
                    self._later(now + RELEASE_NS, ev.released(effect.hold.source(PEER), PEER))
            elif isinstance(effect, ev.RequestRefused):
                self._left -= 1
            elif isinstance(effect, ev.PullBlocks):
                said = effect.source.slot.mark if effect.source.slot is not None else None
                self._later(effect.at_ns + PULL_NS, ev.KvArrived(effect.request, self._contents(effect), said))

    def _later(self, when: int, event: ev.Event) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, event))


def arrivals(chance: random.Random, rate: float, requests: Iterable[TwinRequest]) -> list[tuple[int, TwinRequest]]:
    """A Poisson stream."""
    now, row = 0.0, []
    for request in requests:
        now += chance.expovariate(rate)
        row.append((round(now * 1e9), request))
    return row


def private(number: int, tokens: int) -> Prompt:
    """A prompt that shares nothing."""
    return (Segment(1000 + number, tokens),)


def prefill(base: TwinConfig, legs: int, chance: random.Random) -> Load:
    """12 prompts a second: about half busy."""
    requests = (
        TwinRequest(
            id=RequestId(f"r{number}"),
            prompt=private(number, PROMPTS.draw(chance)),
            max_tokens=1,
            hold=TransferId(RequestId(f"r{number}"), 1, 1),
        )
        for number in range(legs)
    )
    return Load(replace(base, role=Role.PREFILL), arrivals(chance, 12, requests))


def decode(base: TwinConfig, legs: int, chance: random.Random) -> Load:
    """Decode legs at a rate at which about 40 run at once."""
    requests = []
    for number in range(legs):
        tokens = PROMPTS.draw(chance)
        name = RequestId(f"r{number}")
        blocks, slot = tuple(range(base.blocks_for(tokens))), Slot(0, number.to_bytes(16, "little"))
        source = HoldSource(TransferId(name, 1, 1), PEER, blocks, tokens, name, slot)
        answer = ANSWERS.draw(chance)
        requests.append(
            TwinRequest(id=name, prompt=private(number, tokens), max_tokens=1500, stop_after=answer, pull=source)
        )
    return Load(replace(base, role=Role.DECODE), arrivals(chance, 20, requests))


def whole(base: TwinConfig, legs: int, chance: random.Random) -> Load:
    """Requests that one instance runs from beginning to end."""
    requests = (
        TwinRequest(
            id=RequestId(f"r{number}"),
            prompt=private(number, PROMPTS.draw(chance)),
            max_tokens=1500,
            stop_after=ANSWERS.draw(chance),
        )
        for number in range(legs)
    )
    return Load(base, arrivals(chance, 10, requests))


def chat(base: TwinConfig, legs: int, chance: random.Random) -> Load:
    """Conversations of six turns; the same 512 tokens before all of them."""
    rows: list[tuple[int, TwinRequest]] = []
    now = 0.0
    for number in range(legs // 6):
        now += chance.expovariate(10 / 6)
        begin = now
        prompt: Prompt = (Segment(1, 512),)
        for turn in range(6):
            prompt = (*prompt, Segment(10_000 + number * 8 + turn, 20 + PROMPTS.draw(chance) // 10))
            answer = ANSWERS.draw(chance)
            name = RequestId(f"r{number}-{turn}")
            rows.append((round(begin * 1e9), TwinRequest(id=name, prompt=prompt, max_tokens=1500, stop_after=answer)))
            prompt = (*prompt, Segment(answer_key(prompt), answer))
            begin += 8 + chance.expovariate(0.1)
    rows.sort(key=lambda row: row[0])
    return Load(replace(base, prefix_caching=True), rows)


LOADS: dict[str, Callable[[TwinConfig, int, random.Random], Load]] = {
    "prefill": prefill,
    "decode": decode,
    "whole": whole,
    "chat": chat,
}


def contents_of(load: Load) -> Callable[[ev.PullBlocks], tuple[int, ...]]:
    """The content of the producer's blocks; made before the clock runs."""
    if not load.config.contents:
        return lambda _pull: ()
    made: dict[str, tuple[int, ...]] = {}
    for _, request in load.arrivals:
        if request.pull is not None:
            text, size = Text(request.prompt, request.seed, load.config.block_size), load.config.block_size
            ends = (min((block + 1) * size, request.pull.tokens) for block in range(len(request.pull.blocks)))
            made[request.id] = tuple(text.digest(block, end) for block, end in enumerate(ends))
    return lambda pull: made[pull.request][-len(pull.remote) :]


def idle_kb(config: TwinConfig, costs: Costs) -> float:
    """Kilobytes of a twin that has started and done nothing."""
    Twin(config, costs).handle(ev.StartEngine(1), 0)  # the parts that all twins share are made once
    tracemalloc.start()
    twins = [Twin(config, costs) for _ in range(20)]
    for twin in twins:
        twin.handle(ev.StartEngine(1), 0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(twins) / 1000


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(LOADS), help="one of the loads")
    parser.add_argument("--settings", choices=["simulation", "mock"], help="one of the settings")
    parser.add_argument("--legs", type=int, default=3000, help="of each load, at least 100 (default 3000)")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and lengths (default 1)")
    parser.add_argument("--json", action="store_true", help="the line of JSON alone on stdout, the table on stderr")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by cProfile")
    arguments = parser.parse_args(words)
    if arguments.legs < 100:
        parser.error(f"--legs {arguments.legs}: too few to measure; give at least 100")
    return arguments


def main(words: list[str]) -> int:
    """Print a table and a line of JSON."""
    arguments = parsed(words)
    say = partial(print, file=sys.stderr if arguments.json else None, flush=True)
    costs = costs_of(model_named("meta-llama/Llama-3.1-8B"), gpu_named("H100-SXM"), profiles=profiles())
    mock = TwinConfig(
        num_blocks=costs.kv_capacity_tokens // 16,
        max_num_batched_tokens=8192,
        max_num_seqs=1024,
        version=Version(async_scheduling=True, pull_after_forward=False),
    )
    settings = {"simulation": replace(mock, contents=False, every_share=False, prefix_caching=False), "mock": mock}
    figures: dict[str, float] = {}
    say(f"{'load':8} {'settings':10} {'µs a leg':>9} {'runs':>7} {'cuts':>7} {'preempted':>9}")
    for name, make in LOADS.items():
        for setting, config in settings.items():
            if (arguments.only or name) != name or (arguments.settings or setting) != setting:
                continue
            load = make(config, arguments.legs, random.Random(arguments.seed))
            driver = Driver(load, costs, contents_of(load))
            if arguments.profile:
                cProfile.runctx("driver.play()", {}, {"driver": driver}, sort="tottime")
                continue
            began = time.process_time()
            driver.play()
            took = (time.process_time() - began) / len(load.arrivals) * 1e6
            figures[f"{name}_{setting}_us"] = round(took, 1)
            runs, cuts, preempted = (driver.said[kind] for kind in (ev.StepRun, ev.Cut, ev.Preempted))
            say(f"{name:8} {setting:10} {took:9.1f} {runs:7} {cuts:7} {preempted:9}")
    if arguments.profile:
        return 0
    figures["idle_kb"] = round(idle_kb(replace(mock, num_blocks=30_000), costs), 1)
    say(f"an idle twin of 30,000 blocks: {figures['idle_kb']} kB")
    targets = {name: limit for name, limit in TARGETS.items() if name in figures}
    print(json.dumps({"bench": "twin", "figures": figures, "targets": targets}))
    return int(any(figures[name] > limit for name, limit in targets.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
