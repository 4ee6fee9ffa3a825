"""Metrics that must exist before anything has happened: an alert cannot see a metric that does not exist."""

from __future__ import annotations

import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from cluster.ids import InstanceId
from cluster.instance import Instance, Role
from cluster.spec import SloClass
from router.core.clients import Client
from router.core.slo import COUNTED, MISSED
from router.core.values import Wanted
from router.fleet.view import FleetView
from router.scheduler.placements import SchedulingContext
from router.telemetry.metrics import RouterMetrics


def samples(meters: RouterMetrics, view: FleetView, name: str, label: str) -> dict[str, float]:
    families = text_string_to_metric_families(meters.text(view, 0).decode())
    return {each.labels[label]: each.value for family in families for each in family.samples if each.name == name}


def test_a_leg_that_no_instance_runs_is_exported_as_zero() -> None:
    meters, view = RouterMetrics(), FleetView()
    assert samples(meters, view, "baton_leg_ready", "leg") == {"prefill": 0, "decode": 0}
    for name, role in (("p", Role.PREFILL), ("b", Role.BOTH)):
        view.add(Instance(id=InstanceId(name), role=role, url=f"http://{name}"))
    assert samples(meters, view, "baton_leg_ready", "leg") == {"prefill": 0, "decode": 0}, "neither has answered yet"
    view.get(InstanceId("p")).up = True
    assert samples(meters, view, "baton_leg_ready", "leg") == {"prefill": 1, "decode": 0}
    view.get(InstanceId("b")).up = True
    assert samples(meters, view, "baton_leg_ready", "leg") == {"prefill": 1, "decode": 1}, "b runs both legs"
    view.set_aside({InstanceId("b"): "answers wrong"})
    assert samples(meters, view, "baton_leg_ready", "leg") == {"prefill": 1, "decode": 0}


def test_a_class_that_never_met_its_targets_has_a_counter_of_met_ones() -> None:
    meters = RouterMetrics()
    client = Client("acme", "fast", SloClass(ttft_ms=500.0))
    context = SchedulingContext(Wanted(model=None, hand_over=True))
    meters.attainment.ended(dataclasses.replace(client, slo=None), context, MISSED)
    assert samples(meters, FleetView(), "baton_slo_requests_total", "result") == {}, "without targets none is counted"
    meters.attainment.ended(client, context, MISSED)
    told = samples(meters, FleetView(), "baton_slo_requests_total", "result")
    assert told == {**dict.fromkeys(COUNTED, 0.0), MISSED: 1.0}
