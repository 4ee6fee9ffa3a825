"""The cost of a hand-over for a client, on two real engines: one engine alone, plain, seeded, in turns.

`make bench-handoff ARGS="--part client"` starts `baton up` with the model that ships (no GPU needed) and asks for
streams one at a time. Every prompt is new. Design targets: a seeded first token within 1.05 × one engine's; from
there to the second (TT2T, as `baton load` reports it) a step and what a plain hand-over adds to a first token.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench import intervals
from bench.published import Table, machine, note_of, publish, result, say, show, target
from bench.real_cluster import up

LENGTHS = (250, 1000, 1900)
TARGET_LENGTHS = (1000, 1900)
OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Heard:
    """One stream: milliseconds from sending to its first token and to its second, and between later tokens."""

    first_ms: float
    second_ms: float
    step_ms: float
    text: str


def events(url: str, body: dict[str, Any]) -> tuple[list[float], str]:
    """One stream, read event by event: milliseconds from sending to each of them, and the text of all."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=300)
    connection.connect()
    payload = json.dumps(body).encode()
    begun = time.perf_counter()
    connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    times, text = [], ""
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        times.append((time.perf_counter() - begun) * 1e3)
        text += json.loads(line[6:])["choices"][0]["text"]
    connection.close()
    return times, text


def listen(url: str, body: dict[str, Any]) -> Heard:
    """One stream of which at least two events come apart."""
    times, text = events(url, body)
    # A late reader finds several tokens in one event: steps are counted by events, so the median is taken.
    return Heard(times[0], times[1], statistics.median(b - a for a, b in itertools.pairwise(times)), text)


def prompt(tokens: int, chance: random.Random) -> list[int]:
    """As many bytes of letters, different from its first block on."""
    return [chance.randrange(97, 123) for _ in range(tokens)]


WAYS = ("alone", "plain", "seeded")


def hear(said: dict[str, Any], length: int, rounds: int, chance: random.Random) -> dict[str, list[Heard]]:
    """The three ways in turns, each with prompts of its own; texts are compared with one engine's."""
    urls = {instance["role"]: instance["url"] for instance in said["instances"]}
    heard: dict[str, list[Heard]] = {way: [] for way in WAYS}
    for number in range(-2, rounds):  # two for warmth: first handshake, first shapes
        for way in WAYS:
            body = {"model": said["model"], "prompt": prompt(length, chance), "max_tokens": OUTPUT_TOKENS,
                    "temperature": 0, "ignore_eos": True, "stream": True}  # fmt: skip
            if way == "plain":
                body["logprobs"] = 0  # one of the rows of docs/exactness.md in which D makes the first token
            url = urls["prefill"] if way == "alone" else said["endpoint"]
            once = listen(url, body)
            if way != "alone" and once.text != listen(urls["prefill"], body).text:
                raise SystemExit(f"bench-handoff: another text than one engine's, {way}, {length} tokens")
            if number >= 0:
                heard[way].append(once)
        time.sleep(0.05)
    return heard


def compared(heard: dict[str, list[Heard]]) -> dict[str, Any]:
    """Medians over the rounds, each ratio within its own round. A seeded first token is compared with one engine's. The
    time from there to the second token is compared with a step and what a plain hand-over adds (a ratio of medians: the
    addition is a small difference of large times, too small to divide by in each round). The second token is compared
    with plain's. `intervals` has those of the two ratios that each round has.
    """
    rounds = list(zip(*(heard[way] for way in WAYS), strict=True))
    middle = statistics.median
    tt2t_ms = middle(seeded.second_ms - seeded.first_ms for _, _, seeded in rounds)
    added_ms = middle(plain.first_ms - alone.first_ms for alone, plain, _ in rounds)
    by_round = {
        "seeded_first_over_alone": [seeded.first_ms / alone.first_ms for alone, _, seeded in rounds],
        "seeded_second_over_plain": [seeded.second_ms / plain.second_ms for _, plain, seeded in rounds],
    }
    return {
        **{name: middle(ratios) for name, ratios in by_round.items()},
        "intervals": {name: intervals.middle(ratios) for name, ratios in by_round.items()},
        "seeded_tt2t_ms": tt2t_ms,
        "plain_adds_ms": added_ms,
        "seeded_tt2t_over_allowed": tt2t_ms / (middle(alone.step_ms for alone, _, _ in rounds) + added_ms),
    }


def tables(figures: dict[str, Any], rounds: int) -> list[Table]:
    """Times, then ratios."""
    parts = ("first_ms", "second_ms", "step_ms")
    rows = [
        [length, way, *(f"{mine[way][part]:.1f}" for part in parts)] for length, mine in figures.items() for way in WAYS
    ]
    ratios = [
        [length, *(intervals.times(mine["intervals"][name]) for name in ("seeded_first_over_alone",
                                                                         "seeded_second_over_plain")),
         f"{mine['seeded_tt2t_over_allowed']:.2f}"]
        for length, mine in figures.items()
    ]  # fmt: skip
    return [
        Table(f"Milliseconds, medians of {rounds} rounds",
              ["prompt tokens", "way", "first token", "second token", "step"], rows),
        Table("Ratios, medians of the rounds' (intervals by order statistics); the last one is of medians",
              ["prompt tokens", "seeded first token / one engine's", "seeded second token / plain's",
               "TT2T / a step and what plain adds"], ratios),
    ]  # fmt: skip


def measure(*, quick: bool = False, publishes: bool = False) -> None:
    """Measure, print, publish."""
    facts, chance = machine(), random.Random(7)
    figures: dict[str, Any] = {}
    rounds = 8 if quick else 40
    say("starting two engines")
    with up(["--prefill", "1", "--decode", "1", "--policy", "least_load"], "bench-handoff") as said:
        for length in LENGTHS:
            say(f"{length} tokens, {rounds} rounds")
            heard = hear(said, length, rounds, chance)
            middle = {
                way: {
                    name: statistics.median(getattr(each, name) for each in all_of)
                    for name in ("first_ms", "second_ms", "step_ms")
                }
                for way, all_of in heard.items()
            }
            figures[str(length)] = {**middle, **compared(heard)}
    targets = {}
    for length in TARGET_LENGTHS:
        mine = figures[str(length)]
        targets[f"ttft_seeded_over_alone_{length}"] = target(mine["seeded_first_over_alone"], 1.05)
        targets[f"tt2t_seeded_over_step_and_plain_{length}"] = target(mine["seeded_tt2t_over_allowed"], 1.0)
    made = tables(figures, rounds)
    show(made)
    told = result("handoff", figures, targets)
    if publishes:
        note = note_of(facts, "vLLM 0.32 on CPU, the model that ships, both engines on one machine")
        publish(told, made, facts, note)
