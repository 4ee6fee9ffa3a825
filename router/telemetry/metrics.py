"""The router's own metrics, with the names that operators see in Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.ids import InstanceId
from router.core.clients import OpenBodies
from router.fleet.view import FleetView
from router.http.doors import Doors
from router.http.uploads import Uploads
from router.predict.early_cost import EarlyLegCosts
from router.telemetry.attainment import Attainment
from router.telemetry.finished import FinishedRequests
from router.telemetry.flow import RouterFlow
from router.telemetry.histograms import Counts, Histograms, Times
from router.telemetry.pairs import Pairs
from router.telemetry.recomputed import Recomputed
from router.telemetry.rolling import RollingStatistics
from router.telemetry.timing import RequestTimeline

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Buckets from a router's own overhead to a long generation."""


def _notes_lost(registry: CollectorRegistry) -> Counter:
    told = "Notes of other routers about their load: refused (not proven, or unreadable), or missing ones noticed."
    return Counter("baton_peer_notes_lost", told, ["why"], registry=registry)


def _at_hand_over(registry: CollectorRegistry) -> tuple[Counter, Counter]:
    """The counters of early legs and of seeds."""
    told = (
        "Decode legs that were sent while P computed: used, closed (P's leg gave no hold), lost, or answered first "
        "(D's first token came before P's answer)."
    )
    seeds = Counter("baton_seeds", "First tokens given to clients before the handoff.", registry=registry)
    return Counter("baton_early_legs", told, ["result"], registry=registry), seeds


