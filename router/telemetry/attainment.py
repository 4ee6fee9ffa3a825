"""SLO attainment, for Prometheus, by class and tenant. A shell: the counters of this process.

Requests that were shed have an outcome of their own: if they counted as cancelled, every alert would stay green.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from cluster.spec import SloClass
from router.core.clients import Client
from router.core.slo import COUNTED, MET, ClientSeen
from router.telemetry.histograms import Counts, Histograms

LAST: Final = 1000
"""The number of a class's requests that the attainment gauge covers: enough for two digits, few enough to follow a
change."""

_RATIOS: Final[tuple[float, ...]] = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)


class Scheduled(Protocol):
    """The parts of a scheduled request (`router.scheduler.placements.SchedulingContext`) that are counted here."""

    late: bool
    degraded: bool
    ttft_ms: float
    tpot_ms: float


class Attainment:
    """Counters and gauges of one router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._results = Counts(
            "baton_slo_requests",
            "Requests of a class that ended: met, missed, shed; and those that do not count: left (the client went "
            "away in time), refused (by the engine), unknown (one piece, its first token was not seen).",
            ["slo_class", "tenant", "result"],
            registry=registry,
        )
        self._late = Counter(
            "baton_slo_late",
            "Requests that were given up: their first token could not come in time, they were served late or shed.",
            ["slo_class", "tenant"],
            registry=registry,
        )
        self._degraded = Counter(
            "baton_slo_degraded",
            "Requests that were held to their class's second promise.",
            ["slo_class", "tenant"],
            registry=registry,
        )
        self._share = Gauge(
            "baton_slo_attainment",
            f"Of the last {LAST} requests that count, the share that met every target of their class.",
            ["slo_class"],
            registry=registry,
        )
        self._target = Gauge(
            "baton_slo_attainment_target", "What the cluster file promises.", ["slo_class"], registry=registry
        )
        self._foretold = Histograms(
            "baton_foretold_ratio",
            "What a client saw over what was predicted with the choice: 1 is right, 2 took twice as long.",
            ["what"],
            _RATIOS,
            registry,
        )
        self._expected = Counter(
            "baton_prefix_expected_tokens",
            "Prompt tokens expected to be in the cache of the instance chosen for it, where it said what was there.",
            registry=registry,
        )
        self._found = Counter("baton_prefix_found_tokens", "Of those, the ones that were there.", registry=registry)
        self._cached = Counter(
            "baton_prefix_cached_tokens", "Prompt tokens that were there, expected or not.", registry=registry
        )
        self._last: dict[str, deque[bool]] = {}
        self._met: dict[str, int] = {}
        """The number of requests in `_last` that met every target, by class."""

    def ended(self, client: Client, context: Scheduled, result: str) -> None:
        """Count a request that is over, if it has a class. `result`: of `router.core.slo`."""
        if client.slo is None:
            return
        name = client.slo_class
        if name not in self._last:
            self._first(client, client.slo)
        self._results.add((name, client.tenant, result))
        if context.late:
            self._late.labels(name, client.tenant).inc()
        if context.degraded:
            self._degraded.labels(name, client.tenant).inc()
        if result in COUNTED:
            last = self._last[name]
            if not last:  # without a counted request the class has no share
                self._share.labels(name).set_function(lambda: self._met[name] / len(self._last[name]))
            self._met[name] += (result == MET) - (last[0] if len(last) == LAST else 0)
            last.append(result == MET)

    def _first(self, client: Client, slo: SloClass) -> None:
        """The first request of a class has ended."""
        name = client.slo_class
        self._last[name] = deque(maxlen=LAST)
        self._met[name] = 0
        for each in COUNTED:  # export all counters of the class, also those that are still zero
            self._results.add((name, client.tenant, each), 0)
        self._target.labels(name).set(slo.attainment)

    def retarget(self, classes: Mapping[str, SloClass]) -> None:
        """The promises have changed; earlier results still count."""
        for name, slo in classes.items():
            if name in self._last:
                self._target.labels(name).set(slo.attainment)

    def compare(self, context: Scheduled, seen: ClientSeen) -> None:
        """Count what the client saw over what was predicted, for each time that has both."""
        if context.ttft_ms > 0 and seen.ttft_ms is not None:
            self._foretold.observe(("ttft",), seen.ttft_ms / context.ttft_ms)
        if context.tpot_ms > 0 and seen.tpot_ms is not None:
            self._foretold.observe(("tpot",), seen.tpot_ms / context.tpot_ms)

    def prefix(self, expected_tokens: int, cached_tokens: int) -> None:
        """An engine has reported how many of a prompt's tokens were cached."""
        self._expected.inc(expected_tokens)
        self._found.inc(min(expected_tokens, cached_tokens))
        self._cached.inc(cached_tokens)
