"""The data of `/ui`: one router's own data, several routers' data as one, and the conclusions from them. Pure.

`Overview.own` is one router's data; `whole` adds the other routers' data and draws the conclusions: percentiles,
attainment, rates, and which pool is the bottleneck. Engine figures are the asked router's own (all routers see the
same); legs, queues, results and times are sums over the routers that answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from cluster.spec import SloClass
from router.admin import basis
from router.admin.bottleneck import PoolsSeen, bottleneck
from router.admin.pools import Looks, together_pools
from router.core.slo import COUNTED, MET
from router.predict.predictors import RequestPredictor
from router.scheduler.scheduler import Scheduler
from router.telemetry.explain_store import ExplainStore
from router.telemetry.pairs import PairCounts, Pairs
from router.telemetry.recomputed import Recomputed
from router.telemetry.rolling import KINDS, NOW_SLOTS, SLOT_S, SLOTS, RollingStatistics, percentile, together

Json = dict[str, Any]

REQUESTS: Final = 12
"""The number of requests shown with their decisions: so many open ones, and so many that have ended."""

PAIRS: Final = 200
"""The number of pairs that one router reports: first those that may not hand over now, then those that failed most. Of
the others, where proofs are needed, those may hand over whose P's `gives` and D's `takes` are equal and not 0."""

_SHARES: Final = (0.5, 0.9, 0.99)


class Overview:
    """One router's own data."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: ExplainStore,
        lately: RollingStatistics,
        pairs: Pairs,
        recomputed: Recomputed,
        classes: Mapping[str, SloClass],
        predictor: RequestPredictor | None = None,
    ) -> None:
        """`predictor`: None if the policy needs no predictions."""
        self._predictor: Final = predictor
        self._scheduler: Final = scheduler
        self._memory: Final = memory
        self._lately: Final = lately
        self._pairs: Final = pairs
        self._recomputed: Final = recomputed
        self.classes = classes
        """The classes' current promises."""
        self._looks: Final = Looks()

    def look(self, now: float, parts: Mapping[str, float]) -> None:
        """Take the figures of one second. `parts`: seconds by part of first tokens' times since the process began."""
        self._looks.look(self._scheduler, now)
        self._lately.look(now, len(self._scheduler.line), parts)

    def own(self, router: str, now: float, reader: str | None = None) -> Json:
        """All of this router's data. `reader`: a tenant, which sees only its own requests and the instances that serve
        it.
        """
        return {
            "router": router,
            "pools": self._looks.told(self._scheduler.view.all()),
            "waiting": self._looks.history(now),
            "in_line": self._looks.history_in_line(now),
            "instances": self._instances(now, reader),
            "basis": self._basis(reader),
            "pairs": self._told_pairs(reader),
            "served_whole": [] if self._scheduler.guard is None else self._scheduler.guard.served_whole(),
            "line": len(self._scheduler.line),
            "late_s": round(self._looks.late_s, 4),
            "classes": {
                name: dict(slo.targets()) | {"attainment": slo.attainment} for name, slo in self.classes.items()
            },
            "lately": self._lately.told(now),
            "requests": [
                {
                    **story.line(now),
                    "ago_s": round(now - story.timeline.arrived, 1),
                    "router": router,
                    "choice": story.choice(),
                }
                for story in self._memory.both(REQUESTS, reader)
            ],
        }

    def _basis(self, reader: str | None) -> list[Json]:
        """What the predictions rest on; empty if the policy needs none."""
        if not self._scheduler.remembers:
            return []
        fleet = self._scheduler.view.all()
        theirs = [seen for seen in fleet if seen.instance.serves(reader)]
        return basis.of_fleet(fleet, theirs) + basis.of_requests(self._predictor)

    def _instances(self, now: float, reader: str | None) -> list[Json]:
        told, foresees = [], self._scheduler.remembers
        for seen in self._scheduler.view.all():
            if not seen.instance.serves(reader):
                continue
            prompts, generated = self._looks.rates(seen.id, now)
            load, again = seen.load, self._recomputed.of(seen.id)
            rests_on = basis.of_instance(self._scheduler.view.all(), seen) if foresees else {}
            told.append(
                {
                    "id": seen.id,
                    "role": seen.role.value,
                    "state": seen.said_state,
                    "detail": seen.aside,
                    "models": list(seen.models),
                    "epoch": seen.instance.epoch,
                    "weights": seen.instance.weights,
                    "node": seen.instance.node,
                    "tenants": sorted(seen.instance.tenants) if reader is None else [],
                    "legs": seen.inflight,
                    "credits": seen.credits,
                    "running": load.running,
                    "waiting": load.waiting,
                    "deferred": load.deferred,
                    "kv_usage": load.kv_usage,
                    "prompt_tokens_s": round(prompts, 1),
                    "generation_tokens_s": round(generated, 1),
                    "recomputed_tokens": None if again is None else again.recomputed,
                    "recomputed_lately": 0 if again is None else again.lately,
                    "basis": {name: each.as_json() for name, each in rests_on.items()},
                    **self._scheduler.view.all().pairing.circles_of(seen.row),
                }
            )
        return told

    def _told_pairs(self, reader: str | None) -> list[Json]:
        known = {(pair.prefill, pair.decode): pair for pair in self._pairs}
        fleet = self._scheduler.view.all()
        apart = fleet.pairing.parted_pairs()
        unproven = fleet.unproven_pairs(PAIRS)
        for pair in sorted((apart | unproven | fleet.pairing.inexact.keys()) - known.keys()):
            known[pair] = PairCounts(*pair)
        if reader is not None:
            theirs = {seen.id for seen in fleet if seen.instance.serves(reader)}
            known = {names: pair for names, pair in known.items() if theirs.issuperset(names)}
        order = sorted(
            known.items(), key=lambda one: (one[0] not in apart | unproven, -one[1].failed, -one[1].handed_over)
        )
        return [
            {
                "prefill": pair.prefill,
                "decode": pair.decode,
                "handed_over": pair.handed_over,
                "failed": pair.failed,
                "last_failure": fleet.pairing.distrusted.get(names)
                or (
                    f"not proven yet: {fleet.pairing.doubts.get(names, '')}" if names in unproven else pair.last_failure
                ),
                "apart": names in apart or names in unproven,
                "unseeded": fleet.pairing.inexact.get(names, ""),
            }
            for names, pair in order[:PAIRS]
        ]