class RouterMetrics:
    """Counters and histograms of one router process: an attribute for each."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lately = RollingStatistics()
        self.flow = RouterFlow()
        self.registry.register(_Arrivals(self.flow))
        self._requests = Counts(
            "baton_requests",
            "Requests that ended, by way and outcome.",
            ["path", "way", "outcome"],
            registry=self.registry,
        )
        told = "Requests answered by the router itself with an error."
        self.rejected = Counter("baton_rejected", told, ["status"], registry=self.registry)
        told = "Prefill leg: send to answer. Decode leg: send to first byte."
        self._leg_seconds = Histograms("baton_leg_seconds", told, ["leg"], _SECONDS, self.registry)
        told = "Arrival to first byte of the answer."
        self._first_byte_seconds = Histograms("baton_first_byte_seconds", told, [], _SECONDS, self.registry)
        told = "Arrival to last byte."
        self._request_seconds = Histograms("baton_request_seconds", told, [], _SECONDS, self.registry)
        self.releases = _releases(self.registry)
        self.retries = Counter(
            "baton_retries",
            "Requests sent again elsewhere: before anything of D's was relayed (again), beside a prefill leg that is "
            "silent (second), or as a broken stream's resumption (resumed).",
            ["kind"],
            registry=self.registry,
        )
        told = "Engines' answers that were none: too_long, encoded, malformed (no HTTP), no_completion (nonsense)."
        self.unfit = Counter("baton_unfit_answers", told, ["why"], registry=self.registry)
        self.early_legs, self.seeds = _at_hand_over(self.registry)
        self.broken_seams = Counter(
            "baton_broken_seams",
            "Streams that did not go on with what their client had been given; ended with an error.",
            registry=self.registry,
        )
        self.times = Times(self.registry, _SECONDS)
        self.finished = FinishedRequests(self.times, self.lately)
        self.attainment, self.sources = Attainment(self.registry), PrefixSources(self.registry)
        self.waiting = Gauge("baton_waiting_requests", "Requests in the flow-control queue.", registry=self.registry)
        self.open = Gauge("baton_open_requests", "Requests in flight.", registry=self.registry)
        self.clients = _ClientGauges(self.registry)
        self._handoffs = Counts(
            "baton_handoffs",
            "Decode legs that pull, by result: ok when the answer began, failed when the leg came to nothing.",
            ["result"],
            registry=self.registry,
        )
        self.proofs = Counter(
            "baton_pair_proofs",
            "Proofs of pairs by result: passed, failed, or none (an instance had no place, or did not answer).",
            ["result"],
            registry=self.registry,
        )
        told = "Entries of the decision log that could not be written; requests are served all the same."
        self.log_dropped = Counter("baton_decision_log_dropped", told, registry=self.registry)
        self._notes_lost = _notes_lost(self.registry)
        told = "Instances let in again, as routers together had set aside more than they announce; each router counts."
        self.displaced = Counter("baton_quarantine_displaced", told, registry=self.registry)
        self.pairs = Pairs()
        self.registry.register(_PairFailures(self.pairs))
        self.recomputed = Recomputed()
        self.registry.register(_Recomputed(self.recomputed))
        self.handoffs_off = _HandoffsOff()
        self.registry.register(self.handoffs_off)
        self.early_costs = _EarlyCosts(self.registry)
        self._fleet = _FleetGauges(self.registry)
        told = "1 while a controller that sizes the fleet is heard in the registry."
        self._controlled = Gauge("baton_controller_heard", told, registry=self.registry)

    def note_lost(self, why: str) -> None:
        """A note of a router peer is of no use (`router.fleet.load_sharing`)."""
        self._notes_lost.labels(why).inc()

    def leg(self, leg: str, seconds: float) -> None:
        """A prefill leg was answered, or an answering leg has begun or failed, `seconds` after it was sent."""
        self._leg_seconds.observe((leg,), seconds)

    def first_byte(self, seconds: float) -> None:
        """An answer begins, `seconds` after its request came."""
        self._first_byte_seconds.observe((), seconds)

    def ended(self, path: str, way: str, outcome: str, seconds: float) -> None:
        """A request is over."""
        self._requests.add((path, way, outcome))
        self._request_seconds.observe((), seconds)

    def over(self, now: float, outcome: str, timeline: RequestTimeline, tokens: int | None) -> None:
        """A request has ended, after `tokens` tokens. `now` in monotonic seconds."""
        if outcome == "served":
            self.finished.add(now, timeline, tokens)
        else:
            self.finished.count()
            self.lately.ended(now, outcome)

    def pulled(self, prefill: InstanceId, decode: InstanceId, failure: str | None) -> None:
        """A decode leg that pulls from this prefill instance has begun to answer (`failure` None), or why it failed."""
        self.pairs.tried(prefill, decode, failure)
        self._handoffs.add(("ok" if failure is None else "failed",))

    def text(
        self, view: FleetView, waiting: int, stale_s: float = 0.0, unproven: int = 0, *, controlled: bool = False
    ) -> bytes:
        """Prometheus text, with up-to-date gauges of the fleet and the queue, without instances that have left.

        Args:
            view: the fleet as this router sees it.
            waiting: requests in the flow-control queue.
            stale_s: seconds since the registry was last heard; 0 while it is heard.
            unproven: members of the registry that are ignored for want of a proof.
            controlled: whether a goodput controller is heard.
        """
        self.waiting.set(waiting)
        self._controlled.set(controlled)
        self._fleet.show(view, stale_s, unproven)
        return generate_latest(self.registry)


def _releases(registry: CollectorRegistry) -> Counter:
    """Both results have a series from the start: `increase` of one that is born at 50 is 0."""
    made = Counter("baton_releases", "Holds given back without a pull, by result.", ["ok"], registry=registry)
    for ok in ("true", "false"):
        made.labels(ok)
    return made


class _PairFailures(Collector):
    """Counters from the remembered pairs: bounded, however many names a fleet uses up."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

    def collect(self) -> Iterable[CounterMetricFamily]:
        """What Prometheus reads."""
        told = "Failed hand-overs by pair of instances that handed over, or tried to."
        family = CounterMetricFamily("baton_pair_failures", told, labels=("prefill", "decode"))
        for pair in self._pairs:  # those without failures too: `increase` of a series that is born at 5 is 0
            family.add_metric((pair.prefill, pair.decode), pair.failed)
        yield family


