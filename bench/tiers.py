"""Prompts that a KV cache has dropped: back from a tier, from another engine's tier; and data parallel ranks' caches.

    make bench-tiers                                   about an hour on two cores
    make bench-tiers ARGS=--quick                      some seven minutes: one model, two rounds, one repeat
    make bench-tiers ARGS="--quick --only evicted"     two minutes
    make bench-tiers ARGS=--publish                    writes docs/ from a whole run
    make bench-tiers ARGS="--only talks --publish"     writes one part; the others stay as they were published

Real vLLM engines, in three parts. `evicted`: four other prompts evict a prompt of 1,800 tokens. It comes again: to
the engine that has it in a tier, and to another engine, which pulls it. Its time to the first token is compared with
its cold time in the same round. `talks`: conversations that need three times the KV caches, with tiers and a router
that knows of the tiers, with tiers and a router that does not, and without tiers, in turns. `ranks`: conversations on
an engine of two data parallel ranks, and on two engines, in turns. Answers of the first two parts are compared: with
one engine's, and with the other setups'.

Engines, rounds and conversations are those of the live tests (tests/support/tiered.py, tier_talks.py, rank_talks.py).
It goes on where it stopped: steps are kept in .bench/tiers.json, and used while sources and machine are the same
(`--fresh` forgets them).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support import cluster as clusters
from support.cluster import within
from support.rank_talks import PLACES, found_with
from support.tier_talks import heard_with
from support.tiered import tiered

from bench.processes import ROOT
from bench.published import DOCS, machine, note_of, publish, result, save, say, show
from bench.sources import below, digest_of, elsewhere
from bench.tiers_tables import KNOWN, NONE, UNKNOWN, figures_of, merged, note, tables, targets

PARTS: Final = ("evicted", "talks", "ranks")
KINDS: Final = ("host", "disk")
START_S: Final = 600.0
"""Seconds for the start of a cluster on a machine that does other things, too."""
SETTLED_S: Final = 10.0
PUBLISHED: Final = DOCS / "benchmarks" / "tiers.json"
SOURCES: Final = (
    "router", "engine", "decode", "prefill", "kvtransfer", "cluster", "baton", "costs", "bench/tiers.py",
    "bench/pair.py", *(f"tests/support/{name}.py" for name in (
        "tiered", "tier_talks", "rank_talks", "talks", "tiers_unknown", "random_models", "cluster", "engine_pair")),
)  # fmt: skip
"""Sources of what runs: kept steps of other sources are not used."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run."""

    models: tuple[str, ...]
    rounds: int
    """Rounds at each of a pair's two engines. One more comes before them, and does not count."""
    setups: tuple[str, ...]
    repeats: int
    """Of conversations, and of ranks beside instances. Intervals need six."""


DEFAULT: Final = Scale(("larger", "tiny"), 10, (KNOWN, UNKNOWN, NONE), 6)
QUICK: Final = Scale(("tiny",), 2, (KNOWN, UNKNOWN), 1)


@dataclass(frozen=True, slots=True)
class Step:
    """What one start of engines measures."""

    part: str
    names: tuple[str, ...]
    repeat: int = 0

    @property
    def key(self) -> str:
        """Identifies the step in the kept file."""
        return " / ".join([self.part, *self.names, str(self.repeat)])


def steps(scale: Scale, parts: Sequence[str]) -> Iterator[Step]:
    """All steps in their order: setups take turns, and each repeat begins with the next of them."""
    if "evicted" in parts:
        yield from (Step("evicted", (model, kind)) for model in scale.models for kind in KINDS)
    for part, names in (("talks", scale.setups), ("ranks", tuple(PLACES))):
        for repeat in range(scale.repeats if part in parts else 0):
            turn = repeat % len(names)
            yield from (Step(part, (name,), repeat) for name in (*names[turn:], *names[:turn]))


