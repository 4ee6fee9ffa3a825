"""Early legs or pulls: what a router chooses on two real engines, beside the same router made to send all legs one way.

    make bench-handoff ARGS="--part router"              about ten minutes

`baton up` starts one P and one D with the model that ships. Routers of `bench.pairs_router` serve them by turns, one at
a time: one that sends all decode legs early, one that pulls, and one that chooses as it starts
(`router/predict/early_cost.py`). Streams with prompts of 1,000 tokens are sent one after the other; the same while P
computes other prompts without a pause; and in a loop of eight clients. For each of these ways a choosing router is
started. It alone gets requests until it has compared often enough for a verdict. The turns that follow contain its
tries of the other way, which are its price.

`second` is the time from sending to the stream's second token, which is D's own, as P has told the first: what the
router compares. `first` is the time to the first token. A figure of a turn is the median of its requests; figures of
different routers are compared turn by turn (`bench.intervals`).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton import compiled
from bench.connectors_fleet import BUSY_TOKENS, EIGHT, without_pause
from bench.handoff_client import events, prompt
from bench.intervals import middle, times
from bench.pairs_router import FORCED
from bench.published import Table, result, say, show
from bench.real_cluster import up
from bench.router_front import PAIRS_ROUTER, ROUTER, Front, registered, started

TOKENS: Final = 1000
ROUTERS: Final = (*FORCED, "choice")
WAYS: Final = {"alone": "one at a time", "busy": "one at a time, P busy", "loop": "eight in a loop"}
TURNS: Final = 12
"""Turns of each router, if `--turns` says nothing."""
IN_TURN: Final = 6
"""Requests of a turn, one at a time."""
IN_LOOP: Final = 3
"""Requests of each of the eight clients in a turn of the loop."""
LEARNS: Final = 320
"""A choosing router gets so many requests before the turns, if it has no verdict earlier."""
OUTPUT: Final = 4
"""Tokens of an answer."""
PROVEN_S: Final = 300.0

COUNTS: Final = {
    "early": ('baton_early_legs_total{result="used"}', 'baton_early_legs_total{result="answered first"}'),
    "compared": ('baton_early_legs_forgone_total{why="compared"}',),
    "dearer": ('baton_early_legs_forgone_total{why="dearer"}',),
}
"""What became of decode legs, as a router counts them: sent early; pulled to compare; pulled as that costs less."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One stream: milliseconds from sending to its first token and to its second."""

    first_ms: float
    second_ms: float
    text: str