class _Recomputed(Collector):
    """Counters from the engines' reports about recomputed tokens."""

    def __init__(self, counted: Recomputed) -> None:
        self._counted = counted

    def collect(self) -> Iterable[CounterMetricFamily]:
        """What Prometheus reads."""
        told = "Prompt tokens that were handed over to this instance and that it computed itself nevertheless."
        recomputed = CounterMetricFamily("baton_handoff_recomputed_tokens", told, labels=("instance",))
        told = "Prompt tokens whose KV cache this instance had from elsewhere."
        pulled = CounterMetricFamily("baton_handoff_pulled_tokens", told, labels=("instance",))
        for name, each in self._counted:
            recomputed.add_metric((name,), each.recomputed)
            pulled.add_metric((name,), each.pulled)
        return recomputed, pulled


class _Arrivals(Collector):
    """Counters from what the router announces to the goodput controller."""

    def __init__(self, flow: RouterFlow) -> None:
        self._flow = flow

    def collect(self) -> Iterable[CounterMetricFamily]:
        """What Prometheus reads."""
        labels = ("model", "slo_class")
        told = "Requests that came for a model, with a right to be served: those that were shed, too."
        arrivals = CounterMetricFamily("baton_arrivals", told, labels=labels)
        told = "Prompt tokens of these, as estimated when they came."
        tokens = CounterMetricFamily("baton_arrived_prompt_tokens", told, labels=labels)
        for each in self._flow.told():
            arrivals.add_metric((each.model, each.slo_class), each.arrivals)
            tokens.add_metric((each.model, each.slo_class), each.prompt_tokens)
        return arrivals, tokens


class PrefixSources:
    """Counters of source legs: prompts' beginnings that instances have from peers' prefix caches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        told = "Instances that were asked for a prompt's beginning: held, nothing, refused, lost, late, gone, unwanted."
        self._asked = Counter("baton_prefix_sources", told, ["outcome"], registry=registry)
        told = "Prompt tokens that such instances held for another to pull."
        self._tokens = Counter("baton_prefix_source_tokens", told, registry=registry)

    def asked(self, outcome: str, tokens: int) -> None:
        """An instance was asked for a prompt's beginning, and holds `tokens` tokens of it."""
        self._asked.labels(outcome).inc()
        self._tokens.inc(tokens)


class HandoffGuardMetrics(Protocol):
    """Switches hand-overs off by class while they lose (`router.scheduler.scoring.handoff_guard`)."""

    def off(self) -> Mapping[str, bool]:
        """By class, whether hand-overs are off."""


class _HandoffsOff(Collector):
    """Gauges from the guard of a router's scheduler."""

    def __init__(self) -> None:
        self.guard: HandoffGuardMetrics | None = None

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """What Prometheus reads."""
        told = "1 while requests of this class are served whole, since handing them over has lost."
        family = GaugeMetricFamily("baton_handoffs_off", told, labels=("slo_class",))
        for name, off in ({} if self.guard is None else self.guard.off()).items():
            family.add_metric((name,), off)
        yield family