def evicted(folder: Path, model: str, kind: str, rounds: int) -> dict[str, Any]:
    """Seconds of each round: `back` from the engine's own tier, `peer` from the other engine's tier, `peer_cache` from
    the other engine's KV cache (measured with one kind of tier only: it does not matter there).
    """
    told: dict[str, Any] = {"back": [], "peer": [], "peer_cache": []}
    with tiered(folder, kind, model) as engines:
        for turn in (rounds, *range(rounds)):  # the first one is for warmth: first handshakes, first shapes
            seen: dict[str, list[Any]] = {
                "back": [engines.evicted(name, turn) for name in "pd"],
                "peer": [engines.pulled(way, turn) for way in ("pd", "dp")],
                "peer_cache": [engines.pulled(way, turn, evicts=False) for way in ("pd", "dp") if kind == KINDS[0]],
            }
            if turn < rounds:
                for name, of in seen.items():
                    told[name] += [[round(each, 5) for each in astuple(one)] for one in of]
                say(f"  round {turn + 1} of {rounds}")
        within(SETTLED_S, engines.nothing_is_held)
        told["gb_s"] = [dict(engines.speeds(name)[0].gb_s) for name in "pd"]
    return told


def talk(folder: Path, setup: str, repeat: int) -> dict[str, Any]:
    """What clients heard in one repeat; `said` is a digest of all answers."""
    heard, _ = heard_with(folder / "talks", setup, seed=7 + repeat)
    return {
        "first_ms": round(1000 * mean(heard.first_s), 2),
        "computed": heard.computed,
        "prompts": heard.prompts,
        "said": hashlib.sha256(json.dumps(heard.said).encode()).hexdigest()[:16],
    }


def ranked(folder: Path, places: str, repeat: int) -> dict[str, Any]:
    """Prefixes found in one repeat."""
    found = found_with(folder / "ranks", places, seed=21 + repeat)
    return {"prompt": found.prompt, "cached": found.cached, "by_place": found.by_place}


def taken(step: Step, scale: Scale) -> dict[str, Any]:
    """The result of one step, with engines of its own."""
    with tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        if step.part == "evicted":
            model, kind = step.names
            return evicted(folder, model, kind, scale.rounds)
        (name,) = step.names
        with patch.object(clusters, "START_S", START_S):
            return (talk if step.part == "talks" else ranked)(folder, name, step.repeat)


def resumed(path: Path, sources: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The kept result to continue; one without steps, if there is none of these sources and this machine."""
    begun: dict[str, Any] = {"sources": sources, "machine": dict(facts), "steps": {}}
    if not path.exists():
        return begun
    found: dict[str, Any] = json.loads(path.read_text())
    why = elsewhere(found, sources, facts)
    if not why:
        return found
    say(f"bench-tiers: the {len(found['steps'])} kept steps are of {why}: begins anew")
    return begun


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line; None: this process's own."""
    parser = argparse.ArgumentParser(
        prog="make bench-tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small run, kept apart from the others")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be given twice (default: all)")
    parser.add_argument("--fresh", action="store_true", help="forget kept steps")
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks.md and its JSON")
    args = parser.parse_args(words)
    if args.publish and args.quick:
        parser.error("only whole parts are published: leave out --quick")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, publish."""
    args = parsed(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the engines end with it
    facts, scale, parts = machine(), QUICK if args.quick else DEFAULT, args.only or PARTS
    path = ROOT / ".bench" / f"tiers{'-quick' if args.quick else ''}.json"
    path.parent.mkdir(exist_ok=True)
    if args.fresh:
        path.unlink(missing_ok=True)
    found = resumed(path, digest_of(below(SOURCES, ROOT), ROOT), facts)
    wanted = list(steps(scale, parts))
    for number, step in enumerate(wanted, 1):
        if step.key not in found["steps"]:
            say(f"{number} of {len(wanted)}: {step.key}")
            found["steps"][step.key] = taken(step, scale)
            save(path, json.dumps(found, indent=1))
    figures = figures_of({step: found["steps"][step.key] for step in wanted})
    facts = found["machine"]  # as it was when the steps began
    if args.publish:
        before = json.loads(PUBLISHED.read_text())
        figures = merged(figures, parts, facts, before)
    made = tables(figures)
    show(made)
    told = result("tiers", figures, targets(figures))
    if args.publish:
        publish(told, made, facts, note_of(facts, note(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
