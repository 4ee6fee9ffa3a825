"""Figures, targets and tables of `make bench-tiers`, from what its steps have measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final, Protocol

from bench.intervals import middle, times
from bench.published import Table, target

KNOWN: Final = "tiers, known to the router"
UNKNOWN: Final = "tiers, unknown to the router"
NONE: Final = "no tiers"
"""Setups of conversations (tests/support/tier_talks.py)."""
FROM_TIER: Final = 0.15
FROM_PEER: Final = 0.25
"""Most of the cold time to the first token that a prompt may take if a tier or another engine has it."""
COMPUTED: Final = 0.5
"""With tiers at most this part of what is computed without."""
HIT_RATES_DIFFER: Final = 0.02
MODELS: Final = {"tiny": "the model that ships, 2 KiB of KV a token", "larger": "random, 8 layers of 384, 8 KiB"}


class Measured(Protocol):
    """A step of the benchmark."""

    part: str
    names: tuple[str, ...]
    repeat: int


def figures_of(found: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures by part, from the results by step.

    Raises:
        SystemExit: conversations of one repeat have other answers in another setup.
    """
    figures: dict[str, Any] = {"evicted": {}, "talks": {}, "ranks": {}}
    for step, told in found.items():
        if step.part == "evicted":
            model, kind = step.names
            figures["evicted"].setdefault(model, {})[kind] = _of_pair(told)
        else:
            figures[step.part].setdefault(step.names[0], {})[str(step.repeat)] = dict(told)
    if figures["talks"]:
        _alike(figures["talks"])
        figures["talks_ratios"] = dict(_ratios_of(figures["talks"]))
    if figures["ranks"]:
        rates = {name: [_rate(each) for each in _in_order(of)] for name, of in figures["ranks"].items()}
        off = [ranks - instances for ranks, instances in zip(rates["ranks"], rates["instances"], strict=True)]
        figures["hit_rates"] = {**{name: median(of) for name, of in rates.items()}, "off": off}
    return figures


def _of_pair(told: Mapping[str, Any]) -> dict[str, Any]:
    """Of the rounds of two engines: medians in milliseconds, and ratios within each round."""
    back, peer = told["back"], told["peer"]
    found = {
        "cold_ms": _ms(each[0] for each in back),
        "back_ms": _ms(each[1] for each in back),
        "back_over_cold": middle([tier / cold for cold, tier, _ in back]),
        "cached_over_cold": middle([cached / cold for cold, _, cached in back]),
        "source_ms": _ms(each[1] for each in peer),
        "peer_ms": _ms(each[2] for each in peer),
        "peer_over_cold": middle([both / cold for cold, _, both in peer]),
        "gb_s": told["gb_s"],
    }
    if told["peer_cache"]:
        found["peer_cache_over_cold"] = middle([both / cold for cold, _, both in told["peer_cache"]])
    return found


def _ms(seconds: Iterator[float]) -> float:
    return round(1000 * median(seconds), 2)


def _in_order(by_repeat: Mapping[str, Any]) -> list[Any]:
    return [by_repeat[at] for at in sorted(by_repeat, key=int)]


def _rate(told: Mapping[str, Any]) -> float:
    return float(told["cached"] / told["prompt"])


def _alike(talks: Mapping[str, Any]) -> None:
    for said in zip(*([each["said"] for each in _in_order(of)] for of in talks.values()), strict=True):
        if len(set(said)) > 1:
            raise SystemExit(f"bench-tiers: other answers in another setup: {dict(zip(talks, said, strict=True))}")