def whole(own: Json, others: Mapping[str, Json | str], unproven: Mapping[str, str] | None = None) -> Json:
    """The page's data. `others`: by router name its own data, or why there is none. `unproven`: names in the registry
    that are ignored, and why.
    """
    heard = [each for each in others.values() if not isinstance(each, str)]
    lately = together(each["lately"] for each in (own, *heard))
    pools = together_pools(own["pools"], [each["pools"] for each in heard])
    now = lately["now"]
    rate = sum(now["outcomes"].values()) / own["lately"]["now_s"]
    results = now["results"].values()
    verdict = bottleneck(
        PoolsSeen(
            prefill=pools["prefill"],
            decode=pools["decode"],
            both=pools["both"],
            rate=rate,
            late_s=max(each["late_s"] for each in (own, *heard)),
            judged=sum(_judged(each) for each in results),
            late_ttft=sum(each.get("late_ttft", 0) for each in results),
            late_tpot=sum(each.get("late_tpot", 0) for each in results),
            ttft_parts=now["waits"],
        )
    )
    return {
        "router": own["router"],
        "routers": _routers(own, others),
        "unproven": unproven or {},
        "bottleneck": verdict.as_json(),
        "rate": round(rate, 2),
        "line": own["line"] + sum(each["line"] for each in heard),
        "pools": {name: _pool(name, own, seen) for name, seen in pools.items()},
        "instances": _legs_added(own["instances"], heard),
        "basis": own["basis"],
        "pairs": _pairs_added([own, *heard]),
        "served_whole": sorted({name for each in (own, *heard) for name in each["served_whole"]}),
        "classes": [_class(name, told, lately) for name, told in own["classes"].items()],
        "windows": {"now": _window(now), "five_minutes": _window(lately["five_minutes"])},
        "window_s": {"now": NOW_SLOTS * SLOT_S, "five_minutes": SLOTS * SLOT_S},
        "history": {"slot_s": SLOT_S, "slots": _slots(own, heard, lately)},
        "requests": _newest([each for told in (own, *heard) for each in told["requests"]]),
    }


def _newest(requests: Iterable[Json]) -> list[Json]:
    by_age = sorted(requests, key=lambda each: float(each["ago_s"]))
    is_open = [each for each in by_age if each["state"] == "open"]
    ended = [each for each in by_age if each["state"] != "open"]
    return is_open[:REQUESTS] + ended[:REQUESTS]