class _EarlyCosts(Collector):
    """What a router's scheduler has found of early legs and pulls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.costs: EarlyLegCosts | None = None
        registry.register(self)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """What Prometheus reads."""
        costs = self.costs
        told = "Decode legs that could be early and were sent after P's answer: early legs are dearer, or are compared."
        forgone = CounterMetricFamily("baton_early_legs_forgone", told, labels=("why",))
        for why, count in () if costs is None else costs.pulled.items():
            forgone.add_metric((why,), count)
        yield forgone
        told = "How much later D's first token comes with an early leg than with a pull; below 0: sooner."
        extra = GaugeMetricFamily("baton_early_leg_extra_seconds", told, labels=("prefill", "near", "queued"))
        for prefill, near, queued, extra_ms in () if costs is None else costs.found():
            extra.add_metric((prefill, str(near).lower(), str(queued).lower()), extra_ms / 1000.0)
        yield extra


class _ClientGauges(Collector):
    """What clients hold of this router, updated at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._connections = Gauge("baton_client_connections", "Connections of clients.", registry=registry)
        self._most = Gauge(
            "baton_client_connections_max", "Connections that clients may have open here.", registry=registry
        )
        self._doors: Doors | None = None
        registry.register(self)
        self._upload_bytes = Gauge("baton_upload_bytes", "Bytes of bodies that are being read.", registry=registry)
        self._uploads = Gauge("baton_uploads_waiting", "Uploads that wait for their turn.", registry=registry)
        self._open_bytes = Gauge("baton_open_body_bytes", "Bytes of open requests' bodies.", registry=registry)

    def show(self, doors: Doors, uploads: Uploads, bodies: OpenBodies) -> None:
        """Update the gauges."""
        self._doors = doors
        self._connections.set(len(doors.guests))
        self._most.set(doors.guests_max)
        self._upload_bytes.set(uploads.bytes)
        self._uploads.set(uploads.waiting)
        self._open_bytes.set(bodies.bytes)

    def collect(self) -> Iterable[CounterMetricFamily]:
        """What Prometheus reads."""
        told = "Connections without room at the bound: idle ones closed for new ones, and new ones refused."
        family = CounterMetricFamily("baton_client_connections_ended", told, labels=("what",))
        doors = self._doors
        family.add_metric(("closed",), 0 if doors is None else doors.closed)
        family.add_metric(("refused",), 0 if doors is None else doors.refused)
        yield family
        told = "TLS handshakes of clients: begun, and how they ended."
        family = CounterMetricFamily("baton_tls_handshakes", told, labels=("outcome",))
        for outcome, count in () if doors is None else doors.handshakes.items():
            family.add_metric((outcome,), count)
        yield family


class _FleetGauges:
    """What this router sees of the fleet, updated at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["instance", "role"]
        self._up = Gauge("baton_instance_up", "1 when the instance answers.", labels, registry=registry)
        self._inflight = Gauge(
            "baton_instance_inflight", "Legs of this router running there.", labels, registry=registry
        )
        self._quarantined = Gauge(
            "baton_instance_quarantined",
            "1 when an operator has set the instance aside: it gets no new legs.",
            labels,
            registry=registry,
        )
        self._stale = Gauge(
            "baton_registry_stale_seconds",
            "How long the registry has not been heard, or took no heartbeats; 0 while all is well, or without one.",
            registry=registry,
        )
        self._unproven = Gauge(
            "baton_registry_unproven",
            "Instances and routers in the registry that do not prove themselves; they are ignored.",
            registry=registry,
        )
        self._legs = Gauge(
            "baton_leg_ready",
            "1 when some instance takes such legs; never without a value.",
            ["leg"],
            registry=registry,
        )
        self._apart = Gauge(
            "baton_pair_apart",
            "1 where nothing is handed over for now, as pulls or the pair's proof failed; other pairs are not here.",
            ["prefill", "decode"],
            registry=registry,
        )
        self._peer_requests = Gauge(
            "baton_peer_requests",
            "Requests of other routers that this router's choices count, as those routers have told of them.",
            registry=registry,
        )
        self._routers = Gauge("baton_routers", "Routers that share the fleet, as this one sees it.", registry=registry)
        self._shown: set[tuple[str, str]] = set()

    def show(self, view: FleetView, stale_s: float, unproven: int) -> None:
        """Update the gauges; instances that have left are left out."""
        self._unproven.set(unproven)
        self._stale.set(stale_s)
        self._routers.set(view.routers)
        self._peer_requests.set(view.peer_load.bookings)
        ready = [seen.role for seen in view.all() if seen.ready]
        self._legs.labels("prefill").set(any(role.prefills for role in ready))
        self._legs.labels("decode").set(any(role.decodes for role in ready))
        self._apart.clear()
        for pair in view.all().pairing.parted_pairs():
            self._apart.labels(*pair).set(1)
        shown = set()
        for seen in view.all():
            labels = (str(seen.id), seen.role.value)
            shown.add(labels)
            self._up.labels(*labels).set(1 if seen.up else 0)
            self._inflight.labels(*labels).set(seen.inflight)
            self._quarantined.labels(*labels).set(1 if seen.aside else 0)
        for labels in self._shown - shown:
            for gauge in (self._up, self._inflight, self._quarantined):
                gauge.remove(*labels)
        self._shown = shown
