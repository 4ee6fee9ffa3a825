"""The router's own metrics, by the names operators see in Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.attainment import Attainment
from router.histograms import Times
from router.view import View

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Buckets from a router's own overhead to a long generation."""


class Meters:
    """Counters and histograms of one router process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "baton_requests",
            "Requests that ended, by way and outcome.",
            ["path", "way", "outcome"],
            registry=self.registry,
        )
        self.rejected = Counter(
            "baton_rejected",
            "Requests answered by the router itself with an error.",
            ["status"],
            registry=self.registry,
        )
        self.leg_seconds = Histogram(
            "baton_leg_seconds",
            "Prefill leg: send to answer. Decode leg: send to first byte.",
            ["leg"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_byte_seconds = Histogram(
            "baton_first_byte_seconds", "Arrival to first byte of the answer.", buckets=_SECONDS, registry=self.registry
        )
        self.request_seconds = Histogram(
            "baton_request_seconds", "Arrival to last byte.", buckets=_SECONDS, registry=self.registry
        )
        self.releases = Counter(
            "baton_releases", "Holds given back without a pull, by result.", ["ok"], registry=self.registry
        )
        self.retries = Counter(
            "baton_retries",
            "Requests sent again elsewhere: before anything of D's was relayed (again), beside a prefill leg that is "
            "silent (second), or as a broken stream's resumption (resumed).",
            ["kind"],
            registry=self.registry,
        )
        self.seeds = Counter("baton_seeds", "First tokens given to clients before the handoff.", registry=self.registry)
        self.broken_seams = Counter(
            "baton_broken_seams",
            "Streams that did not go on with what their client had been given; ended with an error.",
            registry=self.registry,
        )
        self.times = Times(self.registry, _SECONDS)
        self.attainment = Attainment(self.registry)
        self.waiting = Gauge("baton_waiting_requests", "Requests in line for a place.", registry=self.registry)
        self.open = Gauge("baton_open_requests", "Requests in flight.", registry=self.registry)
        self.instance_up = Gauge(
            "baton_instance_up", "1 when the instance answers.", ["instance", "role"], registry=self.registry
        )
        self.instance_inflight = Gauge(
            "baton_instance_inflight",
            "Legs of this router running there.",
            ["instance", "role"],
            registry=self.registry,
        )

    def text(self, view: View, waiting: int) -> bytes:
        """Prometheus text, with the fleet's gauges and the line's brought up to date."""
        self.waiting.set(waiting)
        for seen in view.all():
            labels = (seen.id, seen.role.value)
            self.instance_up.labels(*labels).set(1 if seen.up else 0)
            self.instance_inflight.labels(*labels).set(seen.inflight)
        return generate_latest(self.registry)
