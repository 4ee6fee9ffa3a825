"""A thousand twins at once: CPU microseconds of a handed-off request, and memory, with nothing around the twins.

    python -m bench.twin_fleet [--instances 1000] [--requests 60000] [--seed 1] [--json]

Half of the instances prefill, the others decode. Each request goes to the next instance of each half in turn, its
blocks arrive 5 ms after they were ordered, and then the hold is given back. Each prefill instance gets 12 requests a
second, as in `bench.twin`, which also has the lengths and the settings. The kernel is one heap of times, so the figure
is about the least that a simulator can take: its router and its statistics come on top. Requests are made as they come;
exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from bench.twin import ANSWERS, PROMPTS, PULL_NS, private
from cluster.ids import InstanceId, RequestId, TransferId
from cluster.instance import Role
from costs.cost import costs_of
from costs.hardware import gpu_named
from costs.shipped import model_named, profiles
from engine.twin import events as ev
from engine.twin.config import StepCosts, TwinConfig, Version
from engine.twin.machine import Twin
from engine.twin.request import TwinRequest

RATE = 12.0
"""Requests a second for each prefill instance: about half busy."""
TARGETS = {"fleet_us_per_request": 400.0, "peak_rss_mb": 1500.0}
"""A million requests in ten minutes are 600 µs each; a router and statistics need the rest."""
TICK = ev.Tick()


class Fleet:
    """Twins, prefill first, and one heap of what is to come: (time, order, instance, event, or None for a wakeup)."""

    def __init__(self, config: TwinConfig, costs: StepCosts, instances: int, requests: int, seed: int) -> None:
        self.pairs = instances // 2
        roles = [Role.PREFILL] * self.pairs + [Role.DECODE] * self.pairs
        self.twins = [Twin(replace(config, role=role), costs) for role in roles]
        self.finished = self.arrived = 0
        self.tokens = 0
        self._requests = requests
        self._chance = random.Random(seed)
        self._answers: dict[RequestId, tuple[int, int]] = {}
        self._armed: list[int | None] = [None] * len(self.twins)
        self._heap: list[tuple[int, int, int, ev.Event | None]] = []
        self._order = 0

    def play(self) -> None:
        """Run until every request is over."""
        for instance in range(len(self.twins)):
            self._tell(instance, ev.StartEngine(1), 0)
        self._arrive(0)
        while self.finished < self._requests:
            now, _, instance, event = heapq.heappop(self._heap)
            if event is not None:
                self._tell(instance, event, now)
                if isinstance(event, ev.Submit) and event.request.hold is not None:
                    self._arrive(now)
            elif self._armed[instance] == now:
                self._armed[instance] = None
                self._tell(instance, TICK, now)

    def _at(self, when: int, instance: int, event: ev.Event | None) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, instance, event))

    def _arrive(self, now: int) -> None:
        if self.arrived == self._requests:
            return
        when = now + round(self._chance.expovariate(RATE * self.pairs) * 1e9)
        number, self.arrived = self.arrived, self.arrived + 1
        name, tokens, answer = RequestId(f"r{number}"), PROMPTS.draw(self._chance), ANSWERS.draw(self._chance)
        self._answers[name] = (number, answer)
        self.tokens += tokens + answer
        hold = TransferId(name, 1, 1)
        request = TwinRequest(id=name, prompt=private(number, tokens), max_tokens=1, hold=hold)
        self._at(when, number % self.pairs, ev.Submit(request))

    def _tell(self, instance: int, event: ev.Event, now: int) -> None:
        twin = self.twins[instance]
        self._take(instance, twin.handle(event, now), now)
        wakeup = twin.next_wakeup()
        if wakeup is not None and wakeup != self._armed[instance]:
            self._at(wakeup, instance, None)
        self._armed[instance] = wakeup

    def _take(self, instance: int, effects: Iterable[ev.Effect], now: int) -> None:
        for effect in effects:
            if isinstance(effect, ev.RequestFinished):
                if effect.hold is None:
                    self.finished += 1
                else:
                    self._hand_over(instance, effect.hold, now)
            elif isinstance(effect, ev.PullBlocks):
                assert effect.source.slot is not None
                self._at(effect.at_ns + PULL_NS, instance, ev.KvArrived(effect.request, (), effect.source.slot.mark))
            elif isinstance(effect, ev.GiveBack):
                by = InstanceId(str(instance))
                self._at(now, int(effect.source.producer), ev.released(effect.source, by))

    def _hand_over(self, instance: int, hold: ev.Hold, now: int) -> None:
        name = hold.transfer.request
        number, answer = self._answers.pop(name)
        source = hold.source(InstanceId(str(instance)))
        prompt = private(number, hold.tokens)
        request = TwinRequest(id=name, prompt=prompt, max_tokens=1500, stop_after=answer, pull=source)
        self._at(now, self.pairs + number % self.pairs, ev.Submit(request))


def main(words: list[str]) -> int:
    """Print the figures, then a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000, help="at least 2 (default 1000)")
    parser.add_argument("--requests", type=int, default=60_000, help="at least 100 (default 60000)")
    parser.add_argument("--seed", type=int, default=1, help="of arrivals and lengths (default 1)")
    parser.add_argument("--json", action="store_true", help="the line of JSON alone on stdout, the rest on stderr")
    arguments = parser.parse_args(words)
    if arguments.instances < 2 or arguments.requests < 100:
        parser.error("--instances must be at least 2 and --requests at least 100")
    say = partial(print, file=sys.stderr if arguments.json else None, flush=True)
    costs = costs_of(model_named("meta-llama/Llama-3.1-8B"), gpu_named("H100-SXM"), profiles=profiles())
    config = TwinConfig(
        num_blocks=costs.kv_capacity_tokens // 16,
        max_num_batched_tokens=8192,
        max_num_seqs=1024,
        contents=False,
        every_share=False,
        prefix_caching=False,
        version=Version(async_scheduling=True, pull_after_forward=False),
    )
    fleet = Fleet(config, costs, arguments.instances, arguments.requests, arguments.seed)
    began = time.process_time()
    fleet.play()
    took_us = (time.process_time() - began) / arguments.requests * 1e6
    rss_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    say(f"{arguments.instances} twins, {arguments.requests} requests, {fleet.tokens // arguments.requests} tokens each")
    say(f"{took_us:.1f} µs of CPU a request (both legs, the kernel, making the request); {rss_mb:.0f} MB at most")
    say(f"a million requests: {took_us / 60:.1f} min")
    figures = {"fleet_us_per_request": round(took_us, 1), "peak_rss_mb": round(rss_mb, 1)}
    print(json.dumps({"bench": "twin_fleet", "figures": figures, "targets": TARGETS}))
    return int(any(figures[name] > limit for name, limit in TARGETS.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