def _routers(own: Json, others: Mapping[str, Json | str]) -> list[Json]:
    told = [{"router": own["router"], "state": "this one", "line": own["line"], "late_s": own["late_s"]}]
    for name, each in others.items():
        if isinstance(each, str):
            told.append({"router": name, "state": "silent", "detail": each})
        else:
            told.append({"router": name, "state": "answers", "line": each["line"], "late_s": each["late_s"]})
    return told


def _pool(name: str, own: Json, seen: Any) -> Json:
    mine = [each for each in own["instances"] if each["role"] == name]
    return {
        "instances": len(mine),
        "ready": seen.instances,
        "running": round(seen.running, 1),
        "waiting": round(seen.waiting, 1),
        "pulling": round(seen.pulling, 1),
        "in_line": round(seen.in_line, 1),
        "places": round(seen.places, 1),
        "limit": seen.limit,
        "kv_usage": round(seen.kv_usage, 4),
        "prompt_tokens_s": round(sum(each["prompt_tokens_s"] for each in mine), 1),
        "generation_tokens_s": round(sum(each["generation_tokens_s"] for each in mine), 1),
    }


def _legs_added(instances: Iterable[Json], heard: Iterable[Json]) -> list[Json]:
    """Each instance with the legs of all routers."""
    legs: dict[str, int] = {}
    for told in heard:
        for each in told["instances"]:
            legs[each["id"]] = legs.get(each["id"], 0) + each["legs"]
    return [{**each, "legs": each["legs"] + legs.get(each["id"], 0)} for each in instances]


def _pairs_added(told: Iterable[Json]) -> list[Json]:
    found: dict[tuple[str, str], Json] = {}
    for each in (pair for one in told for pair in one["pairs"]):
        known = found.get((each["prefill"], each["decode"]))
        if known is None:
            found[each["prefill"], each["decode"]] = dict(each)
            continue
        for name in ("handed_over", "failed"):
            known[name] += each[name]
        known["last_failure"] = known["last_failure"] or each["last_failure"]
        known["apart"] = known["apart"] or each["apart"]
        known["unseeded"] = known["unseeded"] or each["unseeded"]
    order = sorted(
        found.values(), key=lambda pair: (not pair["apart"], -pair["failed"], pair["prefill"], pair["decode"])
    )
    return order[:PAIRS]


def _judged(results: Mapping[str, int]) -> int:
    return sum(count for result, count in results.items() if result in COUNTED)


def _class(name: str, told: Json, lately: Json) -> Json:
    said: Json = {"name": name, "targets": told}
    for window in ("now", "five_minutes"):
        results = lately[window]["results"].get(name, {})
        counted = _judged(results)
        said[window] = {
            "attainment": results.get(MET, 0) / counted if counted else None,
            "counted": counted,
            **{each: results.get(each, 0) for each in ("missed", "shed", "late_ttft", "late_tpot")},
        }
    return said


def _window(told: Json) -> Json:
    outcomes = told["outcomes"]
    served = outcomes.get("served", 0)
    times = {}
    for kind in KINDS:
        found = [percentile(told["values"][kind], share) for share in _SHARES]
        times[kind] = [None if each is None else round(each * 1000, 1) for each in found]
    count = max(1, sum(told["values"]["ttft"].values()))
    parts = {name: round(seconds * 1000 / count, 1) for name, seconds in told["waits"].items()}
    return {
        "ended": sum(outcomes.values()),
        "served": served,
        "outcomes": outcomes,
        "line": round(told["line"], 1),
        "times_ms": times,
        "ttft_parts_ms": dict(sorted(parts.items(), key=lambda each: -each[1])),
    }


def _slots(own: Json, heard: Iterable[Json], lately: Json) -> list[Json]:
    """This router's slots with the figures of all routers. A peer of another version may have more slots, or fewer."""
    in_line = together({"in_line": each["in_line"]} for each in (own, *heard))["in_line"]
    count = len(own["waiting"])
    return [
        {**_slot(each), "waiting": {name: round(number + queued.get(name, 0.0), 2) for name, number in engines.items()}}
        for each, engines, queued in zip(lately["history"][-count:], own["waiting"], in_line[-count:], strict=True)
    ]


def _slot(told: Json) -> Json:
    means = {
        f"{kind}_ms": round(told[f"{kind}_s"] / told[f"{kind}_n"] * 1000, 1) if told[f"{kind}_n"] else None
        for kind in KINDS
    }
    return {"ended": told["ended"], "line": round(told["line"], 1), **means}