class Clients:
    """Sends streams to routers, and other prompts to P."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        """`said`: the ready line of `baton up`."""
        self.model = str(said["model"])
        self.p = next(str(each["url"]) for each in said["instances"] if each["role"] == "prefill")
        self._chance = random.Random(11)

    def stream(self, url: str, tokens: int = TOKENS, output: int = OUTPUT) -> Heard:
        """One stream with a new prompt."""
        body = {"model": self.model, "prompt": prompt(tokens, self._chance), "max_tokens": output, "temperature": 0,
                "ignore_eos": True, "stream": True}  # fmt: skip
        times, text = events(url, body)
        # On a busy machine the first two tokens may come in one event.
        return Heard(times[0], times[min(1, len(times) - 1)], text)

    def other_prompts(self) -> AbstractContextManager[None]:
        """Meanwhile P computes other prompts, of which no router knows."""
        return without_pause(lambda: _nothing(self.stream(self.p, BUSY_TOKENS, 2)))

    def send(self, front: Front, way: str, count: int, enough: Callable[[], bool] = lambda: False) -> list[Heard]:
        """So many requests to a router, or fewer: each eighth one looks whether there are enough."""
        over = threading.Event()

        def ask(number: int) -> Heard | None:
            if number % EIGHT == 0 and enough():
                over.set()
            return None if over.is_set() else self.stream(front.endpoint)

        with (
            ThreadPoolExecutor(EIGHT if way == "loop" else 1) as pool,
            self.other_prompts() if way == "busy" else nullcontext(),
        ):
            return [heard for heard in pool.map(ask, range(count)) if heard is not None]

    def turn(self, front: Front, way: str) -> list[Heard]:
        """One turn with a router."""
        return self.send(front, way, EIGHT * IN_LOOP if way == "loop" else IN_TURN)


def _nothing(_: object) -> None:
    """The result of an act that is done for its load alone."""


def counts(front: Front) -> dict[str, int]:
    """`COUNTS` so far."""
    return {name: round(sum(map(front.metric, metrics))) for name, metrics in COUNTS.items()}


def extra_ms(front: Front) -> dict[str, float]:
    """By how many milliseconds early legs took longer, as the router has found, by whether P had other requests."""
    found = {}
    for line in front.metrics().splitlines():
        if line.startswith("baton_early_leg_extra_seconds{"):
            queued = "queued" if 'queued="true"' in line else "not queued"
            found[queued] = round(float(line.rpartition(" ")[2]) * 1000.0, 2)
    return found


def learn(clients: Clients, front: Front, way: str, most: int) -> dict[str, Any]:
    """Send a choosing router requests until it has a verdict about this way; how its legs went."""
    place = "queued" if way == "loop" else "not queued"
    sent = len(clients.send(front, way, most, lambda: place in extra_ms(front)))
    return {"sent": sent, "legs": counts(front), "extra_ms": extra_ms(front)}


def measure_way(clients: Clients, fronts: Mapping[str, Front], way: str, turns: int, learns: int) -> dict[str, Any]:
    """Learn, then turns; each turn begins with the next router."""
    figures: dict[str, Any] = {"learning": learn(clients, fronts["choice"], way, learns)}
    say(f"{WAYS[way]}: {figures['learning']}")
    heard: dict[str, list[list[Heard]]] = {name: [] for name in ROUTERS}
    before = counts(fronts["choice"])
    for number in range(turns):
        for at in range(len(ROUTERS)):
            name = ROUTERS[(number + at) % len(ROUTERS)]
            heard[name].append(clients.turn(fronts[name], way))
    after = counts(fronts["choice"])
    figures["legs"] = {name: count - before[name] for name, count in after.items()}
    figures["extra_ms"] = extra_ms(fronts["choice"])
    for part in ("first", "second"):
        figures[part] = {name: _by_turn(all_of, part) for name, all_of in heard.items()}
    say(json.dumps(figures))
    return figures


def _by_turn(turns: Sequence[Sequence[Heard]], part: str) -> list[float]:
    return [round(statistics.median(getattr(each, f"{part}_ms") for each in turn), 3) for turn in turns]


def over(figures: Mapping[str, Any], part: str, name: str, other: str) -> dict[str, Any] | None:
    """One router's times over another's, turn by turn."""
    return middle([one / two for one, two in zip(figures[part][name], figures[part][other], strict=True)])


def better(figures: Mapping[str, Any], part: str) -> str:
    """The forced way that took less time, turn by turn."""
    ratio = over(figures, part, *FORCED)
    return FORCED[0] if ratio is None or ratio["median"] <= 1 else FORCED[1]


def tables(figures: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Made from the figures alone."""
    rows, legs = [], []
    for way, mine in figures.items():
        for part in ("first", "second"):
            best = better(mine, part)
            medians = (f"{statistics.median(mine[part][name]):.0f}" for name in ROUTERS)
            rows.append([WAYS[way], part, *medians, times(over(mine, part, *FORCED)),
                         f"{times(over(mine, part, 'choice', best))} {best}"])  # fmt: skip
        for said, seen in (("learning", mine["learning"]), ("turns", mine)):
            found = (f"{place}: {extra:+.1f}" for place, extra in seen["extra_ms"].items())
            legs.append([WAYS[way], said, *(str(seen["legs"][name]) for name in COUNTS), ", ".join(found)])
    return [
        Table(f"Milliseconds from sending to the first and the second token, prompts of {TOKENS} tokens: medians of "
              "turns; ratios are medians over turns (intervals by order statistics)",
              ["way", "token", *ROUTERS, "early / pull", "choice / the better"], rows),
        Table("Decode legs of the choosing router, and by how many ms it found early legs to take longer",
              ["way", "phase", "early", "pulled, to compare", "pulled, early is dearer", "early takes, ms"], legs),
    ]  # fmt: skip


def measure(*, turns: int = TURNS, learns: int = LEARNS, ways: Sequence[str] = tuple(WAYS)) -> None:
    """Measure and print."""
    say("starting two engines")
    figures = {}
    with up(["--prefill", "1", "--decode", "1", "--policy", "least_load"], "bench-handoff") as said:
        clients, state = Clients(said), Path(said["state"])
        with ExitStack() as forced:
            fronts = {name: forced.enter_context(_router(state, name)) for name in FORCED}
            for way in ways:
                with _router(state, "choice") as choice:
                    for front in (*fronts.values(), choice):
                        clients.send(front, "loop", 3 * EIGHT)  # predictions need some twenty timed prompts
                    figures[way] = measure_way(clients, {**fronts, "choice": choice}, way, turns, learns)
    show(tables(figures))
    result("connectors-router", figures, {})


@contextmanager
def _router(state: Path, name: str) -> Iterator[Front]:
    """One of `ROUTERS`, once it has proven the pair."""
    words = [*PAIRS_ROUTER, *([name] if name in FORCED else []), *ROUTER, "--policy", "workload", *registered(state)]
    with started(words, {**os.environ, compiled.OFF: "0"}) as front:
        _wait(lambda: front.proven(1))
        yield front


def _wait(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PROVEN_S
    while not ready():
        if time.monotonic() > end:
            raise SystemExit("bench-handoff: a router has not proven the pair")
        time.sleep(0.2)