def _ratios_of(talks: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a router that knows of the tiers has, over each other setup, repeat by repeat."""
    for name, of in talks.items():
        if name != KNOWN:
            pairs = list(zip(_in_order(talks[KNOWN]), _in_order(of), strict=True))
            yield (
                name,
                {
                    what: middle([known[what] / other[what] for known, other in pairs])
                    for what in ("computed", "first_ms")
                },
            )


def targets(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What was aimed at."""
    found = {}
    for model, kinds in figures["evicted"].items():
        for kind, mine in kinds.items():
            found[f"{kind}_{model}"] = target(mine["back_over_cold"]["median"], FROM_TIER)
            found[f"peer_{kind}_{model}"] = target(mine["peer_over_cold"]["median"], FROM_PEER)
            if "peer_cache_over_cold" in mine:
                found[f"peer_cache_{model}"] = target(mine["peer_cache_over_cold"]["median"], FROM_PEER)
    ratios = figures.get("talks_ratios", {})
    if UNKNOWN in ratios:
        for what in ("computed", "first_ms"):
            found[f"talks_{what}_over_unknown"] = target(ratios[UNKNOWN][what]["median"], 1.0)
    if NONE in ratios:
        found["talks_computed_over_no_tiers"] = target(ratios[NONE]["computed"]["median"], COMPUTED)
    if rates := figures.get("hit_rates"):
        found["hit_rate_of_ranks_off_instances"] = target(max(map(abs, rates["off"])), HIT_RATES_DIFFER, digits=4)
    return found


OF_PART: Final = {"evicted": ("evicted",), "talks": ("talks", "talks_ratios"), "ranks": ("ranks", "hit_rates")}
"""By part: the names of its figures."""
NAMES: Final = {"evicted": "evicted prompts", "talks": "conversations", "ranks": "ranks"}


def merged(
    figures: Mapping[str, Any], parts: Sequence[str], facts: Mapping[str, Any], published: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of these parts, and of the others those that are published. `made` says when and where each part was
    measured. `facts`: this run's machine; `published`: what docs/benchmarks has.
    """
    before, origin = published["figures"], published["machine"]
    dates = before.get("made", dict.fromkeys(OF_PART, f"{origin['date']}, {origin['cpu']}"))
    return {
        **{name: (figures if part in parts else before)[name] for part, names in OF_PART.items() for name in names},
        "made": {**dates, **dict.fromkeys(parts, f"{facts['date']}, {facts['cpu']}")},
    }


def note(figures: Mapping[str, Any]) -> str:
    """What the figures rest on."""
    rounds = min(mine["back_over_cold"]["repeats"] for kinds in figures["evicted"].values() for mine in kinds.values())
    repeats = min(len(of) for of in figures["talks"].values())
    said = f"vLLM 0.32 on CPU, all engines on one machine; {rounds} rounds of each kind, {repeats} repeats"
    parts = [f"{NAMES[part]} of {when}" for part, when in figures.get("made", {}).items()]
    return "; ".join([said, *parts])


def tables(figures: Mapping[str, Any]) -> list[Table]:
    """The tables of the parts that were measured."""
    made = [*_of_evicted(figures["evicted"])] if figures["evicted"] else []
    if figures["talks"]:
        made.append(_of_talks(figures))
    if figures["ranks"]:
        made.append(_of_ranks(figures))
    return made


def _of_evicted(evicted: Mapping[str, Any]) -> Iterator[Table]:
    rows = [
        [MODELS[model], f"{kinds['host']['cold_ms']:.0f} ms", *(times(kinds[kind]["back_over_cold"]) for kind in kinds),
         times(kinds["host"]["cached_over_cold"])]
        for model, kinds in evicted.items()
    ]  # fmt: skip
    yield Table(
        "An evicted prompt of 1,800 tokens: its first token over its cold time, medians of the rounds' (intervals)",
        ["model", "cold", "from host memory", "from disk", "from the KV cache"],
        rows,
    )
    rows = [
        [MODELS[model], *(times(kinds[kind]["peer_over_cold"]) for kind in kinds),
         times(kinds["host"].get("peer_cache_over_cold")),
         ", ".join(f"{kinds[kind]['source_ms']:.0f} of {kinds[kind]['peer_ms']:.0f}" for kind in kinds)]
        for model, kinds in evicted.items()
    ]  # fmt: skip
    yield Table(
        "The same prompt pulled from another engine: both legs over the cold time, medians of the rounds' (intervals)",
        ["model", "from its host memory", "from its disk", "from its KV cache", "ms of the source leg, host and disk"],
        rows,
    )


def _of_talks(figures: Mapping[str, Any]) -> Table:
    rows = []
    for name, of in figures["talks"].items():
        mine, ratio = _in_order(of), figures["talks_ratios"].get(name, {})
        rows.append([
            name,
            f"{median(each['computed'] for each in mine):,.0f} of {median(each['prompts'] for each in mine):,.0f}",
            f"{median(each['first_ms'] for each in mine):.0f} ms",
            times(ratio.get("computed")),
            times(ratio.get("first_ms")),
        ])  # fmt: skip
    columns = ["conversations of three times the KV caches", "prompt tokens computed", "first token, mean",
               "tokens: known over this", "first token: known over this"]  # fmt: skip
    return Table("What routers know of tiers, medians of the repeats", columns, rows)


def _of_ranks(figures: Mapping[str, Any]) -> Table:
    found = figures["hit_rates"]
    rows = [[name, f"{100 * found[name]:.1f}%"] for name in figures["ranks"]]
    most = 100 * max(map(abs, found["off"]))
    return Table(
        f"Prompt tokens found in a cache, medians of the repeats; they differ by {most:.2f} points at most",
        ["two data parallel ranks, or two instances", "found"],
        rows,
    )
